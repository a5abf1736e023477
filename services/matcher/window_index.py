"""Fingerprint index of one window class: which entries begin with a window of this many tokens."""

import numpy as np

from services.matcher.kernels import NONE, Buckets, Columns, link_bucket, rehash, unlink_bucket

_SMALLEST = 256
# Filter bits for each entry: about one probe in sixteen of unknown text passes.
_BITS_PER_ENTRY = 16


class WindowIndex:
    """Chained buckets over entry ids, with a bit filter in front. Grows and shrinks; never loses an entry.

    The chains lie in the table's columns: an entry is in one index only. Adding and removing take the same
    time however many entries share a fingerprint.
    """

    def __init__(self) -> None:
        self.count = 0
        self.buckets = _empty(_SMALLEST)
        self._stale_bits = 0

    @property
    def bytes(self) -> int:
        return self.buckets.heads.nbytes + self.buckets.bits.nbytes

    def add(self, entry: int, columns: Columns) -> None:
        if self.count >= len(self.buckets.heads):
            self._resize(2 * len(self.buckets.heads), columns)
        link_bucket(entry, self.buckets, columns)
        self.count += 1

    def remove(self, entry: int, columns: Columns) -> None:
        """Unlinks an entry. Filter bits stay set until enough are stale to be worth a rebuild."""
        unlink_bucket(entry, self.buckets, columns)
        self.count -= 1
        self._stale_bits += 1
        if self._stale_bits > max(_SMALLEST, len(self.buckets.heads) // 2):
            self._resize(max(_SMALLEST, 1 << (2 * self.count).bit_length()), columns)

    def _resize(self, size: int, columns: Columns) -> None:
        larger = _empty(size)
        rehash(self.buckets, larger, columns)
        self.buckets = larger
        self._stale_bits = 0


def _empty(size: int) -> Buckets:
    return Buckets(np.zeros(size * _BITS_PER_ENTRY // 64, dtype=np.uint64), np.full(size, NONE, dtype=np.int32))
