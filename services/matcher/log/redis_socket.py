"""One connection to a Redis server on which everything ends by a deadline.

redis-py's socket timeout bounds a single `recv`; a server that drips, or a name that does not resolve, would hold a
caller much longer. Here each socket operation gets what is left until the deadline, and connecting (names, TLS,
passwords) happens on a thread that the caller does not have to wait for.
"""

import hashlib
import select
import socket
import threading
import time
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

from redis.connection import Connection, PythonRespSerializer, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import NoScriptError, RedisError, ResponseError

Options = dict[str, Any]
Argument = bytes | str | int

_READ_BYTES = 256 << 10
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


class _BoundedSocket:
    """A socket whose operations all end by `deadline` (monotonic seconds)."""

    def __init__(self, inner: socket.socket, deadline: float) -> None:
        self._inner = inner
        self.deadline = deadline

    def _armed(self) -> socket.socket:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._inner.settimeout(left)
        return self._inner

    def sendall(self, data: bytes) -> None:
        self._armed().sendall(data)

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

    def shutdown(self, how: int) -> None:
        self._inner.shutdown(how)

    def close(self) -> None:
        self._inner.close()


class _Bounded:
    """Mixed into redis-py's connections."""

    bounded: _BoundedSocket
    socket_connect_timeout: float

    def _connect(self) -> _BoundedSocket:
        inner: socket.socket = super()._connect()  # type: ignore[misc]
        self.bounded = _BoundedSocket(inner, time.monotonic() + self.socket_connect_timeout)
        return self.bounded


class _Tcp(_Bounded, Connection):
    pass


class _Tls(_Bounded, SSLConnection):
    pass


class _Unix(_Bounded, UnixDomainSocketConnection):
    pass


_CLASSES: dict[Any, Any] = {Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix}


def _encoded(argument: Argument) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()


def _made(options: Options, timeout: float) -> Any:
    return _CLASSES[options.get("connection_class", Connection)](
        **{name: value for name, value in options.items() if name != "connection_class"},
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        socket_read_size=_READ_BYTES,
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
