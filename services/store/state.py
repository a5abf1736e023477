"""What the store holds, behind one lock: blocks, catalog, leases, and what the matchers are told.

Critical sections are short and do no I/O. Every method needs the lock unless it says otherwise.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.common.arena_format import FLAG_IN_L2, FLAG_PINNED, BlockState
from services.common.failpoints import passage
from services.store.arena.blocks import BlockPool, Writer, block_bytes
from services.store.arena.scattered import in_the_way
from services.store.arena.usage import ArenaUsage
from services.store.catalog import Catalog, Chunk
from services.store.eviction import FairShares
from services.store.leasing.leases import HolderKey, LeaseTable, Objects, Ref
from services.store.leasing.sampling import Sampler
from services.store.names import ANY
from services.store.objects import ChunkKey, Name, ObjectKey, info_of
from services.store.publishing.changes import STORE_OWNER, Added, Change, Removed
from services.store.stats import Stats
from services.store.usage import Usage

# Making room looks at no more chunks that should go after others.
_MOST_SPARED = 32


class Outbox(Protocol):
    """The store's stream of changes to the matchers' log (publishing/publisher.py). `append` never blocks."""

    def append(self, change: Change) -> int: ...

    def position(self) -> pb.StreamPosition: ...

    def durable_position(self) -> pb.StreamPosition: ...

    def wait_durable(self, sequence: int, timeout: float) -> bool: ...

    def depth(self) -> int: ...

    def trouble(self) -> str: ...

    def tell_again(self, why: str) -> None: ...


@dataclass(frozen=True)
class Clock:
    """Seconds: `now` only ever grows, `wall` is Unix time."""

    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class StoreState:
    def __init__(
        self,
        pool: BlockPool,
        catalog: Catalog,
        policy: FairShares,
        usage: Usage,
        clock: Clock,
        *,
        lease_ttl: float,
        session_cap: int,
        tenant_cap: int,
        l2_id: str,
        verify_share: float,
    ) -> None:
        """TTL in seconds, caps of leased bytes. `l2_id`: empty without L2. `verify_share`: of leased objects."""
        self.lock = threading.RLock()
        self.pool = pool
        self.catalog = catalog
        self.policy = policy
        self.usage = usage
        self.clock = clock
        self.stats = Stats()
        self.arena_usage = ArenaUsage(pool)
        self.leases = LeaseTable(lease_ttl, session_cap, tenant_cap, self._copies_stopped)
        self.l2_id = l2_id
        # Headers whose bytes nobody has verified since a crash.
        self.unverified: set[int] = set()
        self._sampler = Sampler(verify_share)
        # Objects that the start could not use, by kind of damage (check/kinds.py).
        self.dropped_at_start: Counter[str] = Counter()
        self._condemned: set[int] = set()
        self._order: Iterator[Chunk] = iter(())
        self._expiring: set[Chunk] = set()
        self._outbox: Outbox | None = None
        self._on_complete: Callable[[Chunk], None] = lambda _: None
        self._spare: Callable[[Chunk], bool] = lambda _: False

    def connect(
        self, outbox: Outbox, on_complete: Callable[[Chunk], None], spare: Callable[[Chunk], bool] = lambda _: False
    ) -> None:
        """Both are called under the lock. `on_complete(chunk)` is told of each chunk that became usable.

        `spare(chunk)`: others should be evicted before it, as it is being saved elsewhere.
        """
        self._outbox = outbox
        self._on_complete = on_complete
        self._spare = spare

    @property
    def outbox(self) -> Outbox:
        if self._outbox is None:
            raise RuntimeError("the state is not connected to an outbox yet")
        return self._outbox

    @property
    def condemned(self) -> frozenset[int]:
        """Headers of the blocks that left the catalog while they were copied."""
        return frozenset(self._condemned)

    # Room.

    def make_block(self, payload_bytes: int, meta_bytes: int, writer: Writer, tenant: str) -> int | None:
        """Header of a RESERVED block; evicts for it, and revokes HELD leases as the last resort.

        A tenant at its quota loses chunks of its own first.
        """
        size = block_bytes(payload_bytes, meta_bytes)
        if not self.pool.fits_ever(payload_bytes, meta_bytes) or not self._fit_quota(tenant, size):
            return None
        header = self.pool.reserve(payload_bytes, meta_bytes, writer)
        if header is not None:
            return header
        for chunk, reason in self._leaving(payload_bytes, meta_bytes):
            self._evict(chunk, reason)
            header = self.pool.reserve(payload_bytes, meta_bytes, writer)
            if header is not None:
                break
        return header

    def _evict(self, chunk: Chunk, reason: pb.Reason = pb.REASON_EVICTED) -> None:
        self.stats.add("evicted_chunks")
        self.remove(chunk, reason)

    def _fit_quota(self, tenant: str, size: int) -> bool:
        if self.usage.over_quota(tenant, size) <= 0:
            return True
        for chunk in self.policy.victims_of(tenant, self.clock.now()):
            if not chunk.protectors:
                self._evict(chunk)
                if self.usage.over_quota(tenant, size) <= 0:
                    return True
        return False

    @contextmanager
    def making_room(self) -> Iterator[None]:
        """Blocks that are made inside share one walk over what may go: beginning it costs as much as its chains are
        long. Chunks may leave meanwhile, and nothing else may happen to them."""
        self._order = self.policy.victims(self.clock.now())
        try:
            yield
        finally:
            self._order = iter(())

    def _leaving(self, payload_bytes: int, meta_bytes: int) -> Iterator[tuple[Chunk, pb.Reason]]:
        """Chunks that may go, in order. The caller removes each before it asks for the next."""
        now = self.clock.now()
        spared: list[Chunk] = []
        for chunk in self._victims(chain(self._order, self.policy.victims(now)), spared):
            for neighbour in in_the_way(self, payload_bytes, meta_bytes, chunk, now):
                yield neighbour, pb.REASON_EVICTED
            if chunk.resident and not chunk.protectors:
                yield chunk, pb.REASON_EVICTED
        for chunk in spared:
            if chunk.resident and not chunk.protectors:
                yield chunk, pb.REASON_EVICTED
        for chunk in self.leases.oldest_revocable():
            if chunk.resident and not chunk.pinned:
                yield chunk, pb.REASON_LEASE_REVOKED

    def _victims(self, order: Iterable[Chunk], spared: list[Chunk]) -> Iterator[Chunk]:
        """Of what nothing protects, in this order; those that should go after others are added to `spared`."""
        for chunk in order:
            if chunk.protectors or not chunk.resident:
                continue
            if len(spared) < _MOST_SPARED and self._spare(chunk):
                spared.append(chunk)
            else:
                yield chunk

    def evict_down_to(self, used_bytes: int) -> None:
        """The background watermark: only what no lease protects, and nothing that is being saved elsewhere."""
        if self.pool.used_bytes <= used_bytes:
            return
        for chunk in self._victims(self.policy.victims(self.clock.now()), []):
            self._evict(chunk)
            if self.pool.used_bytes <= used_bytes:
                return
        # Pins, leases and what is being written: nothing is wrong, but there is no room in reserve.
        self.stats.add("watermark_missed")

    # Chunks.

    def commit_object(self, key: ObjectKey, header: int, meta: object_pb2.ObjectMeta, in_l2: bool = False) -> Chunk:
        """The block's payload is whole: it becomes visible, and the chunk with its last object."""
        flags = (FLAG_PINNED if meta.pinned else 0) | (FLAG_IN_L2 if in_l2 else 0)
        self.pool.commit(header, meta, flags)
        passage("commit.visible")
        first = self.catalog.get(key.chunk) is None
        chunk = self.adopt(key, header, meta)
        if first:
            if meta.pinned:
                self.usage.pin(chunk)
            self.set_expiry(chunk, meta.expires_at)
        chunk.in_l2 = chunk.in_l2 or in_l2
        if chunk.complete:
            self.stats.add("stored_chunks")
            self.outbox.append(Added(chunk.key, STORE_OWNER, chunk.info))
            self._on_complete(chunk)
        return chunk

    def adopt(self, key: ObjectKey, header: int, meta: object_pb2.ObjectMeta) -> Chunk:
        """A committed object enters the catalog. Raises ValueError if the catalog does not accept it."""
        first = self.catalog.get(key.chunk) is None
        chunk = self.catalog.add_object(key.chunk, info_of(meta), key.group, key.rank, header)
        self.usage.hold(chunk, self.pool.headers.get(header, "capacity_bytes"))
        chunk.documents.update(meta.documents)
        self.arena_usage.count(chunk, header, 1)
        if first:
            chunk.last_used = self.clock.now()
            self.policy.added(chunk, chunk.last_used)
        return chunk

    def remove(self, chunk: Chunk, reason: pb.Reason) -> None:
        """The chunk leaves the catalog. Its blocks are freed, those being copied when their copies stop."""
        self.stats.add("revoked_leases", self.leases.revoke(chunk, reason))
        self.catalog.remove(chunk)
        self.usage.release(chunk)
        self.policy.removed(chunk)
        self._expiring.discard(chunk)
        passage("evict.chunk")
        for header in chunk.objects.values():
            self.unverified.discard(header)
            self.arena_usage.count(chunk, header, -1)
            if self.leases.is_copied(header):
                self.pool.headers.set_state(header, BlockState.CONDEMNED)
                self._condemned.add(header)
            else:
                self.pool.free(header)
        if chunk.complete:
            self.outbox.append(Removed(chunk.key, STORE_OWNER))

    def _copies_stopped(self, header: int) -> None:
        if header in self._condemned:
            self._condemned.discard(header)
            self.pool.free(header)

    def usable(self, key: ChunkKey) -> Chunk | None:
        """The chunk, if it may be served now."""
        chunk = self.catalog.get(key)
        return chunk if chunk is not None and chunk.usable(self.clock.wall()) else None

    def all_usable(self, names: Iterable[Name]) -> list[Chunk | None]:
        """As `usable`, for each name."""
        wall = self.clock.wall()
        chunks = self.catalog.get_each(names)
        if self._expiring:
            return [chunk if chunk is not None and chunk.usable(wall) else None for chunk in chunks]
        return [chunk if chunk is not None and chunk.complete else None for chunk in chunks]

    def touch(self, chunks: Sequence[Chunk]) -> None:
        """One request reuses them; in the order of its tokens. Those that have left meanwhile are passed over."""
        now = self.clock.now()
        here = [chunk for chunk in chunks if chunk.resident]
        for chunk in here:
            chunk.last_used = now
        self.policy.used(here, now)

    def lease(self, holder: HolderKey, chunks: Sequence[Chunk]) -> int:
        """HELD leases on the rank's objects of usable chunks of one space, each given once.

        Returns of how many of the chunks, from the first on: a cap may forbid the rest.
        """
        if not chunks:
            return 0
        headers, owners = rank_objects(chunks, holder.rank)
        generations, sizes = self.pool.headers.columns(headers, "generation", "capacity_bytes")
        objects = Objects(owners, headers, generations.tolist(), sizes.tolist())
        leased = self.leases.acquire(holder, chunks[0].info.tenant, objects, self.clock.now())
        return leased // chunks[0].info.groups

    def begin_copy(self, holder: HolderKey, ref: Ref) -> pb.Reason:
        """HELD -> BUSY; REASON_UNSPECIFIED: the copy may begin."""
        passage("copy.begin")
        headers = self.pool.headers
        if headers.is_current(*ref) and headers.state(ref[0]) == BlockState.COMMITTED:
            return self.leases.begin(holder, ref)
        return self.leases.why_lost(holder, ref) or pb.REASON_STALE_GENERATION

    def end_copy(self, holder: HolderKey, ref: Ref, keep: bool = False) -> None:
        """A copy has stopped; `keep`: the lease is HELD again."""
        passage("copy.end")
        self.leases.end(holder, ref, self.clock.now() if keep else None)

    def report_corrupt(self, holder: HolderKey, ref: Ref) -> None:
        """Whoever copies an object found that its bytes are not what was committed: the chunk leaves."""
        chunk = self.catalog.of_header(ref[0])
        if chunk is not None and self.leases.is_busy(holder, ref):
            self.stats.add("checksum_failures")
            self.remove(chunk, pb.REASON_CHECKSUM_MISMATCH)

    def must_verify(self, headers: Sequence[int]) -> bytes:
        """1 for each of the leased objects whose reader has to compare its bytes with the checksum, else 0."""
        flags = bytearray([header in self.unverified for header in headers] if self.unverified else len(headers))
        for number in self._sampler.picks(len(headers)):
            flags[number] = 1
        return bytes(flags)

    def ref(self, header: int) -> Ref:
        return header, self.pool.headers.generation(header)

    def keep(self, chunk: Chunk, document: str, pinned: bool, expires_at: float) -> bool:
        """A text that is here is stored again under a name: the longer promise holds. False: its pin is over quota."""
        if document and chunk.documents.isdisjoint((document, ANY)):
            self._add_name(chunk, document)
        may_pin = chunk.pinned or not pinned or self.usage.may_pin(chunk.info.tenant, chunk.size)
        if pinned and may_pin:
            self.usage.pin(chunk)
        longest = max(chunk.expires_at, expires_at)
        self.set_expiry(chunk, 0.0 if 0.0 in (chunk.expires_at, expires_at) else longest)
        self._write_flags(chunk)
        return may_pin

    def _add_name(self, chunk: Chunk, document: str) -> None:
        for header in chunk.objects.values():
            chunk.documents.add(self.pool.add_name(header, document))
        if chunk.in_l2 and chunk.complete:
            # L2 must know the name as well: it is written there again.
            chunk.in_l2 = False
            self._on_complete(chunk)

    def set_expiry(self, chunk: Chunk, expires_at: float) -> None:
        """Unix seconds; 0: never."""
        chunk.expires_at = expires_at
        if expires_at:
            self._expiring.add(chunk)
        else:
            self._expiring.discard(chunk)

    def mark_in_l2(self, chunk: Chunk) -> None:
        chunk.in_l2 = True
        self._write_flags(chunk)
        self.outbox.append(Added(chunk.key, self.l2_id, chunk.info))

    def left_l2(self, keys: Iterable[ChunkKey]) -> None:
        """Cleared there; what stays here must not be claimed for L2 again."""
        for key in keys:
            chunk = self.catalog.get(key)
            if chunk is not None:
                chunk.in_l2 = False
                self._write_flags(chunk)

    def _write_flags(self, chunk: Chunk) -> None:
        flags = (FLAG_PINNED if chunk.pinned else 0) | (FLAG_IN_L2 if chunk.in_l2 else 0)
        for header in chunk.objects.values():
            self.pool.headers.set(header, "flags", flags)
            self.pool.headers.set(header, "expires_at", chunk.expires_at)

    def drop_expired(self) -> None:
        """Chunks past their own expiry."""
        wall = self.clock.wall()
        for chunk in [chunk for chunk in self._expiring if chunk.expires_at <= wall]:
            self.remove(chunk, pb.REASON_EVICTED)

    # What matchers are told.

    def snapshot(self) -> list[Added]:
        """Everything that is held, for a log that has to be told anew. Takes the lock itself."""
        with self.lock:
            held = [(chunk.key, chunk.info, chunk.in_l2) for chunk in self.catalog if chunk.complete]
        in_l2 = [Added(key, self.l2_id, info) for key, info, also_there in held if also_there and self.l2_id]
        return [Added(key, STORE_OWNER, info) for key, info, _ in held] + in_l2


def rank_objects(chunks: Sequence[Chunk], rank: int) -> tuple[list[int], Sequence[Chunk]]:
    """(headers, chunk of each) of one rank's objects: all groups of the first chunk, of the second, and so on.

    The chunks are complete and of one space.
    """
    groups = chunks[0].info.groups if chunks else 1
    if groups == 1:
        return [chunk.headers[rank] for chunk in chunks], chunks
    of_rank = slice(rank * groups, (rank + 1) * groups)
    headers = [header for chunk in chunks for header in chunk.headers[of_rank]]
    return headers, [chunk for chunk in chunks for _ in range(groups)]
