"""A slow model of the matcher: who owns what, and the most tokens that any legal cover can have."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvblend.v1 import common_pb2 as pb

LADDER = (16, 32, 64, 128)
SHORTEST = 16
Interval = tuple[int, int]
Key = tuple[int, bytes]


@dataclass(frozen=True)
class Stored:
    domain: int
    chain_hash: bytes
    previous_hash: bytes
    tokens: tuple[int, ...]
    position: int

    @property
    def key(self) -> Key:
        return self.domain, self.chain_hash

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)


@dataclass
class Held:
    """One stored chunk: its best context class so far, and each owner with (stream, sequence) of its claim."""

    chunk: Stored
    context_class: int
    owners: dict[str, tuple[int, int]] = field(default_factory=dict)


class OwnershipModel:
    """Owners are "store:<name>" and "l2:<id>"."""

    def __init__(self) -> None:
        self.held: dict[Key, Held] = {}

    def add(self, chunk: Stored, context_class: int, owner: str, said: tuple[int, int]) -> None:
        held = self.held.setdefault(chunk.key, Held(chunk, context_class))
        held.context_class = min(held.context_class, context_class)
        held.owners[owner] = said

    def remove(self, key: Key, owner: str, stream: int, seen_sequence: int) -> None:
        held = self.held.get(key)
        if held is None or owner not in held.owners:
            return
        said_stream, sequence = held.owners[owner]
        if seen_sequence and said_stream == stream and sequence > seen_sequence:
            return
        self._drop(key, owner)

    def void(self, owner: str) -> None:
        for key in list(self.held):
            self._drop(key, owner)

    def _drop(self, key: Key, owner: str) -> None:
        self.held[key].owners.pop(owner, None)
        if not self.held[key].owners:
            del self.held[key]

    def reachable(self, owners: Iterable[str], context_classes: Iterable[int]) -> list[Stored]:
        return [
            held.chunk
            for held in self.held.values()
            if held.context_class in set(context_classes) and set(held.owners) & set(owners)
        ]


def most_tokens(
    query: Sequence[int], chunks: list[Stored], skip: int, spans: Sequence[pb.OpaqueSpan], chunk_tokens: int
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


def _runs(query: Sequence[int], part: Interval, chunks: list[Stored], chunk_tokens: int) -> set[Interval]:
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


def _leftmost(query: Sequence[int], low: int, at: int, chunk: Stored, chunks: list[Stored]) -> int:
    for before in chunks:
        if before.key == (chunk.domain, chunk.previous_hash) and before.end == chunk.position:
            agreed = _agreeing(query[low:at][::-1], before.tokens[::-1])
            if agreed == len(before.tokens):
                return _leftmost(query, low, at - agreed, before, chunks)
            return at - agreed
    return at


def _rightmost(query: Sequence[int], high: int, at: int, chunk: Stored, chunks: list[Stored]) -> int:
    agreed = _agreeing(query[at:high], chunk.tokens)
    end = at + agreed
    if agreed < len(chunk.tokens):
        return end
    behind = [c for c in chunks if (c.domain, c.previous_hash) == chunk.key and c.position == chunk.end]
    return max([end, *(_rightmost(query, high, end, child, chunks) for child in behind)])
