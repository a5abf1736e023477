"""From occurrences of chunks to runs of neighbouring chunks, extended token by token at both ends, and their cover."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.matcher.kernels.runs import cover_occurrences, link_occurrences, longest_runs
from services.matcher.kernels.types import I64, U8, U32, Reader, ReaderColumns
from services.matcher.occurrences import Occurrences


@dataclass(frozen=True)
class Cover:
    """Non-overlapping segments [starts, ends) of a query, ascending, [S]; each stored in neighbouring chunks.

    classes: the worst context class of each segment's chunks. counts: chunks of each; skips: tokens of its first chunk
    that lie before it. entries, lengths: those chunks one after another, and the tokens that each contributes.
    """

    starts: I64
    ends: I64
    classes: U8
    counts: I64
    skips: I64
    entries: I64
    lengths: U32

    @property
    def tokens(self) -> int:
        return int((self.ends - self.starts).sum())

    @property
    def first_entries(self) -> I64:
        """The first chunk of each segment."""
        entries: I64 = self.entries[np.cumsum(self.counts) - self.counts]
        return entries


def cover_of(columns: ReaderColumns, tokens: U32, part: Occurrences, reader: Reader, skip: int, now: int) -> Cover:
    """The best cover of query[max(low, skip):high] by what the reader may have; `now`: second of this match."""
    if not len(part.keys):
        return _NOTHING
    return Cover(*cover_occurrences(tokens, part.low, part.high, part.keys, part.agreed, skip, now, columns, reader))


def joined(covers: list[Cover]) -> Cover:
    """Covers of parts of a query, as one."""
    if len(covers) == 1:
        return covers[0]
    return Cover(
        *(np.concatenate(columns) for columns in zip(*(vars(cover).values() for cover in covers), strict=True))
    )


def run_ranges(columns: ReaderColumns, tokens: U32, part: Occurrences, reader: Reader) -> tuple[I64, I64]:
    """Query ranges [starts, ends) of the longest runs, uncut, perhaps overlapping."""
    links = link_occurrences(tokens, part.low, part.keys, part.agreed, columns, reader)
    runs = longest_runs(tokens, part.high, part.keys, part.agreed, links, columns, reader)
    return runs.starts, runs.ends


def _empty(dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.empty(0, dtype=dtype)


_NOTHING = Cover(*map(_empty, (np.int64, np.int64, np.uint8, np.int64, np.int64, np.int64, np.uint32)))
