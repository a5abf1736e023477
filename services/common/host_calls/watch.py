"""Notices callers that are gone, or whose time is up, while a handler works for them."""

import os
import select
import socket
import threading
import time
from collections.abc import Callable

# A caller ends its connection at its deadline: this is for those that are stopped.
_LOOK_SECONDS = 0.1
# For callbacks that have begun.
_JOIN_SECONDS = 5.0


class Watch:
    """One thread for all calls of a server. Thread-safe."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.EPOLLIN)
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[float, Callable[[], None]]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="callers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, connection: socket.socket, deadline: float, look: Callable[[], None]) -> None:
        """`look` is called, in the watching thread, when the other end may have ended or `deadline` has passed."""
        descriptor = connection.fileno()
        with self._lock:
            if self._closing:
                return
            self._watched[descriptor] = (deadline, look)
            self._poll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def remove(self, connection: socket.socket) -> None:
        descriptor = connection.fileno()
        with self._lock:
            if self._watched.pop(descriptor, None) is not None:
                self._poll.unregister(descriptor)

    def _run(self) -> None:
        while not self._closing:
            found = [descriptor for descriptor, _ in self._poll.poll(_LOOK_SECONDS)]
            now = time.monotonic()
            with self._lock:
                late = [descriptor for descriptor, (deadline, _) in self._watched.items() if deadline < now]
                looks = [self._watched[descriptor][1] for descriptor in {*found, *late} if descriptor in self._watched]
            for look in looks:
                look()

    def close(self) -> None:
        """What is still watched is not any more: calls that outlive the server end by themselves."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._watched.clear()
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            # Else a callback does not end: what it is called with goes with the process.
            self._poll.close()
            os.close(self._wake)
