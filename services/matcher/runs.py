"""From occurrences of chunks to runs of neighbouring chunks, extended token by token at both ends."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvblend.v1 import common_pb2 as pb
from services.common.tokens import TokenArray
from services.matcher.kernels import common_prefix, common_suffix
from services.matcher.occurrences import Occurrence
from services.matcher.table import Entry, Table

Allowed = Callable[[Entry], bool]


@dataclass(frozen=True)
class Piece:
    """`length` tokens of a chunk, from its token `skip` on, at `position` of the query."""

    entry: Entry
    position: int
    skip: int
    length: int

    @property
    def end(self) -> int:
        return self.position + self.length


@dataclass(frozen=True)
class Run:
    """Pieces that follow each other both in the query and where they were stored."""

    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        return self.pieces[0].position

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def context_class(self) -> pb.ContextClass:
        """The worst of its pieces'."""
        return max(piece.entry.context_class for piece in self.pieces)

    def cut(self, start: int, end: int) -> "Run":
        """The part in query positions [start, end), which must lie inside the run."""
        pieces = []
        for piece in self.pieces:
            first = max(piece.position, start)
            last = min(piece.end, end)
            if first < last:
                pieces.append(Piece(piece.entry, first, piece.skip + first - piece.position, last - first))
        return Run(tuple(pieces))


def build_runs(table: Table, query: TokenArray, occurrences: Iterable[Occurrence], allowed: Allowed) -> list[Run]:
    """The longest runs: each allowed occurrence is in at least one, continued by its best successor."""
    usable = {(o.entry.id, o.position): o for o in occurrences if allowed(o.entry)}
    following: dict[tuple[int, int], Occurrence] = {}
    reach: dict[tuple[int, int], int] = {}
    for key, occurrence in sorted(usable.items(), key=lambda item: -item[0][1]):
        best = occurrence.end
        for child in table.successors.get(occurrence.entry.name, {}).values():
            child_key = (child.id, occurrence.end)
            if child_key in usable and _neighbours(occurrence.entry, child) and reach[child_key] > best:
                best = reach[child_key]
                following[key] = usable[child_key]
        reach[key] = best
    continued = {(o.entry.id, o.position) for o in following.values()}
    starts = [occurrence for key, occurrence in usable.items() if key not in continued]
    return [_run_from(table, query, start, following, allowed) for start in starts]


def _neighbours(entry: Entry, successor: Entry) -> bool:
    """Successors at another stored position (the same text held twice) would break the run's one shift."""
    return successor.stored_position == entry.stored_position + entry.length


def _run_from(
    table: Table,
    query: TokenArray,
    start: Occurrence,
    following: dict[tuple[int, int], Occurrence],
    allowed: Allowed,
) -> Run:
    chain = [start]
    while (key := (chain[-1].entry.id, chain[-1].position)) in following:
        chain.append(following[key])
    pieces = [Piece(o.entry, o.position, 0, o.entry.length) for o in chain]
    head = _head(table, query, pieces[0], allowed)
    return Run((*head, *pieces, *_tail(table, query, pieces[-1], allowed)))


def _head(table: Table, query: TokenArray, first: Piece, allowed: Allowed) -> tuple[Piece, ...]:
    """The end of the chunk before, as far as the query agrees with it."""
    before = table.by_name.get(first.entry.previous)
    if before is None or not before.matchable or not allowed(before) or not _neighbours(before, first.entry):
        return ()
    offset = int(table.offsets[before.id])
    shared = int(common_suffix(query, first.position, table.pool, offset, before.length))
    return (Piece(before, first.position - shared, before.length - shared, shared),) if shared else ()


def _tail(table: Table, query: TokenArray, last: Piece, allowed: Allowed) -> tuple[Piece, ...]:
    """The beginning of a chunk behind, as far as the query agrees; whole chunks go on, also short last ones."""
    tail: list[Piece] = []
    while True:
        best: Piece | None = None
        for child in table.successors.get(last.entry.name, {}).values():
            if not allowed(child) or not _neighbours(last.entry, child):
                continue
            shared = int(common_prefix(query, last.end, table.pool, int(table.offsets[child.id]), child.length))
            if shared and (best is None or shared > best.length):
                best = Piece(child, last.end, 0, shared)
        if best is None:
            return tuple(tail)
        tail.append(best)
        if best.length < best.entry.length:
            return tuple(tail)
        last = best
