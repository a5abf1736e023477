"""Connections to one service's socket for calls: each carries one call at a time, and is kept for the next."""

import os
import socket
import time
from collections import deque

from kvblend.host_calls.frames import receive_frame, send_frame

# More than this many are not kept for later calls.
_KEPT = 16
_CONNECT_SECONDS = 1.0


class Unreachable(Exception):
    """No service takes calls at this socket, and none has seen the call."""


class Connection:
    """One call at a time, within its deadline (monotonic clock, seconds)."""

    def __init__(self, path: str, deadline: float) -> None:
        """Raises Unreachable."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._patience(min(deadline, time.monotonic() + _CONNECT_SECONDS))
            self._socket.connect(path)
        except OSError as error:
            self.close()
            raise Unreachable(f"{path}: {error}") from error

    def _patience(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def is_open(self) -> bool:
        """Whether the service has not ended it meanwhile."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        # It has ended, or what is there belongs to no call.
        return False

    def send(self, head: bytes, body: bytes, deadline: float) -> None:
        """Raises FrameTooLarge, TimeoutError; Unreachable: the service has not got the whole of it."""
        self._patience(deadline)
        try:
            send_frame(self._socket, head, body)
        except TimeoutError:
            raise
        except OSError as error:
            raise Unreachable(str(error)) from error

    def receive(self, deadline: float) -> tuple[bytes, bytes]:
        """The next frame. Raises OSError (TimeoutError included), EOFError, FrameTooLarge."""
        self._patience(deadline)
        return receive_frame(self._socket)

    def interrupt(self) -> None:
        """Ends the call at both ends, whatever another thread is doing with it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It has ended already.
            return

    def close(self) -> None:
        self._socket.close()


class Connections:
    """Those to one path. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self._process = os.getpid()
        self.closed = False

    def begin(self, head: bytes, body: bytes, deadline: float) -> Connection:
        """A connection over which this call has been sent. Raises FrameTooLarge, TimeoutError, Unreachable."""
        if self.closed:
            raise Unreachable("closed")
        while (connection := self._take()) is not None:
            try:
                return self._sent(connection, head, body, deadline)
            except Unreachable:
                # The service was restarted, say.
                continue
        return self._sent(Connection(self._path, deadline), head, body, deadline)

    def _take(self) -> Connection | None:
        """The one that was used last, and so is likely the warmest, if it is of any use."""
        if self._process != os.getpid():
            # A fork's copies: the connections belong to the parent's calls.
            self._process = os.getpid()
            self._busy.clear()
            self._drop_idle()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_open():
                return connection
            connection.close()

    def _sent(self, connection: Connection, head: bytes, body: bytes, deadline: float) -> Connection:
        self._busy.add(connection)
        try:
            connection.send(head, body, deadline)
        except BaseException:
            self.drop(connection)
            raise
        return connection

    def keep(self, connection: Connection) -> None:
        """Of a call that has been answered to its end."""
        if self.closed or len(self._idle) >= _KEPT:
            self.drop(connection)
            return
        self._busy.discard(connection)
        self._idle.append(connection)
        if self.closed:
            self._drop_idle()

    def drop(self, connection: Connection) -> None:
        """Of a call that is to end, if it has not."""
        self._busy.discard(connection)
        connection.close()

    def close(self) -> None:
        """Ends the calls under way."""
        self.closed = True
        self._drop_idle()
        for connection in list(self._busy):
            connection.interrupt()

    def _drop_idle(self) -> None:
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return
