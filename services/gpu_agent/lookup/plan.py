"""From a lookup's answer to the stored chunks behind it: which tokens of which object go where."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.columns import Numbers, hashes, u32s
from services.common.errors import KvblendError
from services.common.identity import HASH_BYTES
from services.gpu_agent.engines.layouts import GroupShape
from services.gpu_agent.lookup.leased import Leased, Ref, leased_of, refs_of

_GOOD = common.REASON_UNSPECIFIED


@dataclass(frozen=True)
class Chunks:
    """The stored chunks of an answer, the prefix's first: [n] each, of the prompt or of the text that was stored.

    `lengths` tokens of a chunk, from its token `skips` on, go to `query_positions`. `objects` is [n, layer groups]:
    rows of the leased objects, -1 for what the store did not lease.
    """

    query_positions: Numbers
    stored_positions: Numbers
    skips: Numbers
    lengths: Numbers
    objects: Numbers

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def deltas(self) -> Numbers:
        return self.query_positions - self.stored_positions

    def rows(self, of: Numbers) -> Numbers:
        """The objects of these chunks, each once."""
        rows = np.unique(self.objects[of])
        return rows[rows >= 0]

    def tokens(self) -> tuple[Numbers, Numbers]:
        """(position in the prompt, chunk), of every token that is served."""
        starts = _running_sum(self.lengths)
        inside = np.arange(starts[-1]) - np.repeat(starts[:-1], self.lengths)
        return np.repeat(self.query_positions, self.lengths) + inside, np.repeat(np.arange(len(self)), self.lengths)

    def flaws(self, leased: Leased, groups: Sequence[GroupShape]) -> Numbers:
        """Why the objects cannot be what the answer says, [n]; REASON_UNSPECIFIED: they can."""
        found = np.full(len(self), _GOOD, np.int64)
        there = (self.objects >= 0).all(axis=1)
        found[~there] = common.REASON_EVICTED
        objects = self.objects[there]
        tokens, token_bytes = leased.tokens[objects], np.array([shape.token_bytes for shape in groups], np.int64)
        ends, begins = (self.skips + self.lengths)[there], (self.stored_positions - self.skips)[there]
        wrong = (leased.payload_bytes[objects] != tokens * token_bytes) | (ends[:, None] > tokens)
        wrong |= leased.stored_positions[objects] != begins[:, None]
        found[np.flatnonzero(there)[wrong.any(axis=1)]] = common.REASON_COPY_FAILED
        return found


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
            self.count = _check(summary, tokens)
        except KvblendError as error:
            raise KvblendError("INTERNAL", f"the store's answer: {error.message}") from error

    @cached_property
    def leased(self) -> Leased:
        return leased_of(self._leased)

    @cached_property
    def chunks(self) -> Chunks:
        rows = self.leased.by_name()
        (domains, names), columns = _names(self._summary), _columns(self._summary)
        objects = [
            rows.get((domain, name, group), -1)
            for domain, name in zip(domains, names, strict=True)
            for group in range(self._groups)
        ]
        return Chunks(*columns, np.array(objects, np.int64).reshape(len(names), self._groups))

    def unused(self) -> list[Ref]:
        """What was leased and does not serve the answer."""
        if sum(len(part.domains) for part in self._leased) == self.count * self._groups:
            # An object for each: looking at every one is not worth its time.
            return []
        used = set(self.leased.refs(self.chunks.rows(np.arange(self.count))))
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
    if (u32s(segments.query_positions) < np.append(summary.prefix_tokens, ends)[:-1]).any():
        raise KvblendError("INTERNAL", "its segments overlap")
    return len(prefix) + len(of_segments)


def _running_sum(values: Numbers) -> Numbers:
    """[n] -> [n + 1], from 0."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(values)))


def _names(summary: store.LookupSummary) -> tuple[list[int], list[bytes]]:
    """Domain and chain hash of each chunk."""
    segments = summary.segments
    ends = np.cumsum(u32s(summary.prefix_lengths))
    exact = ends <= summary.prefix_tokens - summary.blended_tokens
    prefix = np.where(exact, common.DOMAIN_EXACT, common.DOMAIN_BLENDED)
    of_segments = np.repeat(np.frombuffer(segments.domains, np.uint8), u32s(segments.chunk_counts))
    names = [*hashes(summary.prefix_hashes), *hashes(segments.chain_hashes)]
    return [*prefix.tolist(), *of_segments.tolist()], names


def _columns(summary: store.LookupSummary) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Query positions, stored positions, skips and lengths of the chunks."""
    segments = summary.segments
    prefix, lengths = u32s(summary.prefix_lengths), u32s(segments.chunk_lengths)
    counts = u32s(segments.chunk_counts)
    # Tokens of a segment in front of each of its chunks.
    starts, firsts = _running_sum(lengths), _running_sum(counts)[:-1]
    inside = starts[:-1] - np.repeat(starts[firsts], counts)
    skips = np.zeros(len(lengths), np.int64)
    some = counts > 0
    skips[firsts[some]] = u32s(segments.skip_tokens)[some]
    query, stored = (
        np.repeat(u32s(column), counts) + inside for column in (segments.query_positions, segments.stored_positions)
    )
    before = _running_sum(prefix)[:-1]
    return (
        np.concatenate((before, query)),
        np.concatenate((before, stored)),
        np.concatenate((np.zeros_like(before), skips)),
        np.concatenate((prefix, lengths)),
    )


NOTHING = Plan(store.LookupSummary(), [], 0, 0)
