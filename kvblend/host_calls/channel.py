"""gRPC's channel to a service on the same host, whose calls go over the socket beside gRPC's where there is one."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import grpc

from kvblend.host_calls.appended import Appended, whole
from kvblend.host_calls.calls import AnswerStream, Decode, Ended, Failed, LaterAnswer, Running
from kvblend.host_calls.connections import Connections, Unreachable
from kvblend.host_calls.frames import FrameTooLarge, pack_metadata
from kvblend.host_calls.order import SlowCalls, time_left
from kvblend.v1 import host_calls_pb2 as pb

Encode = Callable[[Any], bytes]
Metadata = tuple[tuple[str, str | bytes], ...] | None

_UNIX = "unix:"
# Health and reflection are gRPC's own.
_PACKAGE = "/kvblend."
# More is as good as none.
_DAY = 24 * 3600.0


class MissingDeadline(RuntimeError):
    """A programming error: a call was made without a timeout."""


def host_channel(target: str, channel: grpc.Channel, repeatable: Sequence[str] = ()) -> grpc.Channel:
    """A channel that makes the same calls as `channel`, and faster where `target` is one unix socket (gRPC's).

    Calls need a timeout. Requests may be `Appended`. gRPC takes those whose service has no such socket or does not
    take them, those of more than a day, and those that stream requests (and need no timeout). A lost answer is
    UNAVAILABLE; where the method ("package.Service/Method") is `repeatable`, it is asked for again over gRPC.
    """
    is_one_socket = target.startswith(_UNIX) and "," not in target
    return _HostChannel(target.removeprefix(_UNIX) if is_one_socket else "", channel, repeatable)


class _HostChannel(grpc.Channel):  # type: ignore[misc]
    def __init__(self, path: str, channel: grpc.Channel, repeatable: Sequence[str]) -> None:
        self._channel: Any = channel
        self._connections = Connections(path)
        self._slow = SlowCalls()
        self._repeatable = frozenset(f"/{method}" for method in repeatable)

    def unary_unary(
        self,
        method: str,
        request_serializer: Encode | None = None,
        response_deserializer: Decode | None = None,
        _registered_method: bool | None = False,
    ) -> Any:
        grpc_call = self._channel.unary_unary(method, request_serializer, response_deserializer, _registered_method)
        way = self._way(method, request_serializer, response_deserializer)
        return _UnaryCall(way, grpc_call, repeatable=method in self._repeatable) if way else grpc_call

    def unary_stream(
        self,
        method: str,
        request_serializer: Encode | None = None,
        response_deserializer: Decode | None = None,
        _registered_method: bool | None = False,
    ) -> Any:
        grpc_call = self._channel.unary_stream(method, request_serializer, response_deserializer, _registered_method)
        way = self._way(method, request_serializer, response_deserializer)
        return _StreamCall(way, grpc_call) if way else grpc_call

    def _way(self, method: str, encode: Encode | None, decode: Decode | None) -> "_Way | None":
        """None: the method is gRPC's own."""
        return (
            _Way(self._connections, self._slow, method, encode or bytes, decode or bytes)
            if method.startswith(_PACKAGE)
            else None
        )

    def stream_unary(self, *arguments: Any, **more: Any) -> Any:
        return self._channel.stream_unary(*arguments, **more)

    def stream_stream(self, *arguments: Any, **more: Any) -> Any:
        return self._channel.stream_stream(*arguments, **more)

    def subscribe(self, callback: Callable[[Any], None], try_to_connect: bool = False) -> None:
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[Any], None]) -> None:
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        self._connections.close()
        self._channel.close()

    def __enter__(self) -> "_HostChannel":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Way:
    """How calls of one method are sent."""

    def __init__(self, connections: Connections, slow: SlowCalls, method: str, encode: Encode, decode: Decode) -> None:
        self._connections, self._method, self._encode = connections, method, encode
        self.slow, self.decode = slow, decode

    def timed(self, timeout: float | None) -> float:
        """Raises MissingDeadline."""
        if timeout is None:
            raise MissingDeadline(f"{self._method} was called without a timeout")
        return timeout

    def begin(self, request: Any, timeout: float, metadata: Metadata) -> Running:
        """Raises Unreachable: gRPC is to be asked; Failed."""
        if timeout > _DAY:
            raise Unreachable("a call without end")
        if self.slow.any():
            raise Unreachable("a call before it went over gRPC")
        deadline = time.monotonic() + timeout
        head = pb.HostCall(
            method=self._method,
            timeout_us=max(1, int(timeout * 1e6)),
            metadata=pack_metadata(metadata),
        )
        try:
            body = request.parts() if isinstance(request, Appended) else self._encode(request)
            connection = self._connections.begin(head.SerializeToString(), body, deadline)
        except TimeoutError:
            raise Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        except FrameTooLarge as error:
            raise Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
        return Running(connection, self._connections, deadline)


class _UnaryCall(grpc.UnaryUnaryMultiCallable):  # type: ignore[misc, type-arg]
    def __init__(self, way: _Way, grpc_call: Any, *, repeatable: bool) -> None:
        self._way, self._grpc_call, self._repeatable = way, grpc_call, repeatable

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Metadata = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        answer, _ = self.with_call(request, timeout, metadata, credentials, wait_for_ready, compression)
        return answer

    def with_call(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Metadata = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        start, allowed = time.monotonic(), self._way.timed(timeout)
        try:
            running = self._way.begin(request, allowed, metadata)
            try:
                return running.next_answer(self._way.decode)[1], _OK
            finally:
                running.abandon()
        except Unreachable:
            pass
        except Failed as failure:
            if not self._repeatable or failure.code() != grpc.StatusCode.UNAVAILABLE:
                raise
        left = time_left(allowed, start)
        # What may be carried out twice may be carried out late.
        with nullcontext() if self._repeatable else self._way.slow.one(left):
            return self._grpc_call.with_call(whole(request), left, metadata, credentials, wait_for_ready, compression)

    def future(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Metadata = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        start, allowed = time.monotonic(), self._way.timed(timeout)
        if not self._repeatable:
            with suppress(Unreachable):
                return LaterAnswer(lambda: self._way.begin(request, allowed, metadata), self._way.decode)
        left = time_left(allowed, start)
        if not self._repeatable:
            self._way.slow.begins(left)
        return self._grpc_call.future(whole(request), left, metadata, credentials, wait_for_ready, compression)


_OK = Ended(grpc.StatusCode.OK)


class _StreamCall(grpc.UnaryStreamMultiCallable):  # type: ignore[misc, type-arg]
    def __init__(self, way: _Way, grpc_call: Any) -> None:
        self._way, self._grpc_call = way, grpc_call

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Metadata = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        start, allowed = time.monotonic(), self._way.timed(timeout)
        try:
            return AnswerStream(self._way.begin(request, allowed, metadata), self._way.decode)
        except Unreachable:
            left = time_left(allowed, start)
            self._way.slow.begins(left)
            return self._grpc_call(whole(request), left, metadata, credentials, wait_for_ready, compression)
