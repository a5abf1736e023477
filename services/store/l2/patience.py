"""How long a lookup goes on waiting for what it fetches."""


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
