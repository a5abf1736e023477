"""One Redis server: a bounded pool of connections to it, and a circuit breaker of its own."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, TypeVar

from redis.exceptions import AskError, ClusterDownError, ResponseError, TryAgainError

from services.common.logs import get_logger
from services.common.metrics import counter
from services.common.redis_connection import BoundedConnection, LinkError, Options, dial
from services.store.tiers.breaker import CircuitBreaker

FAILURES = counter("kvblend_l2_redis_failures", "Calls to Redis without a result, by operation.", ("operation", "kind"))

# Connecting at once, so that threads that hang in it cannot pile up.
_DIALS = 4
# What a second connection is worth waiting for.
_SPARE_SECONDS = 0.1
# A caller in more of a hurry than this proves nothing about the server when it goes without an answer.
_FAIR_SECONDS = 0.05
# Keys are elsewhere, or on their way: no fault of this server. (MovedError is an AskError.)
ELSEWHERE = (AskError, TryAgainError, ClusterDownError)

_log = get_logger("l2")
_T = TypeVar("_T")


class NodeLimits(NamedTuple):
    connect_seconds: float
    connections: int
    half_open_seconds: float


class _BusyError(LinkError):
    """Every connection is in use."""


def name_of(options: Options) -> str:
    """Without credentials."""
    if "path" in options:
        return str(options["path"])
    return f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


class RedisNode:
    """Thread-safe. `error`: why the server is not to be used now; empty if it is.

    After 3 failures in a row calls fail at once; every `half_open_seconds` one is let through to see whether the
    server is back.
    """

    def __init__(self, options: Options, limits: NodeLimits, accept: Callable[[BoundedConnection], None]) -> None:
        """`accept` raises LinkError for a new connection that leads to the wrong server."""
        self.options = options
        self.name = name_of(options)
        # On this machine, through a unix socket.
        self.is_beside = "path" in options
        self.error = ""
        self._limits = limits
        self._accept = accept
        self._breaker = CircuitBreaker(retry_seconds=limits.half_open_seconds)
        self._permits = threading.BoundedSemaphore(limits.connections)
        self._spares = threading.BoundedSemaphore(max(1, limits.connections // 2))
        self._dials = threading.BoundedSemaphore(_DIALS)
        self._lock = threading.Lock()
        self._idle: list[BoundedConnection] = []
        self._closed = False

    def use(self, operation: str, deadline: float, work: Callable[[BoundedConnection], _T]) -> _T:
        """What `work` returns for a connection whose operations end by `deadline` (monotonic seconds).

        Raises LinkError without an answer, ResponseError as `work` does.
        """
        if not self._breaker.allow():
            raise LinkError(f"left alone for a while: {self.error}")
        start = time.monotonic()
        try:
            with self._connection(deadline) as connection:
                result = work(connection)
        except _BusyError:
            FAILURES.labels(operation, "busy").inc()
            raise
        except LinkError as error:
            FAILURES.labels(operation, "late" if error.late else "down").inc()
            if not error.late or deadline - start >= _FAIR_SECONDS:
                self._failed(str(error))
            raise
        except ELSEWHERE as error:
            FAILURES.labels(operation, "elsewhere").inc()
            if isinstance(error, ClusterDownError):
                self.error = str(error)
            raise
        except ResponseError as error:
            self.refused(operation)
            # A server that takes no writes (full, read-only) still serves what it holds.
            if operation != "write":
                self._failed(str(error))
            raise
        self.error = ""
        if self._breaker.success():
            _log.info("L2 is back", server=self.name)
        return result

    def refused(self, operation: str) -> None:
        """The server did not do for one object what it did for others."""
        FAILURES.labels(operation, "refused").inc()

    @contextmanager
    def spare_connections(self, count: int, deadline: float) -> Iterator[list[BoundedConnection]]:
        """Up to so many more for one who has one already: none that would be another's, or a wait; at most one is new.

        Half of what the server may get is never spare.
        """
        with ExitStack() as stack:
            spares: list[BoundedConnection] = []
            while len(spares) < count and self._take_permit(self._spares, stack):
                if not self._take_permit(self._permits, stack):
                    break
                with suppress(LinkError):
                    idle = self._quiet_connection()
                    connection = idle or self._dial(min(deadline, time.monotonic() + _SPARE_SECONDS))
                    spares.append(connection)
                    stack.enter_context(self._lent(connection, deadline))
                    if idle is not None:
                        continue
                break
            yield spares

    @staticmethod
    def _take_permit(permits: threading.Semaphore, stack: ExitStack) -> bool:
        taken = permits.acquire(blocking=False)
        if taken:
            stack.callback(permits.release)
        return taken

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _connection(self, deadline: float) -> Iterator[BoundedConnection]:
        if not self._permits.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise _BusyError("every connection is in use", late=True)
        try:
            connection = self._quiet_connection() or self._dial(deadline)
            with self._lent(connection, deadline):
                yield connection
        finally:
            self._permits.release()

    @contextmanager
    def _lent(self, connection: BoundedConnection, deadline: float) -> Iterator[None]:
        connection.until(deadline)
        try:
            yield
        finally:
            with self._lock:
                keep = not self._closed and connection.is_usable()
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def _quiet_connection(self) -> BoundedConnection | None:
        while True:
            with self._lock:
                if self._closed:
                    raise LinkError("closed")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_usable():
                return connection
            connection.close()

    def _dial(self, deadline: float) -> BoundedConnection:
        limits = self._limits
        connection = dial(self.options, deadline, connect_seconds=limits.connect_seconds, connecting=self._dials)
        try:
            connection.until(deadline)
            self._accept(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _failed(self, error: str) -> None:
        self.error = error
        if self._breaker.failure():
            _log.warning("L2 is down", server=self.name, error=error)
