"""One query against one space's table: occurrences, runs, cover, and why there is no more."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvblend.v1 import common_pb2 as pb
from services.common.tokens import TokenArray, encode_u32
from services.matcher.cover import SHORTEST_SEGMENT, Interval, best_cover
from services.matcher.occurrences import Found, find_occurrences
from services.matcher.runs import Run, build_runs
from services.matcher.table import Entry, OwnerName, Table


@dataclass(frozen=True)
class Query:
    """What is asked: `owners` that can serve it, context classes that may, tokens [skip, n) to cover."""

    tokens: TokenArray
    skip: int
    owners: frozenset[OwnerName]
    context_classes: frozenset[int]
    opaque_spans: Sequence[pb.OpaqueSpan] = ()

    def is_reachable(self, entry: Entry) -> bool:
        return any(owner in self.owners for owner in entry.owners)

    def allows(self, entry: Entry) -> bool:
        return entry.context_class in self.context_classes and self.is_reachable(entry)

    def intervals(self) -> list[Interval]:
        """Where segments may lie: behind the prefix, outside opaque spans."""
        intervals = []
        start = self.skip
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

    Runs may begin before `skip` (they are cut there), so the scan begins a chunk earlier.
    """
    first = max(0, query.skip - table.chunk_tokens)
    found = find_occurrences(table, query.tokens, first, is_late)
    intervals = query.intervals()
    cover = best_cover(build_runs(table, query.tokens, found.occurrences, query.allows), intervals)
    covered = _mask(len(query.tokens), ((run.start, run.end) for run in cover))
    return Match([_segment(run) for run in cover], _shortfalls(table, query, found, intervals, covered), found)


def covered_tokens(table: Table, query: Query, found: Found) -> int:
    """Tokens of the best cover, for owners of this query, from occurrences that were found before."""
    runs = build_runs(table, query.tokens, found.occurrences, query.allows)
    return sum(run.end - run.start for run in best_cover(runs, query.intervals()))


def _segment(run: Run) -> pb.Segment:
    first = run.pieces[0]
    return pb.Segment(
        query_position=run.start,
        stored_position=first.entry.stored_position + first.skip,
        length=run.end - run.start,
        domain=first.entry.name.domain,
        context_class=run.context_class,
        document=first.entry.document,
        chain_hashes=b"".join(piece.entry.name.chain_hash for piece in run.pieces),
        chunk_lengths=encode_u32([piece.length for piece in run.pieces]),
        skip_tokens=first.skip,
    )


def _mask(size: int, intervals: Iterable[Interval]) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    for start, end in intervals:
        mask[start:end] = True
    return mask


def _shortfalls(
    table: Table, query: Query, found: Found, intervals: list[Interval], covered: np.ndarray
) -> list[pb.Shortfall]:
    """Each uncovered token behind `skip` under exactly one reason."""
    missing = ~covered
    missing[: query.skip] = False
    reasons = []

    def take(reason: pb.Reason, where: np.ndarray) -> None:
        tokens = int(np.count_nonzero(missing & where))
        if tokens:
            missing[where] = False
            reasons.append(pb.Shortfall(reason=reason, tokens=tokens))

    size = len(query.tokens)
    take(pb.REASON_OPAQUE_SPAN, ~_mask(size, intervals))
    take(pb.REASON_DEADLINE, _mask(size, [(found.scanned, size)]))
    if size - query.skip < SHORTEST_SEGMENT:
        take(pb.REASON_TOO_SHORT, np.ones(size, dtype=bool))
    elsewhere = [
        (occurrence.position, occurrence.end)
        for occurrence in found.occurrences
        if query.is_reachable(occurrence.entry) and occurrence.entry.context_class not in query.context_classes
    ]
    take(pb.REASON_CONTEXT_CLASS_NOT_ALLOWED, _mask(size, elsewhere))
    nothing = not table.by_name
    take(pb.REASON_NOTHING_STORED if nothing else pb.REASON_UNKNOWN_TEXT, np.ones(size, dtype=bool))
    return reasons
