"""Reservations: room for chunks that agents copy into the arena, and what becomes of it.

reserve -> commit, abort, or expire. An expired one (or one whose session is lost) can no longer be
committed, and its blocks are quarantined: they are reused only after a late Commit or Abort, after the
agent's word that its copies have stopped, or after proof that its process has ended.
"""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2, store_pb2
from services.common.arena_format import BlockState
from services.common.errors import KvblendError
from services.common.failpoints import passage
from services.common.identity import Chunk as ChainChunk
from services.store.arena.blocks import Writer, block_bytes
from services.store.catalog import Chunk, in_scope
from services.store.leasing.leases import Ref
from services.store.names import MAX_NAMES
from services.store.objects import ChunkInfo, ChunkKey, ObjectKey, info_of, meta_of
from services.store.spaces import ResolvedSpace
from services.store.state import StoreState

# After one of these the rest of a request's chunks need not be tried: they are useless without this one.
_FULL = (pb.REASON_NO_SPACE, pb.REASON_QUOTA)


@dataclass(frozen=True)
class Wish:
    """A chunk that an agent offers to store."""

    chunk: ChainChunk
    key: ChunkKey
    info: ChunkInfo
    # REASON_UNSPECIFIED: wanted, if it is not there and there is room.
    declined: pb.Reason = pb.REASON_UNSPECIFIED


@dataclass(frozen=True)
class Promise:
    """How long what is stored should stay. `expires_at` in Unix seconds, 0: no expiry of its own."""

    document: str = ""
    pinned: bool = False
    expires_at: float = 0.0


@dataclass
class _Item:
    key: ObjectKey
    meta: object_pb2.ObjectMeta
    generation: int
    # Bytes of the arena.
    size: int
    cleared: bool = False
    # Of others who offered the same text meanwhile, by document.
    joined: dict[str, Promise] = field(default_factory=dict)


@dataclass
class _Reservation:
    number: int
    session: bytes
    deadline: float
    items: dict[int, _Item] = field(default_factory=dict)


@dataclass
class _Quarantine:
    session: bytes
    headers: list[int]


