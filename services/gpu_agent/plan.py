"""From a lookup's answer to the stored chunks behind it: which tokens of which object go where."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.columns import Numbers, hashes, u32s
from services.common.errors import KvblendError
from services.common.identity import HASH_BYTES
from services.gpu_agent.layouts import GroupShape

# (header, generation): one object while it is what it was.
Ref = tuple[int, int]


def ref_of(place: store.ObjectPlace) -> Ref:
    return place.header, place.generation


class LeasedObject(NamedTuple):
    """One object that the store has leased. `verify`: compare it with its checksum while copying."""

    place: store.ObjectPlace
    domain: int
    chain_hash: bytes
    tokens: int
    stored_position: int
    checksum: int
    verify: bool


@dataclass(frozen=True)
class ChunkUse:
    """`length` tokens of one stored chunk, from its token `skip` on, at `query_position` of the prompt.

    `objects` has one entry for each layer group; None: the store did not lease it.
    """

    query_position: int
    stored_position: int
    skip: int
    length: int
    objects: tuple[LeasedObject | None, ...]

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


class Plan:
    """An answer's chunks and the objects leased for it. What only a copy needs is made when one asks for it."""

    def __init__(
        self, summary: store.LookupSummary, leased: Sequence[store.ObjectColumns], groups: int, tokens: int
    ) -> None:
        """`groups`: layer groups of the model; `tokens` of the prompt.

        Raises:
            KvblendError: INTERNAL if the summary contradicts itself or leaves the prompt.
        """
        self._summary = summary
        self._leased = leased
        self._groups = groups
        try:
            self.chunks = _check(summary, tokens)
        except KvblendError as error:
            raise KvblendError("INTERNAL", f"the store's answer: {error.message}") from error

    @cached_property
    def uses(self) -> list[ChunkUse]:
        """Every chunk of the answer, the prefix's first."""
        index = {
            (item.domain, item.chain_hash, item.place.group): item for part in self._leased for item in objects_of(part)
        }
        return [
            ChunkUse(*place, tuple(index.get((domain, chain_hash, group)) for group in range(self._groups)))
            for domain, chain_hash, place in (*_prefix(self._summary), *_segments(self._summary.segments))
        ]

    def unused(self) -> list[Ref]:
        """What was leased and does not serve the answer."""
        if sum(len(part.domains) for part in self._leased) == self.chunks * self._groups:
            # An object for each: looking at every one is not worth its time.
            return []
        used = {ref for use in self.uses for ref in use.refs()}
        return [ref for part in self._leased for ref in refs_of(part) if ref not in used]


def _check(summary: store.LookupSummary, tokens: int) -> int:
    """How many chunks the answer has. Raises KvblendError."""
    segments = summary.segments
    ends = u32s(segments.query_positions) + u32s(segments.lengths)
    counts, stored, skips = u32s(segments.chunk_counts), u32s(segments.stored_positions), u32s(segments.skip_tokens)
    if not len(ends) == len(counts) == len(stored) == len(skips) == len(segments.domains):
        raise KvblendError("INTERNAL", "its segments' columns have different lengths")
    prefix, of_segments = u32s(summary.prefix_lengths), u32s(segments.chunk_lengths)
    fits = counts.sum() == len(of_segments) and prefix.sum() == summary.prefix_tokens
    if not fits or (np.diff(_running_sum(of_segments)[_running_sum(counts)]) != u32s(segments.lengths)).any():
        raise KvblendError("INTERNAL", "it lists other chunks than it sums up")
    names = len(summary.prefix_hashes), len(segments.chain_hashes)
    if names != (HASH_BYTES * len(prefix), HASH_BYTES * len(of_segments)):
        raise KvblendError("INTERNAL", "it lists other chunks than it names")
    if summary.prefix_tokens > tokens or (ends > tokens).any():
        raise KvblendError("INTERNAL", "it leaves the prompt")
    return len(prefix) + len(of_segments)


def _running_sum(values: Numbers) -> Numbers:
    """[n] -> [n + 1], from 0."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(values)))


# Domain, chain hash, and (query position, stored position, skip, length).
_Place = tuple[int, bytes, tuple[int, int, int, int]]


def _prefix(summary: store.LookupSummary) -> Iterator[_Place]:
    exact = summary.prefix_tokens - summary.blended_tokens
    position = 0
    for chain_hash, length in zip(hashes(summary.prefix_hashes), u32s(summary.prefix_lengths).tolist(), strict=True):
        domain = common.DOMAIN_EXACT if position + length <= exact else common.DOMAIN_BLENDED
        yield domain, chain_hash, (position, position, 0, length)
        position += length


def _segments(segments: common.SegmentColumns) -> Iterator[_Place]:
    chunks = zip(hashes(segments.chain_hashes), u32s(segments.chunk_lengths).tolist(), strict=True)
    columns = (segments.query_positions, segments.stored_positions, segments.skip_tokens, segments.chunk_counts)
    for domain, query, stored, skip, count in zip(
        segments.domains, *(u32s(column).tolist() for column in columns), strict=True
    ):
        inside = 0
        for number in range(count):
            chain_hash, length = next(chunks)
            yield domain, chain_hash, (query + inside, stored + inside, skip if number == 0 else 0, length)
            inside += length


def refs_of(columns: store.ObjectColumns) -> list[Ref]:
    headers, generations = np.frombuffer(columns.headers, "<u4"), np.frombuffer(columns.generations, "<u8")
    return list(zip(headers.tolist(), generations.tolist(), strict=True))


def objects_of(columns: store.ObjectColumns) -> list[LeasedObject]:
    """Raises ValueError if the columns do not fit each other."""
    small = (columns.headers, columns.slabs, columns.groups, columns.tokens, columns.stored_positions)
    headers, slabs, groups, tokens, positions = (np.frombuffer(column, "<u4").tolist() for column in small)
    large = (columns.generations, columns.offsets, columns.payload_bytes, columns.checksums)
    generations, offsets, sizes, checksums = (np.frombuffer(column, "<u8").tolist() for column in large)
    fields = ("header", "generation", "slab", "offset", "payload_bytes", "group")
    values = zip(headers, generations, slabs, offsets, sizes, groups, strict=True)
    places = [store.ObjectPlace(**dict(zip(fields, place, strict=True))) for place in values]
    names, verify = hashes(columns.chain_hashes), map(bool, columns.verify)
    facts = zip(places, columns.domains, names, tokens, positions, checksums, verify, strict=True)
    return list(map(LeasedObject._make, facts))


NOTHING = Plan(store.LookupSummary(), [], 0, 0)
