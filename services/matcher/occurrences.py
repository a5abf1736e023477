"""All places where stored chunks stand in a query: windows found, tokens compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from services.matcher.kernels.hashing import BLOCK
from services.matcher.kernels.scanning import BUSY, CANDIDATES, FULL, PAIRS, STOPPED, VERIFIED, scan
from services.matcher.kernels.types import ENTRY_MASK, I32, I64, U32, Output, Reader
from services.matcher.table import Space, Table

Interval = tuple[int, int]

_FIRST_CAPACITY = 4096
# A query of one repeated token over many such chunks has far too many occurrences: the rest is left out.
MOST_OCCURRENCES = 1 << 20
# Positions between two looks at the clock: some hundred microseconds of scanning.
_STRETCH = 1 << 16


@dataclass(frozen=True)
class Occurrences:
    """Stored chunks that stand in query[low:high], by place and id.

    keys: position << 32 | entry id, [n] ascending. agreed: how many of the chunk's tokens stand there, [n];
    at least its window's, and all of them unless the query goes on differently.
    """

    low: int
    high: int
    keys: I64
    agreed: I32

    @property
    def entries(self) -> I64:
        return self.keys & ENTRY_MASK


@dataclass(frozen=True)
class Found:
    """`scanned`: positions up to here were looked at in every class."""

    parts: list[Occurrences]
    scanned: int
    candidates: int
    verified: int


def find_occurrences(
    table: Table, space: Space, tokens: U32, intervals: Sequence[Interval], reader: Reader, is_late: Callable[[], bool]
) -> Found:
    """Every occurrence, inside one of the intervals, of a chunk that one of the reader's owners has.

    Whatever its context class. Ends early when `is_late`, or at MOST_OCCURRENCES.
    """
    parts = []
    candidates = verified = pairs = 0
    scanned = len(tokens)
    for low, high in intervals:
        finder = _Finder(table, space, tokens, high, reader, is_late)
        reached = finder.run(low, MOST_OCCURRENCES - pairs)
        part = finder.occurrences(low)
        parts.append(part)
        pairs += len(part.keys)
        candidates += int(finder.out.counts[CANDIDATES])
        verified += int(finder.out.counts[VERIFIED])
        if reached < high:
            scanned = reached
            break
    return Found(parts, scanned, candidates, verified)


class _Finder:
    """One interval, stretch by stretch."""

    def __init__(
        self, table: Table, space: Space, tokens: U32, high: int, reader: Reader, is_late: Callable[[], bool]
    ) -> None:
        self._hashing = table.hashing
        self._columns = table.reader_columns
        self._windows, self._indexes = space.view()
        self._tokens = tokens
        self._high = high
        self._reader = reader
        self._is_late = is_late
        self.out = _output(_FIRST_CAPACITY)

    def run(self, position: int, most: int) -> int:
        """Returns the position up to which every class was scanned."""
        block = BLOCK
        while position < self._high:
            if self._is_late() or self.out.counts[PAIRS] >= most:
                return position
            last = min(self._high, position + _STRETCH)
            reached = scan(
                self._tokens,
                position,
                last,
                self._high,
                block,
                self._windows,
                self._indexes,
                self._hashing,
                self._columns,
                self._reader,
                self.out,
            )
            if self.out.counts[STOPPED] == FULL:
                self.out = _doubled(self.out)
            elif self.out.counts[STOPPED] == BUSY and reached == position:
                # Too much to compare in one block: smaller steps, so that the clock is looked at.
                block = max(1, block // 8)
            else:
                block = min(BLOCK, 2 * block)
            position = reached
        return position

    def occurrences(self, low: int) -> Occurrences:
        pairs = int(self.out.counts[PAIRS])
        keys, agreed = self.out.keys[:pairs], self.out.agreed[:pairs]
        return Occurrences(low, self._high, keys, agreed)


def _output(capacity: int) -> Output:
    return Output(np.empty(capacity, dtype=np.int64), np.empty(capacity, dtype=np.int32), np.zeros(4, dtype=np.int64))


def _doubled(out: Output) -> Output:
    larger = _output(2 * len(out.keys))
    larger.keys[: len(out.keys)] = out.keys
    larger.agreed[: len(out.agreed)] = out.agreed
    larger.counts[:] = out.counts
    return larger
