"""All places where stored chunks stand in a query: windows found, tokens compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from services.common.tokens import TokenArray
from services.matcher.kernels import ENTRY_MASK, I32, I64, Output, Reader, Text, find_windows, hash_prefixes
from services.matcher.table import Hashing, Table

Interval = tuple[int, int]

_FIRST_CAPACITY = 4096
# A query of one repeated token over many such chunks has far too many occurrences: the rest is left out.
MOST_OCCURRENCES = 1 << 20
# Between two looks at the clock: well under a millisecond of scanning.
_STRETCH = 16_384


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


def hash_query(tokens: TokenArray, hashing: Hashing) -> Text:
    copied = np.array(tokens, dtype=np.uint32)
    return Text(copied, hash_prefixes(copied, hashing.bases))


def find_occurrences(
    table: Table, text: Text, intervals: Sequence[Interval], reader: Reader, is_late: Callable[[], bool]
) -> Found:
    """Every occurrence, inside one of the intervals, of a chunk that one of the reader's owners has.

    Whatever its context class. Ends early when `is_late`, or at MOST_OCCURRENCES.
    """
    parts = []
    candidates = verified = 0
    scanned = len(text.tokens)
    for low, high in intervals:
        scan = _Scan(table, text, high, reader, is_late)
        reached = scan.run(low, MOST_OCCURRENCES - verified)
        parts.append(scan.occurrences(low))
        verified += int(scan.out.counts[0])
        candidates += int(scan.out.counts[1])
        if reached < high:
            scanned = reached
            break
    return Found(parts, scanned, candidates, verified)


class _Scan:
    """One interval: all window classes side by side, stretch by stretch."""

    def __init__(self, table: Table, text: Text, high: int, reader: Reader, is_late: Callable[[], bool]) -> None:
        self._table = table
        self._text = text
        self._high = high
        self._reader = reader
        self._is_late = is_late
        self.out = _output(_FIRST_CAPACITY)

    def run(self, low: int, most: int) -> int:
        """Returns the position up to which every class was scanned."""
        position = low
        while position < self._high:
            stretch = min(self._high, position + _STRETCH)
            if not all(self._scan(window, position, stretch, most) for window in self._table.windows):
                return position
            position = stretch
        return position

    def _scan(self, window: int, position: int, last: int, most: int) -> bool:
        """One class over one stretch; false if there was no time, or no room, for all of it."""
        hashing = self._table.hashing
        buckets = self._table.windows[window].buckets
        while position < last:
            if self._is_late() or self.out.counts[0] >= most:
                return False
            reached = find_windows(
                self._text,
                position,
                last,
                self._high,
                window,
                hashing.bases,
                hashing.keep,
                buckets,
                self._table.columns,
                self._reader,
                self.out,
            )
            if reached == position:
                self.out = _doubled(self.out)
            position = reached
        return True

    def occurrences(self, low: int) -> Occurrences:
        pairs = int(self.out.counts[0])
        keys = self.out.keys[:pairs]
        order = np.argsort(keys, kind="stable")
        return Occurrences(low, self._high, keys[order], self.out.agreed[:pairs][order])


def _output(capacity: int) -> Output:
    return Output(np.empty(capacity, dtype=np.int64), np.empty(capacity, dtype=np.int32), np.zeros(2, dtype=np.int64))


def _doubled(out: Output) -> Output:
    larger = _output(2 * len(out.keys))
    larger.keys[: len(out.keys)] = out.keys
    larger.agreed[: len(out.agreed)] = out.agreed
    larger.counts[:] = out.counts
    return larger
