"""One connection to a Redis server on which everything ends by a deadline.

Each socket operation gets what is left until the deadline (services/common/bounded_redis.py), and connecting (names,
TLS, passwords) happens on a thread that the caller does not have to wait for.
"""

import hashlib
import threading
import time
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

from redis.connection import Connection, PythonRespSerializer
from redis.exceptions import NoScriptError, RedisError, ResponseError

from services.common.bounded_redis import BOUNDED, READ_BYTES

Options = dict[str, Any]
Argument = bytes | str | int

# Larger arguments are sent from where they lie, not copied into one buffer with the others.
_COPIED_BYTES = 6000
_CONNECT_SECONDS = 5.0
_connecting = threading.BoundedSemaphore(16)


class LinkError(Exception):
    """No answer from the server; the text says why."""


class Script:
    """A Lua script: known to a server by its digest, after the first time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _encoded(argument: Argument) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()


def _made(options: Options, timeout: float) -> Any:
    return BOUNDED[options.get("connection_class", Connection)](
        **{name: value for name, value in options.items() if name != "connection_class"},
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        socket_read_size=READ_BYTES,
        protocol=2,
        command_packer=PythonRespSerializer(_COPIED_BYTES, _encoded),
        # No greeting: it would cost two round trips a connection.
        driver_info=None,
    )


def check_options(options: Options) -> None:
    """Raises ValueError for one that redis-py does not take, or that is not the setting's to choose."""
    try:
        _made(options, 1.0)
    except (TypeError, RedisError) as error:
        raise ValueError(f"an option of the Redis URL cannot be used: {error}") from None


class BoundedConnection:
    """Commands and replies on one connection. LinkError: no reply, and none will come. ResponseError: a refusal."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._unanswered = 0
        self._broken = False

    def until(self, deadline: float) -> None:
        self._inner.bounded.deadline = deadline

    def send(self, *arguments: Argument) -> None:
        self._unanswered += 1
        try:
            self._inner.send_command(*arguments, check_health=False)
        except (RedisError, OSError) as error:
            self._broken = True
            raise _as_link_error(error) from None

    def receive(self) -> Any:
        try:
            reply = self._inner.read_response()
        except ResponseError:
            self._unanswered -= 1
            raise
        except (RedisError, OSError) as error:
            self._broken = True
            raise _as_link_error(error) from None
        self._unanswered -= 1
        return reply

    def call(self, *arguments: Argument) -> Any:
        self.send(*arguments)
        return self.receive()

    def run(self, script: Script, keys: list[bytes], *arguments: Argument) -> Any:
        try:
            return self.call("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except NoScriptError:
            return self.call("EVAL", script.text, len(keys), *keys, *arguments)

    def is_usable(self) -> bool:
        """Not with a reply outstanding: it would answer the next question."""
        return not self._broken and not self._unanswered and self._inner.bounded.is_quiet()

    def close(self) -> None:
        self._inner.disconnect()


def dial(options: Options, deadline: float) -> BoundedConnection:
    """A new connection. Raises LinkError, by `deadline` at the latest."""
    left = deadline - time.monotonic()
    if left <= 0 or not _connecting.acquire(timeout=left):
        raise LinkError("no connection in time")
    outcome: Future[BoundedConnection] = Future()

    def connect() -> None:
        inner = _made(options, min(left, _CONNECT_SECONDS))
        try:
            inner.connect()
            outcome.set_result(BoundedConnection(inner))
        except InvalidStateError:
            inner.disconnect()
        except Exception as error:
            inner.disconnect()
            with suppress(InvalidStateError):
                outcome.set_exception(_as_link_error(error))
        finally:
            _connecting.release()

    threading.Thread(target=connect, name="redis-connect", daemon=True).start()
    try:
        return outcome.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError:
        if outcome.cancel():
            raise LinkError("no connection in time") from None
        return outcome.result()


def _as_link_error(error: Exception) -> LinkError:
    late = isinstance(error, TimeoutError) or "Timeout" in type(error).__name__
    return LinkError("no answer in time" if late else str(error) or type(error).__name__)
