"""A small share of reads whose bytes are compared with their checksum: memory that goes bad is noticed in use."""

import math


class Sampler:
    """Picks evenly: of any 1/share in a row one. Not thread-safe."""

    def __init__(self, share: float) -> None:
        """`share` of all, 0 to 1."""
        self._share = share
        self._seen = 0

    def picks(self, count: int) -> list[int]:
        """Which of the next `count` are picked, by their numbers from 0."""
        first, self._seen = self._seen, self._seen + count
        earlier, by_then = math.floor(first * self._share), math.floor(self._seen * self._share)
        return [math.ceil(number / self._share) - 1 - first for number in range(earlier + 1, by_then + 1)]
