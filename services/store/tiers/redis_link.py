"""Connections to one Redis server on which every exchange ends by its deadline.

Each socket operation gets what is left until the deadline (services/common/bounded_redis.py), and dialling (names, TLS,
AUTH) happens on a thread of its own that the caller does not have to wait for. A connection on which anything went
wrong is closed, never reused: a late reply must not answer the next question.
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from redis.connection import Connection, parse_url
from redis.exceptions import RedisError, ResponseError

from services.common.bounded_redis import BOUNDED, READ_BYTES

Argument = bytes | memoryview
_DIALS = 4


class LinkError(Exception):
    """An exchange that brought no answer; `kind` is late, busy or down."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def pack(*arguments: Argument | str | int) -> list[Argument]:
    """Buffers of one command; memoryviews are passed on, not copied."""
    buffers: list[Argument] = []
    text = b"*%d\r\n" % len(arguments)
    for argument in arguments:
        if isinstance(argument, memoryview):
            buffers += [text + b"$%d\r\n" % argument.nbytes, argument]
            text = b"\r\n"
        else:
            data = argument if isinstance(argument, bytes) else str(argument).encode()
            text += b"$%d\r\n%b\r\n" % (len(data), data)
    return [*buffers, text]


class RedisLink:
    """A pool of at most `max_connections` connections. Thread-safe.

    Raises ValueError for a URL that is not redis://, rediss:// or unix://, or has unknown options.
    """

    def __init__(self, url: str, connect_timeout: float, max_connections: int) -> None:
        options: dict[str, Any] = parse_url(url)
        self._class: Any = BOUNDED[options.pop("connection_class", Connection)]
        self._options = {
            **options,
            "socket_timeout": connect_timeout,
            "socket_connect_timeout": connect_timeout,
            "socket_read_size": READ_BYTES,
            "protocol": 2,
        }
        try:
            self._class(**self._options)
        except (TypeError, RedisError) as error:
            raise ValueError(f"the URL has an option that is not understood: {error}") from None
        self.address = _address(options)
        self._permits = threading.BoundedSemaphore(max_connections)
        self._dials = threading.BoundedSemaphore(_DIALS)
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._closed = False

    def exchange(self, commands: Sequence[list[Argument]], deadline: float) -> list[Any]:
        """Replies of pipelined commands, in order; an error reply is a ResponseError among them.

        Raises LinkError, by `deadline` (monotonic seconds) at the latest.
        """
        if not self._permits.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LinkError("busy", "every connection is in use")
        try:
            connection = self._quiet_connection() or self._dial(deadline)
            try:
                replies = _converse(connection, commands, deadline)
            except BaseException as error:
                connection.disconnect()
                if isinstance(error, Exception):
                    raise _as_link_error(error) from None
                raise
            self._keep(connection)
            return replies
        finally:
            self._permits.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _quiet_connection(self) -> Any | None:
        while True:
            with self._lock:
                if self._closed:
                    raise LinkError("down", "closed")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.bounded.is_quiet():
                return connection
            connection.disconnect()

    def _keep(self, connection: Any) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.disconnect()

    def _dial(self, deadline: float) -> Any:
        if not self._dials.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LinkError("late", "connecting takes too long")
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        abandoned = threading.Event()

        def dial() -> None:
            connection = self._class(**self._options)
            try:
                connection.connect()
                outcome.put(connection)
            except Exception as error:
                connection.disconnect()
                outcome.put(_as_link_error(error))
            finally:
                self._dials.release()
            if abandoned.is_set():
                connection.disconnect()

        threading.Thread(target=dial, name="redis-dial", daemon=True).start()
        try:
            result = outcome.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            abandoned.set()
            raise LinkError("late", "connecting takes too long") from None
        if isinstance(result, LinkError):
            raise result
        return result


def _converse(connection: Any, commands: Sequence[list[Argument]], deadline: float) -> list[Any]:
    connection.bounded.deadline = deadline
    for buffers in commands:
        connection.send_packed_command(buffers, check_health=False)
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(connection.read_response())
        except ResponseError as error:
            replies.append(error)
    return replies


def _as_link_error(error: Exception) -> LinkError:
    late = isinstance(error, TimeoutError) or "Timeout" in type(error).__name__
    return LinkError("late" if late else "down", str(error) or type(error).__name__)


def _address(options: dict[str, Any]) -> str:
    """Server and database, without credentials."""
    database = options.get("db", 0)
    if "path" in options:
        return f"unix:{options['path']}/{database}"
    return f"redis:{str(options.get('host', 'localhost')).lower()}:{options.get('port', 6379)}/{database}"
