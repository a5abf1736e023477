"""The way to the server that holds the log: a pool of connections, and another server when it is another."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from redis.exceptions import ClusterDownError, MovedError, ReadOnlyError, ResponseError

from services.common.redis_connection import BoundedConnection, LinkError, Options, dial
from services.common.redis_route import Route
from services.matcher.log.rules import unavailable

_T = TypeVar("_T")
# What a server says that no longer holds the log, or does not yet.
_ELSEWHERE = (ReadOnlyError, MovedError, ClusterDownError)


class RedisLink:
    """Thread-safe. `dials` counts connections made: something else may be at the other end after each."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.dials = 0
        self._lock = threading.Lock()
        self._idle: list[BoundedConnection] = []
        self._primary: Options | None = None
        self._closed = False

    def run(self, operation: Callable[[BoundedConnection], _T], deadline: float) -> _T:
        """What `operation` returns for a connection to the primary. It is run a second time if the first connection
        fails or is to the wrong server, so it must be one that may be repeated.

        Raises KvblendError LOG_UNAVAILABLE, by `deadline` (monotonic seconds) at the latest.
        """
        for last_attempt in (False, True):
            try:
                with self._connection(deadline) as connection:
                    return operation(connection)
            except LinkError as error:
                self._leave(error)
                if last_attempt or time.monotonic() >= deadline:
                    raise unavailable(f"the log at {self.route.name} cannot be reached: {error}") from None
            except ResponseError as error:
                if isinstance(error, _ELSEWHERE):
                    self._leave(error)
                if last_attempt or not isinstance(error, _ELSEWHERE):
                    raise unavailable(f"the log at {self.route.name} refuses: {error}") from None
        raise AssertionError("the last attempt returns or raises")

    def refresh(self, deadline: float) -> None:
        """Asks who holds the log: the server that did may go on answering after another has taken its place."""
        try:
            primary = self.route.primary(deadline)
        except LinkError:
            # Nobody can tell, but the log itself may well be there.
            return
        with self._lock:
            moved, self._primary = self._primary != primary, primary
        if moved:
            self._drop_idle()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._drop_idle()

    @property
    def primary(self) -> Options | None:
        return self._primary

    @contextmanager
    def _connection(self, deadline: float) -> Iterator[BoundedConnection]:
        primary = self._known_primary() or self._find_primary(deadline)
        connection = self._quiet_connection() or self._dial(primary, deadline)
        connection.until(deadline)
        try:
            yield connection
        finally:
            with self._lock:
                keep = not self._closed and self._primary == primary and connection.is_usable()
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def _known_primary(self) -> Options | None:
        with self._lock:
            if self._closed:
                raise unavailable("the log is closed")
            return self._primary

    def _find_primary(self, deadline: float) -> Options:
        primary = self.route.primary(deadline)
        with self._lock:
            self._primary = primary
        return primary

    def _quiet_connection(self) -> BoundedConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_usable():
                return connection
            connection.close()

    def _dial(self, primary: Options, deadline: float) -> BoundedConnection:
        connection = dial(primary, deadline)
        try:
            connection.until(deadline)
            self.route.accept(connection)
        except BaseException:
            connection.close()
            raise
        self.dials += 1
        return connection

    def _leave(self, error: Exception) -> None:
        """The primary is another one, or may be."""
        with self._lock:
            if self._primary is not None and isinstance(error, MovedError) and error.host:
                self._primary = {**self._primary, "host": error.host, "port": error.port}
            else:
                self._primary = None
        if not isinstance(error, MovedError):
            self.route.distrust()
        self._drop_idle()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
