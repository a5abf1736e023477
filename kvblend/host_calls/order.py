"""Which way a call may take, where two lead to the same service."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

# By then a service knows that a call was given up, whether it has begun it or not.
_LONGEST_SECONDS = 60.0
_GIVEN_UP = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


class SlowCalls:
    """Calls on the slower way that may yet begin.

    Those that follow take it too: what ends a request must not overtake a lookup that its caller has given up, as
    nobody would end what that takes. Thread-safe. Times by the monotonic clock, seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited_for = 0
        self._until = 0.0

    def any(self) -> bool:
        return self._waited_for > 0 or time.monotonic() < self._until

    def begins(self, timeout: float) -> None:
        """Nobody will say when this one is over."""
        with self._lock:
            self._until = max(self._until, time.monotonic() + min(timeout, _LONGEST_SECONDS))

    @contextmanager
    def one(self, timeout: float) -> Iterator[None]:
        """It is over at the end, unless it was given up."""
        start = time.monotonic()
        self._count(1)
        try:
            yield
        except grpc.RpcError as error:
            if error.code() in _GIVEN_UP:
                self.begins(time_left(timeout, start))
            raise
        except BaseException:
            self.begins(time_left(timeout, start))
            raise
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._waited_for += more


def time_left(timeout: float, start: float) -> float:
    return max(0.0, timeout - (time.monotonic() - start))
