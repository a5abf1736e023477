"""All places where stored chunks stand in a query: windows found, tokens compared."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.common.tokens import TokenArray
from services.matcher.kernels import Buckets, Output, Stored, find_windows
from services.matcher.table import Entry, Table

_FIRST_CAPACITY = 4096
# A query of one repeated token over many such chunks has far too many occurrences: the rest is left out.
MOST_OCCURRENCES = 1 << 20
# Between two looks at the clock: well under a millisecond of scanning.
_STRETCH = 16_384


@dataclass(frozen=True)
class Occurrence:
    """A stored chunk whose tokens all stand in the query from `position` on."""

    entry: Entry
    position: int

    @property
    def end(self) -> int:
        return self.position + self.entry.length


@dataclass(frozen=True)
class Found:
    """`scanned`: positions up to here were looked at in every class."""

    occurrences: list[Occurrence]
    scanned: int
    candidates: int
    verified: int


def find_occurrences(table: Table, query: TokenArray, first: int, is_late: Callable[[], bool]) -> Found:
    """Every occurrence of an indexed chunk that begins at or behind `first`, until `is_late`."""
    out = _output(_FIRST_CAPACITY)
    stored = Stored(table.following, table.fingerprints, table.pool, table.offsets, table.lengths)
    scanned = first
    end = len(query)
    while scanned < end and not is_late() and out.counts[0] < MOST_OCCURRENCES:
        stretch = min(end, scanned + _STRETCH)
        for window, index in table.windows.items():
            position = scanned
            while position < stretch:
                position = find_windows(
                    query,
                    position,
                    stretch,
                    window,
                    table.hashing.bases,
                    table.hashing.keep,
                    Buckets(index.bits, index.heads),
                    stored,
                    out,
                )
                if position < stretch:
                    out = _doubled(out)
        scanned = stretch
    pairs, candidates, verified = out.counts.tolist()
    found = zip(out.entries[:pairs].tolist(), out.positions[:pairs].tolist(), strict=True)
    return Found([Occurrence(table.by_id[entry], at) for entry, at in found], scanned, candidates, verified)


def _output(capacity: int) -> Output:
    return Output(np.empty(capacity, dtype=np.int32), np.empty(capacity, dtype=np.int32), np.zeros(3, dtype=np.int64))


def _doubled(out: Output) -> Output:
    larger = _output(2 * len(out.entries))
    larger.entries[: len(out.entries)] = out.entries
    larger.positions[: len(out.positions)] = out.positions
    larger.counts[:] = out.counts
    return larger
