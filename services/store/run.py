"""One lookup while it is made: what it has leased so far, and what its answer will say."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.store import prefix, segments
from services.store.catalog import Chunk
from services.store.cover import Cover, hashes_of, keys_of, lengths_of, trim
from services.store.leases import HolderKey
from services.store.objects import ChunkKey
from services.store.query import Piece, Query
from services.store.state import StoreState, rank_objects


@dataclass
class Missing:
    """Chunks that L2 has and that are not served all the same."""

    late: set[ChunkKey] = field(default_factory=set)
    slow: set[ChunkKey] = field(default_factory=set)

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
        self.claims: list[Piece] = []
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

    def _lease(self, key: ChunkKey) -> bool:
        """The chunk is here and leased."""
        if key in self._leased:
            return True
        chunk = self._state.usable(key)
        if chunk is None or self.full:
            return False
        self.full = not self._state.lease(self.holder, chunk)
        if self.full:
            return False
        self._leased[key] = chunk
        return True

    def extend_prefix(self) -> None:
        """Whole chunks as far as they go, then the best beginning of the next."""
        del self._prefix[self.whole_chunks :]
        for piece in prefix.walk(self._state, self.query, self.whole_chunks):
            if not self._lease(piece.key):
                break
            self._prefix.append(piece)
            self.whole_chunks += 1
        edge = prefix.edge(self._state, self.query, self.whole_chunks)
        if edge is not None and self._lease(edge.key):
            self._prefix.append(edge)
        self._state.touch(self._leased[piece.key] for piece in self._prefix)

    def _explain_break(self) -> None:
        for index, chunk in enumerate(self.query.chain[self.whole_chunks :], self.whole_chunks):
            reasons = [self.missing.reason(key) for key in self.query.prefix_keys(chunk)]
            reason = max(reasons)
            if not reason and index == self.whole_chunks:
                reason = pb.REASON_QUOTA if self.full else prefix.why_broken(self._state, self.query, index)
            if reason:
                self._cover.explain(chunk.first, chunk.first + chunk.tokens, reason)

    def take_segments(self) -> list[Piece]:
        """Leases what is here of the matcher's claims; returns those whose chunks are not in the arena."""
        self._served, absent = [], []
        for claim in trim(self.claims, self.prefix_end, self.last_token):
            piece, reason = segments.check(self._state, self.query, claim)
            if piece is not None and self._lease(piece.key):
                self._served.append(piece)
                continue
            if reason == pb.REASON_EVICTED:
                absent.append(claim)
                reason = self.missing.reason(claim.key) or reason
            self._cover.explain(claim.position, claim.end, pb.REASON_QUOTA if piece is not None else reason)
        self._state.touch(self._leased[piece.key] for piece in self._served)
        return absent

    def objects(self, known: Iterable[ChunkKey] = ()) -> list[store_pb2.LeasedObject]:
        """Objects of the run's rank that are leased, but those of `known` chunks."""
        skip = set(known)
        chunks = [chunk for key, chunk in self._leased.items() if key not in skip]
        return leased_objects(self._state, chunks, self.holder.rank)

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
        for piece in [*before, *behind]:
            self._cover.serve(piece)
        self._cover.explain(last, last + 1, pb.REASON_LAST_TOKEN)
        blended = next((piece.position for piece in before if piece.key.domain == pb.DOMAIN_BLENDED), end)
        keys = keys_of([*before, *behind])
        reason, detail = self.default
        return store_pb2.LookupSummary(
            prefix_tokens=end,
            blended_tokens=end - blended,
            prefix_hashes=hashes_of(before),
            prefix_lengths=lengths_of(before),
            segments=segments.segments_of(self._state, behind),
            shortfalls=self._cover.shortfalls(self.rest, reason, detail),
            epoch=epoch,
            l1_chunks=sum(key not in self.from_l2 for key in keys),
            l2_chunks=sum(key in self.from_l2 for key in keys),
        )


def leased_objects(state: StoreState, chunks: Iterable[Chunk], rank: int) -> list[store_pb2.LeasedObject]:
    """One rank's objects of leased chunks."""
    return [
        store_pb2.LeasedObject(
            place=state.pool.place(header, group),
            chain_hash=chunk.key.chain_hash,
            domain=chunk.key.domain,
            tokens=chunk.info.token_count,
            stored_position=chunk.info.stored_position,
            checksum=state.pool.headers.get(header, "checksum"),
            verify=header in state.unverified,
        )
        for chunk in chunks
        for group, header in rank_objects(chunk, rank)
    ]
