"""One lookup while it is made: what it has leased so far, and what its answer will say."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.tokens import encode_u32
from services.store.catalog import Chunk
from services.store.leasing.leases import HolderKey
from services.store.lookup import prefix, segments
from services.store.lookup.cover import Cover
from services.store.lookup.leased import object_columns
from services.store.lookup.pieces import Piece, Pieces
from services.store.lookup.query import Query
from services.store.objects import ChunkKey, Name
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
        self.claims: Pieces[Name] = Pieces.none()
        self.rest: list[pb.Shortfall] = []
        # Why tokens are not served that nothing else explains.
        self.default: tuple[pb.Reason, str] = (pb.REASON_UNKNOWN_TEXT, "")
        # Whole chunks of the prompt's chain that are leased; behind them perhaps the beginning of another.
        self.whole_chunks = 0
        # A cap forbids further leases.
        self.full = False
        self._prefix: Pieces[Chunk] = Pieces.none()
        self._served: Pieces[Chunk] = Pieces.none()
        # In the order of leasing; a dict, to have each once.
        self._leased: dict[Chunk, None] = {}
        self._cover = Cover(query.count)

    @property
    def prefix_end(self) -> int:
        return self._prefix.end

    @property
    def covered_tokens(self) -> int:
        """Tokens that what is leased serves."""
        return self.prefix_end + self._served.tokens

    @property
    def last_token(self) -> int:
        """Position of the token that is always computed, for its logits."""
        return self.query.count - 1

    def _lease(self, chunks: Sequence[Chunk]) -> int:
        """How many of these chunks, which are here, are leased now: from the first on, as far as the caps allow."""
        leased = self._leased
        new = dict.fromkeys([chunk for chunk in chunks if chunk not in leased])
        taken = 0 if self.full else self._state.lease(self.holder, list(new))
        if taken == len(new):
            leased.update(new)
            return len(chunks)
        self.full = True
        leased.update(dict.fromkeys(list(new)[:taken]))
        return next(index for index, chunk in enumerate(chunks) if chunk not in leased)

    def extend_prefix(self) -> None:
        """Whole chunks as far as they go, then the best beginning of the next."""
        found = prefix.walk(self._state, self.query, self.whole_chunks)
        taken = self._lease(found.sources)
        self._prefix = self._prefix.between(0, self.whole_chunks).followed_by(found.between(0, taken))
        self.whole_chunks += taken
        edge = prefix.edge(self._state, self.query, self.whole_chunks)
        if self._lease(edge.sources):
            self._prefix = self._prefix.followed_by(edge)

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

    def take_segments(self) -> Pieces[ChunkKey]:
        """Leases what is here of the matcher's claims; returns those whose chunks are not in the arena."""
        claims = self.claims.trim(self.prefix_end, self.last_token)
        here, refused = segments.check(self._state, self.query, claims)
        if self._lease(here.sources) < len(here):
            is_leased = np.array([chunk in self._leased for chunk in here.sources])
            for piece in here.at(np.flatnonzero(~is_leased)):
                self._cover.explain(piece.position, piece.end, pb.REASON_QUOTA)
            here = here.at(np.flatnonzero(is_leased))
        self._served = here
        absent: list[Piece[ChunkKey]] = []
        for claim, reason in refused:
            late = pb.REASON_UNSPECIFIED
            if reason == pb.REASON_EVICTED:
                absent.append(Piece(claim.position, ChunkKey(*claim.source), *claim[2:]))
                late = self.missing.reason(absent[-1].source)
            self._cover.explain(claim.position, claim.end, late or reason)
        return Pieces.of_each(absent)

    def touch(self) -> None:
        """What serves the answer was used; of the prefix as well as of the rest the last first."""
        for pieces in (self._prefix, self._served):
            self._state.touch(pieces.sources)

    def objects(self, known: Iterable[Chunk] = ()) -> store_pb2.ObjectColumns:
        """Objects of the run's rank that are leased, but those of `known` chunks.

        A chunk that has left since it was leased is left out: its blocks may hold another's bytes by now.
        """
        skip = set(known)
        chunks = [chunk for chunk in self._leased if chunk.resident and chunk not in skip]
        return object_columns(self._state, chunks, self.holder.rank)

    @property
    def leased(self) -> list[Chunk]:
        return list(self._leased)

    def summary(self, epoch: int) -> store_pb2.LookupSummary:
        """prefix_tokens, segments and shortfalls add up to the prompt's tokens."""
        self._explain_break()
        last = self.last_token
        before = self._prefix.trim(0, last)
        end = before.end
        behind = self._served.trim(end, last)
        self._cover.serve(before.followed_by(behind))
        self._cover.explain(last, last + 1, pb.REASON_LAST_TOKEN)
        keys = [chunk.key for chunk in before.sources]
        is_blended = [key.domain == pb.DOMAIN_BLENDED for key in keys]
        exact = int(before.positions[is_blended.index(True)]) if any(is_blended) else end
        serving = {*before.sources, *behind.sources}
        from_l2 = sum(chunk.key in self.from_l2 for chunk in serving) if self.from_l2 else 0
        reason, detail = self.default
        return store_pb2.LookupSummary(
            prefix_tokens=end,
            blended_tokens=end - exact,
            prefix_hashes=b"".join([key.chain_hash for key in keys]),
            prefix_lengths=encode_u32(before.lengths),
            segments=segments.columns_of(behind),
            shortfalls=self._cover.shortfalls(self.rest, reason, detail),
            epoch=epoch,
            l1_chunks=len(serving) - from_l2,
            l2_chunks=from_l2,
        )
