"""A circuit breaker: a neighbour that failed a few times in a row is left alone for a while."""

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Opens after `threshold` failures in a row; open, it lets one call through every `retry_seconds`.

    The first success closes it. A trial that never reports blocks nothing: the next one is due
    `retry_seconds` after it was let through. Thread-safe.
    """

    def __init__(
        self, threshold: int = 3, retry_seconds: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threshold = threshold
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._retry_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= self._threshold

    def allow(self) -> bool:
        """Whether to make this call at all."""
        with self._lock:
            if not self.is_open:
                return True
            now = self._clock()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._retry_seconds
            return True

    def success(self) -> bool:
        """True if this success closed the circuit."""
        with self._lock:
            was_open = self.is_open
            self._failures = 0
            return was_open

    def failure(self) -> bool:
        """True if this failure opened the circuit."""
        with self._lock:
            was_open = self.is_open
            self._failures += 1
            self._retry_at = self._clock() + self._retry_seconds
            return self.is_open and not was_open
