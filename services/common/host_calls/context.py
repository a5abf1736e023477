"""A call's context, as gRPC's handlers know it."""

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn

import grpc

from kvblend.host_calls.frames import pack_metadata, unpack_metadata
from kvblend.v1 import host_calls_pb2 as pb
from services.common.host_calls.watch import Watch
from services.common.logs import get_logger

_log = get_logger("host calls")


class Aborted(Exception):
    """The handler has ended the call."""


class HostContext(grpc.ServicerContext):  # type: ignore[misc]
    """Of one call on a connection that carries no other meanwhile."""

    def __init__(self, head: pb.HostCall, connection: socket.socket, watch: Watch) -> None:
        self._connection, self._watch = connection, watch
        self._deadline = time.monotonic() + head.timeout_us / 1e6
        self._metadata = unpack_metadata(head.metadata)
        self._trailing: tuple[tuple[str, Any], ...] = ()
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._ended = False

    # What the handler asks.

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        return self._metadata

    def time_remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def is_active(self) -> bool:
        """Whether the caller still waits."""
        if self._ended or time.monotonic() > self._deadline:
            return False
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """`callback` runs when the answer has left or the caller has; False: that has been."""
        with self._lock:
            if self._ended:
                return False
            self._callbacks.append(callback)
            if len(self._callbacks) == 1:
                self._watch.add(self._connection, self._deadline, self._look)
        return True

    def _look(self) -> None:
        # What was noticed may have been of an earlier connection with the same descriptor.
        if not self.is_active():
            self.cancel()

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, Any], ...]:
        return self._trailing

    def peer(self) -> str:
        return "unix:"

    def peer_identities(self) -> None:
        return None

    def peer_identity_key(self) -> None:
        return None

    def auth_context(self) -> dict[str, bytes]:
        return {}

    # What the handler says.

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def send_initial_metadata(self, initial_metadata: Any) -> None:
        raise NotImplementedError("answers within a host have no initial metadata")

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, Any]]) -> None:
        """Of a failure; answers have none."""
        self._trailing = tuple(trailing_metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        # As in gRPC: aborting is no success.
        self.fail(grpc.StatusCode.UNKNOWN if code is grpc.StatusCode.OK else code, details)
        raise Aborted(details)

    def abort_with_status(self, status: grpc.Status) -> NoReturn:
        self.set_trailing_metadata(status.trailing_metadata or ())
        self.abort(status.code, status.details)

    def cancel(self) -> bool:
        """Runs the callbacks. After them no answer leaves: they may have taken back what it would say."""
        with self._lock:
            if self._ended:
                # The connection may have the next call already.
                return False
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self.end()
        return True

    # What the server does.

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def failure(self) -> pb.HostAnswer | None:
        """The frame that ends a failed call."""
        if self._code in (None, grpc.StatusCode.OK):
            return None
        return pb.HostAnswer(
            code=self._code.value[0], details=self._details, trailing_metadata=pack_metadata(self._trailing)
        )

    def end(self) -> None:
        """Runs the callbacks, once: the answer has left, or nobody waits for it."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            callbacks, self._callbacks = self._callbacks, []
            if callbacks:
                # Before any thread can close the connection, whose descriptor another one would get.
                self._watch.remove(self._connection)
        for callback in callbacks:
            try:
                callback()
            except Exception as error:
                _log.error("unexpected error after a call", exc_info=error)
