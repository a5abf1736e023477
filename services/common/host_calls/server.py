"""Serves a service's methods to callers of its host."""

import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvblend.host_calls.frames import SUFFIX, Frames, FrameTooLarge
from kvblend.v1 import host_calls_pb2 as pb
from services.common.host_calls.context import Aborted, HostContext
from services.common.host_calls.watch import Watch
from services.common.logs import get_logger
from services.common.unix_server import UnixServer

_log = get_logger("host calls")

# How long a caller may leave its answer in the socket.
_SEND_SECONDS = 10
# Those that callers keep for later, beside those with calls.
_IDLE_CONNECTIONS = 512
_YEAR = 365 * 24 * 3600.0

# The handler of a method's full name, as gRPC has it, or None.
Route = Callable[[str], Any]


class Turns:
    """Calls served at once, and how many may wait for their turn."""

    def __init__(self, served: int, waiting: int) -> None:
        self._free = threading.Semaphore(served)
        self._places = threading.Semaphore(waiting)

    @contextmanager
    def turn(self, context: HostContext) -> Iterator[None]:
        """Raises Aborted."""
        if not self._free.acquire(blocking=False):
            self._wait(context)
        try:
            yield
        finally:
            self._free.release()

    def _wait(self, context: HostContext) -> None:
        if not self._places.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls wait for their turn")
        try:
            if not self._free.acquire(timeout=min(_YEAR, context.time_remaining())):
                context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "its turn did not come in time")
        finally:
            self._places.release()


class HostCallServer(UnixServer):
    """What `route` finds for a method's name, on the socket beside that of gRPC at `beside`. See UnixServer."""

    def __init__(self, beside: Path, route: Route, turns: Turns, most_calls: int) -> None:
        """More than `most_calls` are refused by `turns`."""
        super().__init__(beside, SUFFIX, _Caller, most_calls + _IDLE_CONNECTIONS)
        self.route, self.turns = route, turns
        self.watch = Watch()
        self._changed = threading.Condition()
        self._idle: set[socket.socket] = set()
        self._callers = 0
        self._stopping = False

    def start(self) -> None:
        self.watch.start()
        super().start()

    def begin_stop(self) -> None:
        """Takes no more calls."""
        self.stop_accepting()
        with self._changed:
            self._stopping = True
            for connection in self._idle:
                # A call that is on its way is told so.
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)

    def stop(self, seconds: float) -> None:
        """After `begin_stop`: gives calls in flight `seconds`, and ends the rest."""
        with self._changed:
            self._changed.wait_for(lambda: not self._callers, seconds)
        self.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._callers, seconds)
        self.watch.close()

    @contextmanager
    def caller(self) -> Iterator[None]:
        with self._changed:
            self._callers += 1
        try:
            yield
        finally:
            with self._changed:
                self._callers -= 1
                self._changed.notify_all()

    def idle(self, connection: socket.socket) -> bool:
        """The connection waits for a call. Whether one may come."""
        with self._changed:
            if not self._stopping:
                self._idle.add(connection)
            return not self._stopping

    def busy(self, connection: socket.socket) -> bool:
        """A call has come. Whether it may begin."""
        with self._changed:
            self._idle.discard(connection)
            return not self._stopping


class _Caller(socketserver.BaseRequestHandler):
    """A connection: one call after another."""

    server: HostCallServer
    request: socket.socket

    def setup(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self.frames = Frames(self.request)

    def handle(self) -> None:
        # Its end: the caller's, or the server's.
        with self.server.caller(), suppress(OSError, EOFError):
            try:
                if self.server.idle(self.request):
                    self.frames.send(b"", b"")
                    while self._serve() and self.server.idle(self.request):
                        pass
            finally:
                self.server.busy(self.request)

    def _serve(self) -> bool:
        """One call, whose messages go with it. Whether there may be another one."""
        try:
            head, body = self.frames.receive()
            call = pb.HostCall.FromString(head)
            context = HostContext(call, self.request, self.server.watch)
        except (FrameTooLarge, DecodeError, UnicodeDecodeError) as error:
            _log.warning("a connection is ended: this is no call", reason=str(error))
            return False
        try:
            self._answer(call.method, body, context)
        finally:
            context.end()
        return True

    def _answer(self, method: str, body: bytes, context: HostContext) -> None:
        try:
            self._run(method, body, context)
        except Aborted:
            pass
        except FrameTooLarge as error:
            context.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except (OSError, EOFError):
            raise
        except Exception as error:
            if context.failure() is None:
                _log.error("unexpected error in a call", method=method, exc_info=error)
                context.fail(grpc.StatusCode.UNKNOWN, f"unexpected {type(error).__name__}")
        failure = context.failure()
        if failure is not None:
            self.frames.send(failure.SerializeToString(), b"")

    def _run(self, method: str, body: bytes, context: HostContext) -> None:
        if not self.server.busy(self.request):
            context.abort(grpc.StatusCode.UNAVAILABLE, "the service is stopping")
        handler = self.server.route(method)
        if handler is None or handler.request_streaming:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served within a host")
        try:
            request = handler.request_deserializer(body)
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be read")
        with self.server.turns.turn(context):
            if handler.response_streaming:
                with closing(handler.unary_stream(request, context)) as answers:
                    for answer in answers:
                        self.frames.send(_MORE, handler.response_serializer(answer))
                answer, head = b"", _END
            else:
                answer, head = handler.response_serializer(handler.unary_unary(request, context)), b""
        if context.failure() is not None:
            return
        if not context.time_remaining():
            # A handler that saw this may have ended early, and its answer be a part of one.
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self.frames.send(head, answer)


_MORE = pb.HostAnswer(more=True).SerializeToString()
_END = pb.HostAnswer(end_of_stream=True).SerializeToString()
