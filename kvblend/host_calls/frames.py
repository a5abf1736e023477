"""Frames on a stream socket, as host_calls.proto defines them."""

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
# What a socket holds at most, about: room for more would be taken in vain.
_PIECE_BYTES = 1 << 18


class FrameTooLarge(ValueError):
    """Of this side's own making: nothing was sent. Or of the other's: the connection is of no use."""


def be_patient(connection: socket.socket, deadline: float | None) -> None:
    """What is done next on the connection ends by `deadline` (monotonic clock, seconds). Raises TimeoutError."""
    if deadline is None:
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def send_frame(
    connection: socket.socket, head: bytes, *body: bytes | memoryview, deadline: float | None = None
) -> None:
    """The parts of the body are sent one behind the other. Raises OSError (TimeoutError included) and FrameTooLarge."""
    body_bytes = sum(map(len, body))
    if len(head) + body_bytes > MOST_BYTES:
        raise FrameTooLarge(f"a message of {len(head) + body_bytes} bytes is above the limit of {MOST_BYTES}")
    be_patient(connection, deadline)
    lengths = _LENGTHS.pack(len(head), body_bytes)
    if body_bytes <= _COPIED_BYTES:
        connection.sendall(b"".join((lengths, head, *body)))
        return
    parts = [memoryview(part) for part in (lengths + head, *body)]
    sent = connection.sendmsg(parts)
    for part in parts:
        if sent < len(part):
            be_patient(connection, deadline)
            connection.sendall(part[sent:])
        sent = max(0, sent - len(part))


def receive_frame(connection: socket.socket, deadline: float | None = None) -> tuple[bytes, bytes]:
    """(head, body). Raises OSError (TimeoutError included), FrameTooLarge, and EOFError when the other side is gone."""
    be_patient(connection, deadline)
    head_bytes, body_bytes = _LENGTHS.unpack(_receive(connection, _LENGTHS.size, deadline))
    if head_bytes + body_bytes > MOST_BYTES:
        raise FrameTooLarge(f"a message of {head_bytes + body_bytes} bytes is above the limit of {MOST_BYTES}")
    return _receive(connection, head_bytes, deadline), _receive(connection, body_bytes, deadline)


def _receive(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    if not size:
        return b""
    data = connection.recv(min(size, _PIECE_BYTES))
    if len(data) == size:
        return data
    parts = [data]
    missing = size - len(data)
    while missing:
        if not parts[-1]:
            raise EOFError("the other side has ended the connection")
        be_patient(connection, deadline)
        parts.append(connection.recv(min(missing, _PIECE_BYTES)))
        missing -= len(parts[-1])
    return b"".join(parts)


def pack_metadata(metadata: Iterable[tuple[str, Any]] | None) -> list[pb.HostMetadata]:
    return [
        pb.HostMetadata(key=key, value=value if isinstance(value, bytes) else value.encode())
        for key, value in metadata or ()
    ]


def unpack_metadata(metadata: Iterable[pb.HostMetadata]) -> tuple[tuple[str, str | bytes], ...]:
    """Values of "-bin" keys stay bytes, as in gRPC. Raises UnicodeDecodeError."""
    return tuple((item.key, item.value if item.key.endswith("-bin") else item.value.decode()) for item in metadata)
