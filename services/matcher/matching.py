"""One query against one space's table: occurrences, runs, cover, and why there is no more."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvblend.v1 import common_pb2 as pb
from services.common.tokens import TokenArray
from services.matcher.cover import SHORTEST_SEGMENT
from services.matcher.kernels import Reader, Text
from services.matcher.occurrences import Found, Interval, find_occurrences, hash_query
from services.matcher.runs import Run, best_runs, run_ranges
from services.matcher.table import OwnerName, Table

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
    segments: list[pb.Segment]
    shortfalls: list[pb.Shortfall]
    found: Found


def match(table: Table, query: Query, is_late: Callable[[], bool]) -> Match:
    """The best cover of the query and the reasons for every token that is not in it.

    A run may begin before `skip` (it is cut there): a chunk before it, and the beginning of the one behind
    that, so the scan begins two chunks earlier.
    """
    text = hash_query(query.tokens, table.hashing)
    reader = table.reader(query.owners, query.context_classes)
    intervals = query.intervals(max(0, query.skip - 2 * table.chunk_tokens))
    found = find_occurrences(table, text, intervals, reader, is_late)
    cover = best_cover(table, text, found, reader, query.skip)
    return Match([_segment(run) for run in cover], _shortfalls(table, query, text, found, cover), found)


def best_cover(table: Table, text: Text, found: Found, reader: Reader, skip: int) -> list[Run]:
    """Runs that the reader may have, cut so that they do not overlap, ascending, none before `skip`."""
    return [run for part in found.parts for run in best_runs(table, text, part, reader, skip)]


def covered_tokens(table: Table, text: Text, found: Found, reader: Reader) -> int:
    """Tokens of the best cover for this reader, from occurrences that were found before."""
    return sum(run.end - run.start for run in best_cover(table, text, found, reader, 0))


def _segment(run: Run) -> pb.Segment:
    first = run.entries[0]
    return pb.Segment(
        query_position=run.start,
        stored_position=first.stored_position + run.skip,
        length=run.end - run.start,
        domain=first.name.domain,
        context_class=pb.ContextClass.Name(run.context_class),
        document=first.document,
        chain_hashes=run.chain_hashes,
        chunk_lengths=run.chunk_lengths,
        skip_tokens=run.skip,
    )


def _mask(size: int, intervals: Iterable[Interval]) -> Mask:
    mask = np.zeros(size, dtype=bool)
    for start, end in intervals:
        mask[start:end] = True
    return mask


def _shortfalls(table: Table, query: Query, text: Text, found: Found, cover: Sequence[Run]) -> list[pb.Shortfall]:
    """Each uncovered token behind `skip` under exactly one reason."""
    size = len(query.tokens)
    missing = ~_mask(size, ((run.start, run.end) for run in cover))
    missing[: query.skip] = False
    reasons: list[pb.Shortfall] = []

    def take(reason: pb.Reason, where: Mask) -> None:
        tokens = int(np.count_nonzero(missing & where))
        if tokens:
            missing[where] = False
            reasons.append(pb.Shortfall(reason=reason, tokens=tokens))

    take(pb.REASON_OPAQUE_SPAN, ~_mask(size, query.intervals(0)))
    take(pb.REASON_DEADLINE, _mask(size, [(found.scanned, size)]))
    short = (gap for gap in query.intervals(query.skip) if gap[1] - gap[0] < SHORTEST_SEGMENT)
    take(pb.REASON_TOO_SHORT, _mask(size, short))
    if any(np.isin(table.columns.classes[part.entries], _forbidden(query)).any() for part in found.parts):
        anybody = table.reader(query.owners, _EVERY_CLASS)
        ranges = [interval for part in found.parts for interval in run_ranges(table, text, part, anybody)]
        take(pb.REASON_CONTEXT_CLASS_NOT_ALLOWED, _mask(size, ranges))
    nothing = not table.by_name
    take(pb.REASON_NOTHING_STORED if nothing else pb.REASON_UNKNOWN_TEXT, np.ones(size, dtype=bool))
    return reasons


def _forbidden(query: Query) -> list[int]:
    return [value for value in _EVERY_CLASS if value not in query.context_classes]
