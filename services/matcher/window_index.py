"""Fingerprint index of one window class of one space: which texts begin with a window of this many tokens."""

import numpy as np

from services.matcher.grace import Grace
from services.matcher.kernels.texts import rebuild
from services.matcher.kernels.types import I64, NONE, Buckets, Columns
from services.matcher.reservation import zeroed

_SMALLEST = 16
# Filter bits for each text, and bits in a word.
_BITS_PER_TEXT = 16
_WORD_BITS = 32


class WindowIndex:
    """Grows and shrinks by making new arrays; readers go on in the old ones. Never loses a text.

    Adding and removing take the same time however many texts share a fingerprint. Only the writer calls this;
    readers take `buckets` once.
    """

    def __init__(self, grace: Grace) -> None:
        self._grace = grace
        self.buckets = _empty(_SMALLEST)
        self._free = _Free(_SMALLEST, 0)
        # Texts removed since the filter was made: their bits are still set.
        self._stale = 0

    @property
    def count(self) -> int:
        return self._free.in_use

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.buckets) + self._free.stack.nbytes

    def reserve(self, texts: int, columns: Columns) -> I64:
        """Nodes for so many more texts; those that are not needed come back by `unused`."""
        if self._free.count < texts:
            self._resize(self.count + texts, columns)
        return self._free.take(texts)

    def unused(self, nodes: I64) -> None:
        self._free.give(nodes)

    def removed(self, nodes: I64, columns: Columns) -> None:
        """These were unlinked; readers may still stand on them."""
        free = self._free
        free.in_use -= len(nodes)
        # A rebuilt index has nodes of its own: these go with the old one.
        self._grace.retire(lambda: free.put(nodes))
        self._stale += len(nodes)
        if self._stale > max(_SMALLEST, len(self.buckets.heads) // 2):
            self._resize(self.count, columns)

    def _resize(self, texts: int, columns: Columns) -> None:
        size = max(_SMALLEST, 1 << max(texts - 1, 1).bit_length())
        fresh = _empty(size)
        count = rebuild(self.buckets, fresh, columns)
        self._free = _Free(size, count)
        self._stale = 0
        self.buckets = fresh


class _Free:
    """Free nodes of one build of an index: a stack."""

    def __init__(self, size: int, in_use: int) -> None:
        self.stack = np.arange(size - 1, in_use - 1, -1, dtype=np.int32)
        self.stack = np.concatenate([self.stack, np.empty(in_use, dtype=np.int32)])
        self.count = size - in_use
        self.in_use = in_use

    def take(self, count: int) -> I64:
        self.count -= count
        self.in_use += count
        return self.stack[self.count : self.count + count].astype(np.int64)

    def give(self, nodes: I64) -> None:
        self.in_use -= len(nodes)
        self.put(nodes)

    def put(self, nodes: I64) -> None:
        self.stack[self.count : self.count + len(nodes)] = nodes
        self.count += len(nodes)


def _empty(size: int) -> Buckets:
    heads = zeroed((size,), np.int32)
    heads.fill(NONE)
    return Buckets(
        bits=zeroed((max(1, size * _BITS_PER_TEXT // _WORD_BITS),), np.uint32),
        heads=heads,
        nodes=zeroed((size, 2), np.uint64),
    )


# In place of an index of a class in which nothing is.
NO_BUCKETS = _empty(1)
