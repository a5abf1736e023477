"""One connection to a Redis server on which everything ends by a deadline.

Each socket operation gets what is left until the deadline (services/common/redis_socket.py), and connecting (names,
TLS, passwords) happens on a thread that the caller does not have to wait for.
"""

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from typing import Any

from redis.connection import Connection, PythonRespSerializer
from redis.exceptions import NoScriptError, RedisError, ResponseError

from services.common.redis_socket import BOUNDED, READ_BYTES, BoundedSocket

Options = dict[str, Any]
Argument = bytes | memoryview | str | int

# Larger arguments are sent from where they lie, not copied into one buffer with the others.
_COPIED_BYTES = 6000
_CONNECT_SECONDS = 5.0
_connecting = threading.BoundedSemaphore(16)


class LinkError(Exception):
    """No answer from the server; the text says why. `late`: there may still be one, but not in time."""

    def __init__(self, detail: str, *, late: bool = False) -> None:
        super().__init__(detail)
        self.late = late


class Script:
    """A Lua script: known to a server by its digest, after the first time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _encoded(argument: Argument) -> bytes | memoryview:
    return argument if isinstance(argument, bytes | memoryview) else str(argument).encode()


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
        # Replies that are still to come.
        self.unanswered = 0
        self._broken = False
        self._spoilt = False

    def until(self, deadline: float) -> None:
        self._inner.bounded.deadline = deadline

    def send(self, *arguments: Argument) -> None:
        self.unanswered += 1
        try:
            self._inner.send_command(*arguments, check_health=False)
        except (RedisError, OSError) as error:
            self._broken = True
            raise _as_link_error(error) from None

    def receive(self) -> Any:
        try:
            reply = self._inner.read_response()
        except ResponseError:
            self.unanswered -= 1
            raise
        except (RedisError, OSError) as error:
            self._broken = True
            raise _as_link_error(error) from None
        self.unanswered -= 1
        return reply

    def call(self, *arguments: Argument) -> Any:
        self.send(*arguments)
        return self.receive()

    def packed(self, *arguments: Argument) -> list[bytes | memoryview]:
        """A command as it is sent; memoryviews of many bytes stay where they lie."""
        buffers: list[bytes | memoryview] = self._inner.pack_command(*arguments)
        return buffers

    def exchange(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Replies of pipelined commands, in order; a refusal is a ResponseError among them."""
        with self.raw() as socket:
            for buffer in self._inner.pack_commands(commands):
                socket.sendall(buffer)
        self.unanswered += len(commands)
        return [self.receive_any() for _ in commands]

    def receive_any(self) -> Any:
        """A reply; a refusal as a value."""
        try:
            return self.receive()
        except ResponseError as error:
            return error

    @contextmanager
    def raw(self) -> Iterator[BoundedSocket]:
        """The socket itself, no reply outstanding that redis-py has begun to read. Leave it where a reply ends."""
        broken, self._broken = self._broken, True
        try:
            yield self._inner.bounded
        except OSError as error:
            raise _as_link_error(error) from None
        self._broken = broken

    def fileno(self) -> int:
        socket: BoundedSocket = self._inner.bounded
        return socket.fileno()

    def spoil(self) -> None:
        """What comes on it cannot be made out any more: it is not used again."""
        self._spoilt = True

    def run(self, script: Script, keys: list[bytes], *arguments: Argument) -> Any:
        try:
            return self.call("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except NoScriptError:
            return self.call("EVAL", script.text, len(keys), *keys, *arguments)

    def is_usable(self) -> bool:
        """Not with a reply outstanding: it would answer the next question."""
        return not self._broken and not self._spoilt and not self.unanswered and self._inner.bounded.is_quiet()

    def close(self) -> None:
        self._inner.disconnect()


def dial(
    options: Options,
    deadline: float,
    *,
    connect_seconds: float = _CONNECT_SECONDS,
    connecting: threading.Semaphore = _connecting,
) -> BoundedConnection:
    """A new connection. Raises LinkError, by `deadline` at the latest.

    `connecting`: a permit is held while connecting, by a thread that may outlive the call.
    """
    left = deadline - time.monotonic()
    if left <= 0 or not connecting.acquire(timeout=left):
        raise LinkError("no connection in time", late=True)
    outcome: Future[BoundedConnection] = Future()

    def connect() -> None:
        inner = _made(options, min(left, connect_seconds))
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
            connecting.release()

    threading.Thread(target=connect, name="redis-connect", daemon=True).start()
    try:
        return outcome.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError:
        if outcome.cancel():
            raise LinkError("no connection in time", late=True) from None
        return outcome.result()


def _as_link_error(error: Exception) -> LinkError:
    late = isinstance(error, TimeoutError) or "Timeout" in type(error).__name__
    return LinkError("no answer in time" if late else str(error) or type(error).__name__, late=late)
