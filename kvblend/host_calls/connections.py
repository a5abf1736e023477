"""Connections to one service's socket for calls: each carries one call at a time, and is kept for the next."""

import os
import socket
import struct
import time
from collections import deque
from contextlib import suppress

from kvblend.host_calls.frames import SUFFIX, Body, Frames

# More than this many are not kept for later calls.
_KEPT = 16
# A busy service does not take one at once.
_CONNECT_SECONDS = 1.0
_GREETING = (b"", b"")


class Unreachable(Exception):
    """No service takes calls at this socket, and none has seen the call."""


class Connection:
    """One call at a time, within its deadline (monotonic clock, seconds)."""

    def __init__(self, path: str, deadline: float) -> None:
        """`path` is that of gRPC's socket. Raises Unreachable, TimeoutError."""
        self._process = os.getpid()
        try:
            self._socket, self._frames = _connect(path, min(deadline, time.monotonic() + _CONNECT_SECONDS))
        except (OSError, EOFError, ValueError) as error:
            if time.monotonic() >= deadline:
                raise TimeoutError from error
            raise Unreachable(f"{path}{SUFFIX}: {error}") from error

    def is_open(self) -> bool:
        """Whether the service has not ended it meanwhile, and sent nothing that belongs to no call."""
        return self._frames.is_quiet()

    def send(self, head: bytes, body: Body, deadline: float) -> None:
        """Raises FrameTooLarge, TimeoutError; Unreachable: the service has not got the whole of it."""
        try:
            self._frames.send(head, body, deadline)
        except TimeoutError:
            raise
        except OSError as error:
            raise Unreachable(str(error)) from error

    def receive(self, deadline: float) -> tuple[bytes, bytes]:
        """The next frame. Raises OSError (TimeoutError included), EOFError, FrameTooLarge."""
        return self._frames.receive(deadline)

    def wait(self, until: float) -> bool:
        """Whether a part of a frame, or the end, is there by then."""
        return self._frames.wait(until)

    def interrupt(self) -> None:
        """Ends the call at both ends, whatever another thread is doing with it; not that of the process forked from."""
        if self._process == os.getpid():
            with suppress(OSError):
                # It has ended already.
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # Closing alone would leave it open where a fork has a copy.
        self.interrupt()
        self._socket.close()


def _connect(path: str, deadline: float) -> tuple[socket.socket, Frames]:
    """A connection that the service has taken. Raises OSError (TimeoutError included), EOFError, ValueError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Never waits, not even where too many wait to be taken.
        connection.setblocking(False)
        connection.connect(path + SUFFIX)
        connection.setblocking(True)
        _, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user not in (0, os.stat(path).st_uid):
            raise PermissionError("it is not of the user whose gRPC's socket is")
        frames = Frames(connection)
        if frames.receive(deadline) != _GREETING:
            raise ValueError("it does not greet")
    except BaseException:
        connection.close()
        raise
    return connection, frames


class Connections:
    """Those to the service whose gRPC's socket is at `path`; "": there is none. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self._process = os.getpid()
        self.closed = False

    def begin(self, head: bytes, body: Body, deadline: float) -> Connection:
        """A connection over which this call has been sent. Raises FrameTooLarge, TimeoutError, Unreachable."""
        if not self._path:
            raise Unreachable("not on this host")
        self._leave_to_parent()
        while (connection := self._take()) is not None:
            try:
                return self._sent(connection, head, body, deadline)
            except Unreachable:
                # The service was restarted, say.
                continue
        return self._sent(Connection(self._path, deadline), head, body, deadline)

    def _take(self) -> Connection | None:
        """The one that was used last, and so is likely the warmest, if it is of any use."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_open():
                return connection
            connection.close()

    def _sent(self, connection: Connection, head: bytes, body: Body, deadline: float) -> Connection:
        self._busy.add(connection)
        try:
            if self.closed:
                raise Unreachable("closed")
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
        self._leave_to_parent()
        self.closed = True
        self._drop_idle()
        for connection in list(self._busy):
            connection.interrupt()

    def _leave_to_parent(self) -> None:
        """After a fork these are copies of connections with the parent's calls."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        for connection in self._busy:
            connection.close()
        self._busy.clear()
        self._drop_idle()

    def __del__(self) -> None:
        self._drop_idle()

    def _drop_idle(self) -> None:
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return
