"""How long a lookup goes on waiting for what it fetches, and whether it should wait at all."""

import threading
from collections import Counter

# After losses in a row so many lookups do without, at most.
_MOST_SKIPPED = 32


class Trust:
    """Whether L2, which promises to be faster than computing, keeps its promises. Thread-safe.

    After a lookup that lost to it the next one does without, after two in a row the next two, then four, and so on;
    one that gains ends that. Estimates of a tier may stay wrong, and every lookup would lose anew. Engines of very
    different speeds are judged apart: a slow one gains by what a fast one loses with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Lookups that do without after the latest loss, and still; by the power of two of the engine's tokens a second.
        self._pause: Counter[int] = Counter()
        self._skip: Counter[int] = Counter()

    def is_given(self, tokens_per_second: int) -> bool:
        kind = tokens_per_second.bit_length()
        with self._lock:
            if not self._skip[kind]:
                return True
            self._skip[kind] -= 1
            return False

    def judge(self, tokens_per_second: int, gain: float) -> None:
        """`gain`: seconds that a lookup saved by what landed, less those that it waited."""
        kind = tokens_per_second.bit_length()
        with self._lock:
            pause = min(2 * self._pause[kind] or 1, _MOST_SKIPPED) if gain <= 0 else 0
            self._pause[kind] = self._skip[kind] = pause


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
