"""A slow model of the matcher: who owns what, and the most tokens that any legal cover can have."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from matcher_kit import Added, Change, Chunk, Cleared

from kvblend.v1 import common_pb2 as pb

LADDER = (16, 32, 64, 128)
SHORTEST = 16
Interval = tuple[int, int]
Key = tuple[bytes, int, bytes]


@dataclass
class Held:
    """One stored chunk: as it was first said, its best context class since, its owners, the last claim by a tier."""

    chunk: Chunk
    context_class: int
    owners: set[str] = field(default_factory=set)
    claimed: int = 0


def owner_of(store: str, l2: str) -> str:
    return f"l2:{l2}" if l2 else f"store:{store}"


class OwnershipModel:
    """Owners are "store:<name>" and "l2:<id>"."""

    def __init__(self) -> None:
        self.held: dict[Key, Held] = {}

    def apply(self, store: str, change: Change, position: int) -> None:
        if isinstance(change, Cleared):
            self._clear(owner_of(store, change.l2), change)
        elif isinstance(change, Added):
            for chunk in change.chunks:
                self._add(chunk, owner_of(store, chunk.l2), position)
        else:
            for chunk in change.chunks:
                self._remove(chunk.key, owner_of(store, chunk.l2), change.seen if chunk.l2 else 0)

    def void(self, owner: str) -> None:
        for key in list(self.held):
            self._drop(key, owner)

    def _add(self, chunk: Chunk, owner: str, position: int) -> None:
        held = self.held.setdefault(chunk.key, Held(chunk, chunk.context_class))
        held.context_class = min(held.context_class, chunk.context_class)
        held.owners.add(owner)
        if chunk.l2:
            held.claimed = position

    def _remove(self, key: Key, owner: str, seen: int) -> None:
        held = self.held.get(key)
        if held is not None and not (seen and held.claimed > seen):
            self._drop(key, owner)

    def _clear(self, owner: str, scope: Cleared) -> None:
        for key, held in list(self.held.items()):
            facts = (held.chunk.space, held.chunk.tenant, held.chunk.document)
            wanted = (scope.space, scope.tenant, scope.document)
            if all(want in (type(want)(), fact) for want, fact in zip(wanted, facts, strict=True)):
                self._drop(key, owner)

    def _drop(self, key: Key, owner: str) -> None:
        self.held[key].owners.discard(owner)
        if not self.held[key].owners:
            del self.held[key]

    def reachable(self, space: bytes, owners: Iterable[str], context_classes: Iterable[int]) -> list[Chunk]:
        return [
            replace(held.chunk, context_class=held.context_class)
            for held in self.held.values()
            if held.chunk.space == space
            and held.chunk.matchable
            and held.chunk.domain != pb.DOMAIN_BLENDED
            and held.context_class in set(context_classes)
            and held.owners & set(owners)
        ]


def most_tokens(
    query: Sequence[int], chunks: list[Chunk], skip: int, spans: Sequence[pb.OpaqueSpan], chunk_tokens: int
) -> int:
    """Tokens of the best cover: every way to end with every run is tried at every position."""
    runs = [run for part in _between(len(query), spans) for run in _runs(query, part, chunks, chunk_tokens)]
    best = [0] * (len(query) + 1)
    for end in range(1, len(query) + 1):
        best[end] = best[end - 1]
        for first, last in runs:
            for start in range(max(first, skip), end - SHORTEST + 1 if last >= end else 0):
                best[end] = max(best[end], best[start] + end - start)
    return best[-1]


def _between(size: int, spans: Sequence[pb.OpaqueSpan]) -> Iterator[Interval]:
    start = 0
    for span in spans:
        yield start, span.offset
        start = span.offset + span.length
    yield start, size


def _runs(query: Sequence[int], part: Interval, chunks: list[Chunk], chunk_tokens: int) -> set[Interval]:
    low, high = part
    runs = set()
    for chunk in chunks:
        classes = [size for size in (*LADDER, chunk_tokens) if size <= min(len(chunk.tokens), chunk_tokens)]
        for at in range(low, high):
            agreed = _agreeing(query[at:high], chunk.tokens)
            if classes and agreed >= max(classes):
                runs.add((_leftmost(query, low, at, chunk, chunks), _rightmost(query, high, at, chunk, chunks)))
    return runs


def _agreeing(query: Sequence[int], tokens: Sequence[int]) -> int:
    count = 0
    while count < min(len(query), len(tokens)) and query[count] == tokens[count]:
        count += 1
    return count


def _leftmost(query: Sequence[int], low: int, at: int, chunk: Chunk, chunks: list[Chunk]) -> int:
    for before in chunks:
        if (before.domain, before.chain_hash) == (chunk.domain, chunk.previous_hash) and before.end == (
            chunk.stored_position
        ):
            agreed = _agreeing(query[low:at][::-1], before.tokens[::-1])
            if agreed == len(before.tokens):
                return _leftmost(query, low, at - agreed, before, chunks)
            return at - agreed
    return at


def _rightmost(query: Sequence[int], high: int, at: int, chunk: Chunk, chunks: list[Chunk]) -> int:
    agreed = _agreeing(query[at:high], chunk.tokens)
    end = at + agreed
    if agreed < len(chunk.tokens):
        return end
    behind = [
        child
        for child in chunks
        if (child.domain, child.previous_hash, child.stored_position) == (chunk.domain, chunk.chain_hash, chunk.end)
    ]
    return max([end, *(_rightmost(query, high, end, child, chunks) for child in behind)])
