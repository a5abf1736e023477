"""Frames on a stream socket, as host_calls.proto defines them."""

import select
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

from kvblend.v1 import host_calls_pb2 as pb

SUFFIX = ".calls"
# As gRPC's limit of the services.
MOST_BYTES = 16 << 20

_LENGTHS = struct.Struct("<II")
# Smaller ones are sent in one piece; larger ones are not copied.
_COPIED_BYTES = 1 << 14
# Room for what is read: most frames are whole at once. One that grew for a larger frame is kept up to a limit: fresh
# memory costs more than the bytes that are read into it.
_ROOM_BYTES = 1 << 14
_KEPT_BYTES = 1 << 20


# A message, or its parts one behind the other.
Body = bytes | tuple[bytes | memoryview, ...]


class FrameTooLarge(ValueError):
    """Of this side's own making: nothing was sent. Or of the other's: the connection is of no use."""


class Frames:
    """Frames over a stream socket that blocks. Thread-safe for one that sends and one that receives.

    What has a deadline (monotonic clock, seconds) raises TimeoutError when that is over. As few system calls as can be:
    each lets another thread have the interpreter.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        # What was read and not yet given out lies at its start.
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._filled = 0

    def send(self, head: bytes, body: Body, deadline: float | None = None) -> None:
        """Raises OSError (TimeoutError included) and FrameTooLarge."""
        body_parts = body if isinstance(body, tuple) else (body,)
        body_bytes = sum(map(len, body_parts))
        if len(head) + body_bytes > MOST_BYTES:
            raise FrameTooLarge(f"a message of {len(head) + body_bytes} bytes is above the limit of {MOST_BYTES}")
        flags = socket.MSG_NOSIGNAL
        if deadline is not None:
            _left(deadline)
            flags |= socket.MSG_DONTWAIT
        parts = [_LENGTHS.pack(len(head), body_bytes) + head, *body_parts]
        if body_bytes <= _COPIED_BYTES:
            parts = [b"".join(parts)]
        self._send_all([memoryview(part) for part in parts], flags, deadline)

    def _send_all(self, parts: list[memoryview], flags: int, deadline: float | None) -> None:
        while parts:
            sent = self._send_some(parts, flags, deadline)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def _send_some(self, parts: list[memoryview], flags: int, deadline: float | None) -> int:
        while True:
            try:
                return self._socket.sendmsg(parts, (), flags)
            except BlockingIOError:
                if deadline is None:
                    # The socket's own patience (SO_SNDTIMEO) is at its end.
                    raise
            writable = select.poll()
            writable.register(self._socket, select.POLLOUT)
            writable.poll(_left(deadline))

    def receive(self, deadline: float | None = None) -> tuple[bytes, bytes]:
        """(head, body). Raises OSError (TimeoutError included), FrameTooLarge; EOFError: the other side is gone."""
        self._fill(_LENGTHS.size, deadline)
        head_bytes, body_bytes = _LENGTHS.unpack_from(self._room)
        if head_bytes + body_bytes > MOST_BYTES:
            raise FrameTooLarge(f"a message of {head_bytes + body_bytes} bytes is above the limit of {MOST_BYTES}")
        start = _LENGTHS.size + head_bytes
        end = start + body_bytes
        self._fill(end, deadline)
        frame = bytes(self._room[_LENGTHS.size : start]), bytes(self._room[start:end])
        self._drop(end)
        return frame

    def _fill(self, size: int, deadline: float | None) -> None:
        """Reads until there are `size` bytes, and what else has come."""
        if size > len(self._room):
            self._make_room(size)
        while self._filled < size:
            if deadline is not None and not self._readable.poll(_left(deadline)):
                raise TimeoutError
            count = self._socket.recv_into(self._room[self._filled :])
            if not count:
                raise EOFError("the other side has ended the connection")
            self._filled += count

    def _drop(self, size: int) -> None:
        """The first `size` bytes have been given out."""
        rest = self._filled - size
        if rest:
            self._room[:rest] = self._room[size : self._filled].tobytes()
        self._filled = rest
        if len(self._room) > _KEPT_BYTES:
            self._make_room(max(rest, _ROOM_BYTES))

    def _make_room(self, size: int) -> None:
        room = memoryview(bytearray(size))
        room[: self._filled] = self._room[: self._filled]
        self._room = room

    def wait(self, until: float) -> bool:
        """Whether there is something to read by then (monotonic clock, seconds)."""
        return bool(self._filled or self._readable.poll(max(0.0, 1000 * (until - time.monotonic()))))

    def is_quiet(self) -> bool:
        """Whether the other side has sent nothing more, and not ended."""
        return not self._filled and not self._readable.poll(0)


def _left(deadline: float) -> float:
    """Milliseconds. Raises TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left * 1000


def pack_metadata(metadata: Iterable[tuple[str, Any]] | None) -> list[pb.HostMetadata]:
    return [
        pb.HostMetadata(key=key, value=value if isinstance(value, bytes) else value.encode())
        for key, value in metadata or ()
    ]


def unpack_metadata(metadata: Iterable[pb.HostMetadata]) -> tuple[tuple[str, str | bytes], ...]:
    """Values of "-bin" keys stay bytes, as in gRPC. Raises UnicodeDecodeError."""
    return tuple((item.key, item.value if item.key.endswith("-bin") else item.value.decode()) for item in metadata)
