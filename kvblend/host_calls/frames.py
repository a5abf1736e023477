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
# Read at once: most frames are whole then.
_PIECE_BYTES = 1 << 14


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
        # What came behind the last frame.
        self._rest = b""

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
        data = self._rest or self._receive_some(_PIECE_BYTES, deadline)
        while len(data) < _LENGTHS.size:
            data += self._receive_some(_PIECE_BYTES, deadline)
        head_bytes, body_bytes = _LENGTHS.unpack_from(data)
        if head_bytes + body_bytes > MOST_BYTES:
            raise FrameTooLarge(f"a message of {head_bytes + body_bytes} bytes is above the limit of {MOST_BYTES}")
        start = _LENGTHS.size + head_bytes
        while len(data) < start:
            data += self._receive_some(start - len(data), deadline)
        head, end = data[_LENGTHS.size : start], start + body_bytes
        if len(data) < end:
            return head, self._receive_rest(data[start:], body_bytes, deadline)
        self._rest = data[end:]
        return head, data[start:end]

    def _receive_rest(self, data: bytes, size: int, deadline: float | None) -> bytes:
        self._rest = b""
        parts, missing = [data], size - len(data)
        while missing:
            parts.append(self._receive_some(missing, deadline))
            missing -= len(parts[-1])
        return b"".join(parts)

    def _receive_some(self, size: int, deadline: float | None) -> bytes:
        if deadline is not None and not self._readable.poll(_left(deadline)):
            raise TimeoutError
        data = self._socket.recv(size)
        if not data:
            raise EOFError("the other side has ended the connection")
        return data

    def wait(self, until: float) -> bool:
        """Whether there is something to read by then (monotonic clock, seconds)."""
        return bool(self._rest or self._readable.poll(max(0.0, 1000 * (until - time.monotonic()))))

    def is_quiet(self) -> bool:
        """Whether the other side has sent nothing more, and not ended."""
        return not self._rest and not self._readable.poll(0)


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
