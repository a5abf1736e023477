"""redis-py's connections with a socket on which everything ends by a deadline.

redis-py's socket timeout bounds a single `recv`; a server that drips would hold a caller much longer. Here each socket
operation gets what is left until `connection.bounded.deadline`.
"""

import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection

READ_BYTES = 256 << 10
_UNIX_SEND_BYTES = 1 << 20


class BoundedSocket:
    """A socket whose operations all end by `deadline` (monotonic seconds)."""

    def __init__(self, inner: socket.socket, deadline: float) -> None:
        self._inner = inner
        self.deadline = deadline
        # It may hold what the kernel does not know of: to be readable, as poll says it, is not all.
        self.is_buffered = isinstance(inner, ssl.SSLSocket)

    def _armed(self) -> socket.socket:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._inner.settimeout(left)
        return self._inner

    def sendall(self, data: bytes | memoryview) -> None:
        self._armed().sendall(data)

    def never_wait(self) -> None:
        """Before `send_now` and `receive_now`, which do what can be done at once."""
        self._inner.settimeout(0)

    def send_now(self, buffers: Sequence[bytes | memoryview]) -> int:
        """As much of them as there is room for, from where they lie: how many bytes, 0 if there is none yet."""
        try:
            if self.is_buffered:
                return self._inner.send(buffers[0])
            return self._inner.sendmsg(buffers)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def receive_now(self, buffers: Sequence[memoryview]) -> int:
        """Into the buffers, none of them empty, one after another, as much as is there: how many bytes, 0 if there are
        none yet."""
        try:
            count = self._inner.recv_into(buffers[0]) if self.is_buffered else self._inner.recvmsg_into(buffers)[0]
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def recv_into(self, buffer: bytearray) -> int:
        return self._armed().recv_into(buffer)

    def recv(self, size: int) -> bytes:
        return self._armed().recv(size)

    def settimeout(self, timeout: float | None) -> None:
        """The deadline alone decides."""

    def is_quiet(self) -> bool:
        """Nothing to read: neither the server's farewell nor a reply that nobody asked for."""
        poller = select.poll()
        poller.register(self._inner, select.POLLIN)
        return not poller.poll(0)

    def set_send_buffer(self, size: int) -> None:
        self._inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    def fileno(self) -> int:
        return self._inner.fileno()

    def shutdown(self, how: int) -> None:
        self._inner.shutdown(how)

    def close(self) -> None:
        self._inner.close()


class _Bounded:
    """Mixed into redis-py's connections: its socket becomes a `BoundedSocket`."""

    bounded: BoundedSocket
    socket_connect_timeout: float

    def _connect(self) -> BoundedSocket:
        inner: socket.socket = super()._connect()  # type: ignore[misc]
        self.bounded = BoundedSocket(inner, time.monotonic() + self.socket_connect_timeout)
        return self.bounded


class _Tcp(_Bounded, Connection):
    pass


class _Tls(_Bounded, SSLConnection):
    pass


class _Unix(_Bounded, UnixDomainSocketConnection):
    def _connect(self) -> BoundedSocket:
        connected = super()._connect()
        # TCP finds its own size; what the system does not allow is cut.
        connected.set_send_buffer(_UNIX_SEND_BYTES)
        return connected


# redis-py's class -> the same with a bounded socket.
BOUNDED: dict[Any, Any] = {Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix}
