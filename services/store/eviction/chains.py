"""Chains and pins: what every policy needs around it."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvblend.v1 import common_pb2 as pb
from services.store.catalog import Chunk
from services.store.eviction.policy import Policy

# Chunks that continue the chain after (space, chain hash).
Children = Callable[[bytes, bytes], Iterable[Chunk]]


class TailsFirst:
    """A chunk of a prompt is useless without those before it: whatever continues it is offered before it.

    Documents' chunks serve one by one. Pinned chunks are never offered.
    """

    def __init__(self, policy: Policy, children: Children) -> None:
        self._policy = policy
        self._children = children

    def added(self, chunk: Chunk, now: float) -> None:
        self._policy.added(chunk, now)

    def used(self, chunks: Sequence[Chunk], now: float) -> None:
        self._policy.used(chunks, now)

    def kept(self, chunks: Sequence[Chunk], now: float) -> None:
        self._policy.kept(chunks, now)

    def removed(self, chunk: Chunk) -> None:
        self._policy.removed(chunk)

    def victims(self, now: float) -> Iterator[Chunk]:
        offered: set[Chunk] = set()
        for first in self._policy.victims(now):
            stack = [] if first in offered else [first]
            while stack:
                chunk = stack[-1]
                following = self._following(chunk, offered) if chunk not in offered else []
                offered.add(chunk)
                if following:
                    stack.extend(following)
                    continue
                stack.pop()
                if chunk.resident and not chunk.pinned:
                    yield chunk

    def _following(self, chunk: Chunk, offered: set[Chunk]) -> list[Chunk]:
        if chunk.key.domain == pb.DOMAIN_SEGMENT:
            return []
        following = self._children(chunk.key.space_id, chunk.key.chain_hash)
        return [child for child in following if child not in offered and child.key.domain != pb.DOMAIN_SEGMENT]
