"""Calls under way, as gRPC's callers know them: the answer, a stream of answers, or grpc.RpcError."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc

from kvblend.host_calls.connections import Connection, Connections
from kvblend.host_calls.frames import FrameTooLarge, unpack_metadata
from kvblend.v1 import host_calls_pb2 as pb

Decode = Callable[[bytes], Any]
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Ended(grpc.Call):  # type: ignore[misc]
    """How a call has ended."""

    def __init__(self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self._code, self._details, self._trailing_metadata = code, details, trailing_metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def initial_metadata(self) -> tuple[Any, ...]:
        return ()

    def trailing_metadata(self) -> tuple[Any, ...]:
        return self._trailing_metadata

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        del callback
        return False


class Failed(Ended, grpc.RpcError):  # type: ignore[misc]
    """The failure of a call."""

    def __str__(self) -> str:
        return f"{self._code.name}: {self._details}"


class Running:
    """A call that was sent, and its connection: `next_answer` until there is none. For one thread; `cancel` for any."""

    def __init__(self, connection: Connection, connections: Connections, deadline: float) -> None:
        self._deadline = deadline
        self._connection, self._connections = connection, connections
        self._lock = threading.Lock()
        self._ended = self._cancelled = False

    def next_answer(self, decode: Decode) -> tuple[bool, Any]:
        """(whether more may follow, the answer; None: the stream had no further one). Raises Failed."""
        try:
            if self._cancelled or self._ended:
                raise EOFError("it has ended")
            data, body = self._connection.receive(self._deadline)
            head = pb.HostAnswer.FromString(data)
            answer = None if head.code or head.end_of_stream else decode(body)
            trailing_metadata = unpack_metadata(head.trailing_metadata) if head.code else ()
        except TimeoutError:
            raise self._failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        except (OSError, EOFError, FrameTooLarge) as error:
            raise self._failed(grpc.StatusCode.UNAVAILABLE, f"the answer was lost: {error}") from error
        except Exception as error:
            # What the service sent cannot be read.
            raise self._failed(grpc.StatusCode.INTERNAL, f"an unreadable answer: {error}") from error
        except BaseException:
            # Of the thread, not of the call: a part of an answer may have been read.
            self._end(keep=False)
            raise
        if head.code or not head.more:
            self._end(keep=not head.more)
        if head.code:
            raise Failed(_CODES.get(head.code, grpc.StatusCode.UNKNOWN), head.details, trailing_metadata)
        return head.more, answer

    def wait(self, until: float) -> bool:
        """Whether something can be read by then (monotonic clock, seconds): an answer, or the end."""
        return self._connection.wait(min(until, self._deadline)) or time.monotonic() >= self._deadline

    def _failed(self, code: grpc.StatusCode, details: str) -> Failed:
        self._end(keep=False)
        if self._cancelled or self._connections.closed:
            return Failed(grpc.StatusCode.CANCELLED, "the caller has cancelled it")
        if time.monotonic() >= self._deadline:
            # The service ends late calls by itself, and may be the first to notice.
            return Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        return Failed(code, details)

    def _end(self, *, keep: bool) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if keep and not self._cancelled:
            self._connections.keep(self._connection)
        else:
            self._connections.drop(self._connection)

    def cancel(self) -> bool:
        """Whether it was still running."""
        with self._lock:
            if self._ended:
                return False
            self._cancelled = True
            self._connection.interrupt()
        return True

    def abandon(self) -> None:
        """Nobody reads its answer any more."""
        self._end(keep=False)


class AnswerStream(Ended):
    """The answers of a stream, read by the thread that asks for the next one."""

    def __init__(self, running: Running, decode: Decode) -> None:
        super().__init__(grpc.StatusCode.OK)
        self._running, self._decode = running, decode
        self._more = True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._more:
            if self._code != grpc.StatusCode.OK:
                raise Failed(self._code, self._details, self._trailing_metadata)
            raise StopIteration
        try:
            self._more, answer = self._running.next_answer(self._decode)
        except Failed as failure:
            self._more = False
            self._code, self._details = failure.code(), failure.details()
            self._trailing_metadata = failure.trailing_metadata()
            raise
        if answer is None:
            raise StopIteration
        return answer

    def is_active(self) -> bool:
        return self._more

    def cancel(self) -> bool:
        return self._running.cancel()

    def __del__(self) -> None:
        self._running.abandon()


class LaterAnswer(Ended, grpc.Future):  # type: ignore[misc, type-arg]
    """The answer of a call under way, read by whoever asks for it: no thread waits for it meanwhile."""

    def __init__(self, begin: Callable[[], Running], decode: Decode) -> None:
        """Raises what `begin` does, but Failed."""
        super().__init__(grpc.StatusCode.OK)
        self._decode = decode
        self._reading = threading.Lock()
        self._done = self._cancelled = False
        self._answer: Any = None
        self._failure: Failed | None = None
        self._running: Running | None = None
        try:
            self._running = begin()
        except Failed as failure:
            self._fail(failure)

    def _fail(self, failure: Failed) -> None:
        self._failure = failure
        self._code, self._details = failure.code(), failure.details()
        self._trailing_metadata = failure.trailing_metadata()
        self._done = True

    def _read(self, timeout: float | None) -> None:
        """Raises grpc.FutureTimeoutError if it is not there after `timeout` seconds, though the call goes on."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        if not self._reading.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise grpc.FutureTimeoutError
        try:
            if self._done or self._running is None:
                return
            if give_up_at is not None and not self._running.wait(give_up_at):
                raise grpc.FutureTimeoutError
            try:
                _, self._answer = self._running.next_answer(self._decode)
                self._done = True
            except Failed as failure:
                self._fail(failure)
        finally:
            self._reading.release()

    def result(self, timeout: float | None = None) -> Any:
        failure = self.exception(timeout)
        if failure is not None:
            raise failure
        return self._answer

    def exception(self, timeout: float | None = None) -> Exception | None:
        self._read(timeout)
        if self._cancelled:
            raise grpc.FutureCancelledError
        return self._failure

    def traceback(self, timeout: float | None = None) -> Any:
        failure = self.exception(timeout)
        return None if failure is None else failure.__traceback__

    def cancel(self) -> bool:
        if self._running is not None and self._running.cancel():
            self._cancelled = True
        return self._cancelled

    def cancelled(self) -> bool:
        return self._cancelled

    def done(self) -> bool:
        with suppress(grpc.FutureTimeoutError):
            self._read(0)
        return self._done

    def running(self) -> bool:
        return not self.done()

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """In a thread of its own, as nobody else may wait."""

        def wait() -> None:
            self._read(None)
            fn(self)

        threading.Thread(target=wait, name="later answer", daemon=True).start()

    def __del__(self) -> None:
        if self._running is not None:
            self._running.abandon()
