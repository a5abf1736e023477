"""All places where stored chunks stand in a query: windows found, tokens compared."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.common.tokens import TokenArray
from services.matcher.kernels import I32, find_windows
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
    entries = np.empty(_FIRST_CAPACITY, dtype=np.int32)
    positions = np.empty(_FIRST_CAPACITY, dtype=np.int32)
    counts = np.zeros(3, dtype=np.int64)
    scanned = first
    end = len(query)
    while scanned < end and not is_late() and counts[0] < MOST_OCCURRENCES:
        stretch = min(end, scanned + _STRETCH)
        for window in table.windows:
            position = scanned
            while position < stretch:
                position = _scan(table, query, position, stretch, window, entries, positions, counts)
                if position < stretch:
                    entries = np.concatenate([entries, np.empty_like(entries)])
                    positions = np.concatenate([positions, np.empty_like(positions)])
        scanned = stretch
    pairs = zip(entries[: counts[0]].tolist(), positions[: counts[0]].tolist(), strict=True)
    occurrences = [Occurrence(table.by_id[entry], position) for entry, position in pairs]
    return Found(occurrences, scanned, int(counts[1]), int(counts[2]))


def _scan(
    table: Table,
    query: TokenArray,
    first: int,
    last: int,
    window: int,
    entries: I32,
    positions: I32,
    counts: np.ndarray,
) -> int:
    index = table.windows[window]
    return int(
        find_windows(
            query,
            first,
            last,
            window,
            table.hashing.bases,
            table.hashing.keep,
            index.bits,
            index.heads,
            table.following,
            table.fingerprints,
            table.pool,
            table.offsets,
            table.lengths,
            entries,
            positions,
            counts,
        )
    )
