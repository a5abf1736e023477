"""From a lookup's answer to the stored chunks behind it: which tokens of which object go where."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.errors import KvblendError
from services.common.identity import HASH_BYTES
from services.common.tokens import decode_tokens
from services.gpu_agent.layouts import GroupShape

# (header, generation): one object while it is what it was.
Ref = tuple[int, int]


def ref_of(place: store.ObjectPlace) -> Ref:
    return place.header, place.generation


@dataclass(frozen=True)
class ChunkUse:
    """`length` tokens of one stored chunk, from its token `skip` on, at `query_position` of the prompt.

    `objects` has one entry for each layer group; None: the store did not lease it.
    """

    query_position: int
    stored_position: int
    skip: int
    length: int
    objects: tuple[store.LeasedObject | None, ...]

    @property
    def end(self) -> int:
        return self.query_position + self.length

    @property
    def delta(self) -> int:
        return self.query_position - self.stored_position

    def refs(self) -> Iterator[Ref]:
        return (ref_of(item.place) for item in self.objects if item is not None)

    def flaw(self, groups: list[GroupShape]) -> common.Reason:
        """Why these objects cannot be what the answer says; REASON_UNSPECIFIED: they can."""
        for item, shape in zip(self.objects, groups, strict=True):
            if item is None:
                return common.REASON_EVICTED
            if item.place.payload_bytes != shape.token_bytes * item.tokens:
                return common.REASON_COPY_FAILED
            if self.skip + self.length > item.tokens or item.stored_position + self.skip != self.stored_position:
                return common.REASON_COPY_FAILED
        return common.REASON_UNSPECIFIED


def chunk_uses(
    summary: store.LookupSummary, objects: Iterable[store.LeasedObject], groups: int, tokens: int
) -> list[ChunkUse]:
    """Every chunk of the answer, the prefix's first.

    Raises:
        KvblendError: INTERNAL if the summary contradicts itself or leaves the prompt.
    """
    index = {(item.domain, item.chain_hash, item.place.group): item for item in objects}
    uses = []
    exact = summary.prefix_tokens - summary.blended_tokens
    position = 0
    for chain_hash, length in _chunks(summary.prefix_hashes, summary.prefix_lengths, summary.prefix_tokens):
        domain = common.DOMAIN_EXACT if position + length <= exact else common.DOMAIN_BLENDED
        found = tuple(index.get((domain, chain_hash, group)) for group in range(groups))
        uses.append(ChunkUse(position, position, 0, length, found))
        position += length
    for segment in summary.segments:
        position, skip = 0, segment.skip_tokens
        for chain_hash, length in _chunks(segment.chain_hashes, segment.chunk_lengths, segment.length):
            found = tuple(index.get((segment.domain, chain_hash, group)) for group in range(groups))
            query, stored = segment.query_position + position, segment.stored_position + position
            uses.append(ChunkUse(query, stored, skip, length, found))
            position, skip = position + length, 0
    if any(use.end > tokens for use in uses):
        raise KvblendError("INTERNAL", "the store's answer leaves the prompt")
    return uses


def _chunks(hashes: bytes, lengths: bytes, total: int) -> Iterator[tuple[bytes, int]]:
    counts = decode_tokens(lengths, field="chunk lengths", allow_empty=True)
    if len(hashes) != len(counts) * HASH_BYTES or int(np.sum(counts, dtype=np.int64)) != total:
        raise KvblendError("INTERNAL", "the store's answer lists other chunks than it sums up")
    for number, count in enumerate(counts.tolist()):
        yield hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES], count
