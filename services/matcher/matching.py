"""One query against one space: occurrences, runs, cover, and why there is no more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvblend.v1 import common_pb2 as pb
from services.common.tokens import TokenArray
from services.matcher.kernels.cover import SHORTEST_SEGMENT
from services.matcher.kernels.types import CLASS, I64, U32, Reader, frozen
from services.matcher.occurrences import Found, Interval, find_occurrences
from services.matcher.owners import OwnerName
from services.matcher.runs import Cover, cover_of, joined, run_ranges
from services.matcher.table import Space, Table

_EVERY_CLASS = (pb.CONTEXT_CLASS_ALONE, pb.CONTEXT_CLASS_SHARED_PREFIX, pb.CONTEXT_CLASS_IN_PROMPT)

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Query:
    """What is asked: `owners` that can serve it, context classes that may, tokens [skip, n) to cover."""

    tokens: TokenArray
    skip: int
    owners: frozenset[OwnerName]
    context_classes: frozenset[int]
    opaque_spans: Sequence[pb.OpaqueSpan] = ()

    def intervals(self, start: int) -> list[Interval]:
        """What lies outside opaque spans, from `start` on."""
        intervals = []
        for span in self.opaque_spans:
            if span.offset > start:
                intervals.append((start, span.offset))
            start = max(start, span.offset + span.length)
        if start < len(self.tokens):
            intervals.append((start, len(self.tokens)))
        return intervals


@dataclass(frozen=True)
class Match:
    cover: Cover
    found: Found


def match(table: Table, space: Space, query: Query, is_late: Callable[[], bool]) -> Match:
    """The best cover of the query by what its owners have. To be called, and its answer read, inside `table.grace`.

    A run may begin before `skip` (it is cut there): a chunk before it, and the beginning of the one behind
    that, so the scan begins two chunks earlier.
    """
    tokens = as_kernel_tokens(query.tokens)
    reader = table.reader(query.owners, query.context_classes)
    intervals = query.intervals(max(0, query.skip - 2 * space.chunk_tokens)) or [(len(tokens), len(tokens))]
    found = find_occurrences(table, space, tokens, intervals, reader, is_late)
    cover = best_cover(table, tokens, found, reader, query.skip)
    return Match(cover, found)


def best_cover(table: Table, tokens: U32, found: Found, reader: Reader, skip: int) -> Cover:
    """Segments that the reader may have, cut so that they do not overlap, ascending, none before `skip`."""
    return joined([cover_of(table.reader_columns, tokens, part, reader, skip, table.now) for part in found.parts])


def as_kernel_tokens(tokens: TokenArray) -> U32:
    """As kernels take them: aligned, contiguous, of this machine's byte order."""
    return frozen(np.require(tokens, dtype=np.uint32, requirements=["C", "A"]))


def shortfalls(table: Table, space: Space, query: Query, answer: Match) -> list[pb.Shortfall]:
    """Each uncovered token behind `skip` under exactly one reason."""
    size = len(query.tokens)
    found, cover = answer.found, answer.cover
    left = size - query.skip - cover.tokens
    unknown = pb.REASON_UNKNOWN_TEXT if space.chunks else pb.REASON_NOTHING_STORED
    short = [gap for gap in query.intervals(query.skip) if gap[1] - gap[0] < SHORTEST_SEGMENT]
    forbidden = _meets_forbidden(table, query, found)
    if not (query.opaque_spans or found.scanned < size or short or forbidden):
        return [pb.Shortfall(reason=unknown, tokens=left)] if left else []
    missing = ~_mask(size, cover.starts, cover.ends)
    missing[: query.skip] = False
    reasons: list[pb.Shortfall] = []

    def take(reason: pb.Reason, where: Mask) -> None:
        tokens = int(np.count_nonzero(missing & where))
        if tokens:
            missing[where] = False
            reasons.append(pb.Shortfall(reason=reason, tokens=tokens))

    take(pb.REASON_OPAQUE_SPAN, ~_mask(size, *_columns(query.intervals(0))))
    take(pb.REASON_DEADLINE, _mask(size, np.array([found.scanned]), np.array([size])))
    take(pb.REASON_TOO_SHORT, _mask(size, *_columns(short)))
    if forbidden:
        take(pb.REASON_CONTEXT_CLASS_NOT_ALLOWED, _reachable(table, query, found))
    take(unknown, np.ones(size, dtype=bool))
    return reasons


def _meets_forbidden(table: Table, query: Query, found: Found) -> bool:
    """Whether something was found whose context class may not serve."""
    forbidden = sum(1 << value for value in _EVERY_CLASS if value not in query.context_classes)
    classes = [table.columns.rows[part.entries, CLASS] for part in found.parts]
    return bool(forbidden) and any((forbidden >> of_part & 1).any() for of_part in classes)


def _reachable(table: Table, query: Query, found: Found) -> Mask:
    """What could be covered if every context class might serve."""
    anybody: Reader = table.reader(query.owners, _EVERY_CLASS)
    tokens = as_kernel_tokens(query.tokens)
    mask = np.zeros(len(tokens), dtype=bool)
    for part in found.parts:
        mask |= _mask(len(tokens), *run_ranges(table.reader_columns, tokens, part, anybody))
    return mask


def _columns(intervals: Sequence[Interval]) -> tuple[I64, I64]:
    pairs = np.array(intervals, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _mask(size: int, starts: I64, ends: I64) -> Mask:
    """Which of so many tokens lie in one of these ranges, however they overlap."""
    steps = np.bincount(starts, minlength=size + 1) - np.bincount(ends, minlength=size + 1)
    return np.asarray(np.cumsum(steps[:size]) > 0)