class Writes:
    """All methods take the state's lock."""

    def __init__(self, state: StoreState, ttl: float) -> None:
        """`ttl`: seconds from reserve to commit."""
        self._state = state
        self.ttl = ttl
        self._open: dict[int, _Reservation] = {}
        self._quarantined: dict[int, _Quarantine] = {}
        self._writing: dict[ObjectKey, _Item] = {}

    def reserved(self) -> list[int]:
        """Headers of the blocks that agents may be writing, and may still commit."""
        return [header for reservation in self._open.values() for header in reservation.items]

    def quarantined(self) -> list[int]:
        """Headers of the blocks that agents may be writing, in vain."""
        return [header for quarantine in self._quarantined.values() for header in quarantine.headers]

    def reserve(
        self, session: bytes, space: ResolvedSpace, rank: pb.Rank, wishes: Sequence[Wish], promise: Promise
    ) -> tuple[int, list[store_pb2.ChunkGrant]]:
        """(reservation id, 0 if nothing was granted; one grant for each wish)."""
        state = self._state
        with state.lock:
            reservation = _Reservation(secrets.randbits(63) | 1, session, state.clock.now() + self.ttl)
            grants: list[store_pb2.ChunkGrant] = []
            full = pb.REASON_UNSPECIFIED
            try:
                here = [chunk for wish in wishes if (chunk := state.catalog.get(wish.key))]
                with self._protecting(here), state.making_room():
                    for wish in wishes:
                        grant = self._grant(reservation, space, rank, wish, promise, full)
                        if grant.reason in _FULL and grant.outcome == store_pb2.CHUNK_OUTCOME_DECLINED:
                            full = grant.reason
                        grants.append(grant)
            except BaseException:
                self._free_rest(reservation)
                raise
            for grant in grants:
                if grant.outcome == store_pb2.CHUNK_OUTCOME_DECLINED:
                    state.stats.declined(pb.Reason.Name(grant.reason))
            if not reservation.items:
                return 0, grants
            self._open[reservation.number] = reservation
            return reservation.number, grants

    @contextmanager
    def _protecting(self, chunks: list[Chunk]) -> Iterator[None]:
        """Making room must not take the chain's own beginning."""
        self._state.policy.kept(chunks, self._state.clock.now())
        for chunk in chunks:
            chunk.protectors += 1
        try:
            yield
        finally:
            for chunk in chunks:
                chunk.protectors -= 1

    def _grant(
        self,
        reservation: _Reservation,
        space: ResolvedSpace,
        rank: pb.Rank,
        wish: Wish,
        promise: Promise,
        full: pb.Reason,
    ) -> store_pb2.ChunkGrant:
        grant = store_pb2.ChunkGrant(
            first_token=wish.chunk.first,
            tokens=wish.chunk.tokens,
            chain_hash=wish.chunk.chain_hash,
            domain=wish.key.domain,
            outcome=store_pb2.CHUNK_OUTCOME_DECLINED,
            reason=wish.declined,
        )
        if wish.declined:
            return grant
        number = space.shape.rank_number(rank)
        missing = self._missing(wish, space.shape.groups, number)
        if not missing:
            grant.outcome, grant.reason = store_pb2.CHUNK_OUTCOME_PRESENT, self._keep(wish, promise)
        elif any(key in self._writing for key in missing):
            self._join(missing, promise)
            grant.outcome, grant.reason = store_pb2.CHUNK_OUTCOME_BEING_WRITTEN, pb.REASON_BEING_WRITTEN
        elif full:
            grant.reason = full
        else:
            taken, grant.reason = self._take_blocks(reservation, space, rank, wish, missing, promise)
            if grant.reason:
                return grant
            grant.outcome = store_pb2.CHUNK_OUTCOME_GRANTED
            grant.places.extend(
                self._state.pool.place(header, key.group) for header, key in zip(taken, missing, strict=True)
            )
        return grant

    def _known(self, wish: Wish) -> Chunk | None:
        """The chunk that already answers for this wish; one that has expired or does not fit makes way."""
        state = self._state
        if wish.key.domain == pb.DOMAIN_BLENDED:
            exact = state.usable(ChunkKey(wish.key.space_id, pb.DOMAIN_EXACT, wish.key.chain_hash))
            if exact is not None:
                return exact
        chunk = state.catalog.get(wish.key)
        if chunk is None:
            return None
        expired = chunk.complete and state.usable(wish.key) is None
        if expired or (not chunk.complete and not chunk.info.fits(wish.info)):
            state.remove(chunk, pb.REASON_EVICTED)
            return None
        return chunk

    def _missing(self, wish: Wish, groups: int, rank: int) -> list[ObjectKey]:
        """The rank's objects of this chunk that are not there yet."""
        chunk = self._known(wish)
        have = chunk.objects if chunk else {}
        return [ObjectKey(wish.key, group, rank) for group in range(groups) if (group, rank) not in have]

    def _keep(self, wish: Wish, promise: Promise) -> pb.Reason:
        """REASON_QUOTA: it stays as it is, but cannot be pinned."""
        chunk = self._known(wish)
        if chunk is None or not promise.document:
            return pb.REASON_UNSPECIFIED
        kept = self._state.keep(chunk, promise.document, promise.pinned, promise.expires_at)
        return pb.REASON_UNSPECIFIED if kept else pb.REASON_QUOTA

    def _join(self, keys: Iterable[ObjectKey], promise: Promise) -> None:
        """Whoever writes these objects now stores them under this name too. Who joins later must offer them again."""
        for item in [self._writing[key] for key in keys if key in self._writing]:
            if promise.document and len(item.joined) < MAX_NAMES:
                item.joined[promise.document] = promise

    def _take_blocks(
        self,
        reservation: _Reservation,
        space: ResolvedSpace,
        rank: pb.Rank,
        wish: Wish,
        missing: Sequence[ObjectKey],
        promise: Promise,
    ) -> tuple[list[int], pb.Reason]:
        """Headers of a block for each object, in order; or none at all, and why."""
        state = self._state
        passage("reserve.chunk")
        taken: list[int] = []
        for key in missing:
            payload = space.shape.payload_bytes(key.group, wish.chunk.tokens)
            # A checksum that is not 0 stands in for the real one: the meta's size is final.
            meta = meta_of(key, wish.info, payload, 1, rank)
            meta.pinned, meta.expires_at = promise.pinned, promise.expires_at
            size = block_bytes(payload, meta.ByteSize())
            header = None
            if not meta.pinned or state.usage.may_pin(meta.tenant, size):
                writer = Writer(reservation.session, reservation.number)
                header = state.make_block(payload, meta.ByteSize(), writer, meta.tenant)
            if header is None:
                for other in taken:
                    self._forget_item(reservation.items.pop(other))
                    state.pool.free(other)
                return [], state.usage.why_refused(meta.tenant, size, meta.pinned)
            taken.append(header)
            size = state.pool.headers.get(header, "capacity_bytes")
            item = _Item(key, meta, state.pool.headers.generation(header), size)
            reservation.items[header] = self._writing[key] = item
            state.usage.reserve(meta.tenant, size, meta.pinned)
        return taken, pb.REASON_UNSPECIFIED

    def _forget_item(self, item: _Item) -> None:
        """It is no longer being written."""
        del self._writing[item.key]
        self._state.usage.unreserve(item.meta.tenant, item.size, item.meta.pinned)

    def commit(
        self, session: bytes, number: int, written: Sequence[tuple[Ref, int]]
    ) -> tuple[list[pb.Reason], pb.StreamPosition]:
        """`written`: (ref, checksum). One reason for each: REASON_UNSPECIFIED means committed.

        Raises:
            KvblendError: UNKNOWN_RESERVATION.
        """
        state = self._state
        with state.lock:
            reservation = self._open.get(number)
            if reservation is not None and reservation.session == session:
                if reservation.deadline > state.clock.now():
                    del self._open[number]
                    try:
                        reasons = [self._commit_one(reservation, ref, checksum) for ref, checksum in written]
                    finally:
                        self._free_rest(reservation)
                    return reasons, state.outbox.position()
                self._quarantine(reservation)
            if not self._release_quarantine(session, number):
                raise KvblendError("UNKNOWN_RESERVATION", "there is no such reservation of this session")
            return [pb.REASON_RESERVATION_EXPIRED] * len(written), state.outbox.position()

    def _commit_one(self, reservation: _Reservation, ref: Ref, checksum: int) -> pb.Reason:
        header, generation = ref
        item = reservation.items.get(header)
        if item is None or item.generation != generation:
            return pb.REASON_STALE_GENERATION
        if item.cleared:
            return pb.REASON_CLEARED
        return self._make_visible(reservation, header, item, checksum)

    def _make_visible(self, reservation: _Reservation, header: int, item: _Item, checksum: int) -> pb.Reason:
        item.meta.checksum = checksum
        info = info_of(item.meta)
        if not self._state.catalog.accepts(item.key.chunk, info, item.key.group, item.key.rank):
            chunk = self._state.catalog.get(item.key.chunk)
            if chunk is None or not chunk.info.fits(info):
                # Computed elsewhere meanwhile.
                return pb.REASON_SUPERSEDED
            # The same object has come from L2 meanwhile.
            for document in item.meta.documents:
                self._state.keep(chunk, document, item.meta.pinned, item.meta.expires_at)
        else:
            try:
                chunk = self._state.commit_object(item.key, header, item.meta)
            finally:
                if self._state.catalog.of_header(header) is not None:
                    self._forget_item(reservation.items.pop(header))
        for promise in item.joined.values():
            self._state.keep(chunk, promise.document, promise.pinned, promise.expires_at)
        return pb.REASON_UNSPECIFIED

    def _free_rest(self, reservation: _Reservation) -> None:
        for header, item in reservation.items.items():
            self._forget_item(item)
            self._state.pool.free(header)

    def abort(self, session: bytes, number: int) -> None:
        """The copies have stopped. Idempotent."""
        with self._state.lock:
            reservation = self._open.get(number)
            if reservation is not None and reservation.session == session:
                del self._open[number]
                self._free_rest(reservation)
            else:
                self._release_quarantine(session, number)

    def expire(self) -> None:
        with self._state.lock:
            now = self._state.clock.now()
            for reservation in [item for item in self._open.values() if item.deadline <= now]:
                self._quarantine(reservation)

    def session_lost(self, session: bytes) -> None:
        with self._state.lock:
            for reservation in [item for item in self._open.values() if item.session == session]:
                self._quarantine(reservation)

    def _quarantine(self, reservation: _Reservation) -> None:
        del self._open[reservation.number]
        for header, item in reservation.items.items():
            self._forget_item(item)
            passage("quarantine.state")
            self._state.pool.headers.set_state(header, BlockState.QUARANTINED)
        self._quarantined[reservation.number] = _Quarantine(reservation.session, list(reservation.items))

    def adopt_quarantined(self, header: int, session: bytes, number: int) -> None:
        """A block whose writer outlived a restart of the store."""
        with self._state.lock:
            self._state.pool.headers.set_state(header, BlockState.QUARANTINED)
            self._quarantined.setdefault(number, _Quarantine(session, [])).headers.append(header)

    def _release_quarantine(self, session: bytes, number: int) -> bool:
        quarantine = self._quarantined.get(number)
        if quarantine is None or quarantine.session != session:
            return False
        del self._quarantined[number]
        for header in quarantine.headers:
            self._state.pool.free(header)
        return True

    def copies_stopped(self, session: bytes) -> int:
        """Every lost copy of a session has stopped: how many blocks that frees."""
        with self._state.lock:
            numbers = [number for number, item in self._quarantined.items() if item.session == session]
            freed = sum(len(self._quarantined[number].headers) for number in numbers)
            for number in numbers:
                self._release_quarantine(session, number)
            return freed

    def clear(self, scope: pb.ClearScope) -> None:
        """What is being written in this scope will not become visible."""
        with self._state.lock:
            for reservation in self._open.values():
                for item in reservation.items.values():
                    meta = item.meta
                    item.cleared |= in_scope(scope, meta.space_id, meta.tenant, [*meta.documents, *item.joined])
