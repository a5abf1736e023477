"""How long a lookup goes on waiting for what it fetches, and whether it should wait at all."""

import threading

# After losses in a row so many lookups do without, at most.
_MOST_SKIPPED = 32


class Trust:
    """Whether L2, which promises to be faster than computing, keeps its promises. Thread-safe.

    After a lookup that lost to it the next one does without, after two in a row the next two, then four, and so on;
    one that gains ends that. Estimates of a tier may stay wrong, and every lookup would lose anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._losses = 0
        self._skip = 0

    def is_given(self) -> bool:
        with self._lock:
            if not self._skip:
                return True
            self._skip -= 1
            return False

    def judge(self, gain: float) -> None:
        """`gain`: seconds that a lookup saved by what landed, less those that it waited."""
        with self._lock:
            self._losses = self._losses + 1 if gain <= 0 else 0
            self._skip = min(1 << self._losses >> 1, _MOST_SKIPPED) if self._losses else 0


class Patience:
    """Waiting costs its seconds, what lands gains what it saves. It ends when `limit` seconds of the best gain so far
    are lost: whatever a tier does, a lookup loses no more than that, and what had been gained before stays gained.
    """

    def __init__(self, limit: float, begun: float) -> None:
        """`begun`: when the waiting began. Seconds, by any clock."""
        self._limit = limit
        self._begun = begun
        self._best = 0.0

    def left(self, now: float, saved: float) -> float:
        """Seconds to wait on, with `saved` seconds gained by what has landed; none is left at 0 or below."""
        gain = saved - (now - self._begun)
        self._best = max(self._best, gain)
        return self._limit - (self._best - gain)
