"""One lookup while it is made: what it has leased so far, and what its answer will say."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.store import prefix, segments
from services.store.catalog import Chunk
from services.store.cover import Cover, hashes_of, keys_of, lengths_of, trim
from services.store.leased import object_columns
from services.store.leases import HolderKey
from services.store.objects import ChunkKey
from services.store.query import Piece, Query
from services.store.state import StoreState


@dataclass
class Missing:
    """Chunks that L2 has and that are not served all the same."""

    late: set[ChunkKey] = field(default_factory=set)
    slow: set[ChunkKey] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.late or self.slow)

    def reason(self, key: ChunkKey) -> pb.Reason:
        if key in self.late:
            return pb.REASON_DEADLINE
        return pb.REASON_SLOWER_THAN_COMPUTE if key in self.slow else pb.REASON_UNSPECIFIED


class Run:
    """Methods need the state's lock."""

    def __init__(self, state: StoreState, query: Query, holder: HolderKey) -> None:
        self._state = state
        self.query = query
        self.holder = holder
        self.missing = Missing()
        self.from_l2: set[ChunkKey] = set()
        # What a matcher claims, and its reasons for the rest.
        self.claims: Sequence[Piece] = ()
        self.rest: list[pb.Shortfall] = []
        # Why tokens are not served that nothing else explains.
        self.default: tuple[pb.Reason, str] = (pb.REASON_UNKNOWN_TEXT, "")
        # Whole chunks of the prompt's chain that are leased; behind them perhaps the beginning of another.
        self.whole_chunks = 0
        # A cap forbids further leases.
        self.full = False
        self._prefix: list[Piece] = []
        self._served: list[Piece] = []
        self._leased: dict[ChunkKey, Chunk] = {}
        self._cover = Cover(query.count)

    @property
    def prefix_end(self) -> int:
        return self._prefix[-1].end if self._prefix else 0

    @property
    def covered_tokens(self) -> int:
        """Tokens that what is leased serves."""
        return self.prefix_end + sum(piece.length for piece in self._served)

    @property
    def last_token(self) -> int:
        """Position of the token that is always computed, for its logits."""
        return self.query.count - 1

    def _lease(self, chunks: Sequence[Chunk]) -> int:
        """How many of these chunks, which are here, are leased now: from the first on, as far as the caps allow."""
        leased = self._leased
        new = {chunk.key: chunk for chunk in chunks if chunk.key not in leased}
        taken = 0 if self.full else self._state.lease(self.holder, list(new.values()))
        if taken == len(new):
            leased.update(new)
            return len(chunks)
        self.full = True
        leased.update(islice(new.items(), taken))
        return next(index for index, chunk in enumerate(chunks) if chunk.key not in leased)

    def extend_prefix(self) -> None:
        """Whole chunks as far as they go, then the best beginning of the next."""
        del self._prefix[self.whole_chunks :]
        pieces, chunks = prefix.walk(self._state, self.query, self.whole_chunks)
        taken = self._lease(chunks)
        self._prefix += pieces[:taken]
        self.whole_chunks += taken
        edge = prefix.edge(self._state, self.query, self.whole_chunks)
        if edge is not None and self._lease([edge[1]]):
            self._prefix.append(edge[0])

    def _explain_break(self) -> None:
        """Chunks behind the break have a reason of their own only if L2 has them."""
        here = self.whole_chunks
        following = self.query.chain[here:] if self.missing else [self.query.chunk(here)]
        for index, chunk in enumerate(following, here):
            if chunk is None:
                break
            reason = max(self.missing.reason(key) for key in self.query.prefix_keys(chunk))
            if not reason and index == here:
                reason = pb.REASON_QUOTA if self.full else prefix.why_broken(self._state, self.query, index)
            if reason:
                self._cover.explain(chunk.first, chunk.first + chunk.tokens, reason)

    def take_segments(self) -> list[Piece]:
        """Leases what is here of the matcher's claims; returns those whose chunks are not in the arena."""
        claims = trim(self.claims, self.prefix_end, self.last_token)
        pieces, chunks, refused = segments.check(self._state, self.query, claims)
        if self._lease(chunks) < len(chunks):
            for piece in pieces:
                if piece.key not in self._leased:
                    self._cover.explain(piece.position, piece.end, pb.REASON_QUOTA)
        self._served = [piece for piece in pieces if piece.key in self._leased]
        absent = []
        for claim, reason in refused:
            if reason == pb.REASON_EVICTED:
                absent.append(claim)
            late = self.missing.reason(claim.key) if reason == pb.REASON_EVICTED else pb.REASON_UNSPECIFIED
            self._cover.explain(claim.position, claim.end, late or reason)
        return absent

    def touch(self) -> None:
        """What serves the answer was used; of the prefix as well as of the rest the last first."""
        for pieces in (self._prefix, self._served):
            self._state.touch([self._leased[piece.key] for piece in pieces])

    def objects(self, known: Iterable[ChunkKey] = ()) -> store_pb2.ObjectColumns:
        """Objects of the run's rank that are leased, but those of `known` chunks.

        A chunk that has left since it was leased is left out: its blocks may hold another's bytes by now.
        """
        skip = set(known)
        chunks = [chunk for key, chunk in self._leased.items() if key not in skip and chunk.resident]
        return object_columns(self._state, chunks, self.holder.rank)

    @property
    def leased_keys(self) -> list[ChunkKey]:
        return list(self._leased)

    def summary(self, epoch: int) -> store_pb2.LookupSummary:
        """prefix_tokens, segments and shortfalls add up to the prompt's tokens."""
        self._explain_break()
        last = self.last_token
        before = trim(self._prefix, 0, last)
        end = before[-1].end if before else 0
        behind = trim(self._served, end, last)
        self._cover.serve([*before, *behind])
        self._cover.explain(last, last + 1, pb.REASON_LAST_TOKEN)
        blended = next((piece.position for piece in before if piece.key.domain == pb.DOMAIN_BLENDED), end)
        keys = keys_of([*before, *behind])
        reason, detail = self.default
        return store_pb2.LookupSummary(
            prefix_tokens=end,
            blended_tokens=end - blended,
            prefix_hashes=hashes_of(before),
            prefix_lengths=lengths_of(before),
            segments=segments.columns_of(behind, self._leased),
            shortfalls=self._cover.shortfalls(self.rest, reason, detail),
            epoch=epoch,
            l1_chunks=len(keys) - (from_l2 := len(self.from_l2.intersection(keys))),
            l2_chunks=from_l2,
        )
