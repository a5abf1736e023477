"""Who may copy what out of the arena: leases of (session, request, attempt, rank), one an object.

HELD after a lookup: forbids eviction until a soft TTL; later the object may go, but while it is still there
the lease is good. BUSY while a copy runs: never revoked, ended by its holder alone, or by proof that the
holder is dead or drained. Not thread-safe.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvblend.v1 import common_pb2 as pb
from services.store.catalog import Chunk

Ref = tuple[int, int]


class HolderKey(NamedTuple):
    session: bytes
    request_id: str
    attempt: int
    rank: int


@dataclass(eq=False)
class Lease:
    holder: "Holder"
    chunk: Chunk
    # (header, generation).
    ref: Ref
    size: int
    since: float
    # Within its TTL: forbids eviction and counts against the caps.
    held: bool = True
    # Copies that run.
    busy: int = 0
    # BUSY when its session was lost.
    orphaned: bool = False


@dataclass(eq=False)
class Holder:
    key: HolderKey
    tenant: str
    touched: float
    # Its request has ended; only copies that still run are left.
    ended: bool = False
    leases: dict[int, Lease] = field(default_factory=dict)
    # What was taken away from it, and why.
    lost: dict[Ref, pb.Reason] = field(default_factory=dict)


class LeaseTable:
    def __init__(self, ttl: float, session_cap: int, tenant_cap: int, freed: Callable[[int], None]) -> None:
        """`ttl` seconds; caps in bytes; `freed(header)` is called when the last copy of a condemned block stops."""
        self._ttl = ttl
        self._session_cap = session_cap
        self._tenant_cap = tenant_cap
        self._freed = freed
        # session -> request id -> holders.
        self._sessions: dict[bytes, dict[str, dict[HolderKey, Holder]]] = {}
        self._held: OrderedDict[Lease, None] = OrderedDict()
        self._of_chunk: dict[Chunk, dict[Lease, None]] = {}
        self._session_bytes: Counter[bytes] = Counter()
        self._tenant_bytes: Counter[str] = Counter()
        self._copies: Counter[int] = Counter()

    def _find(self, key: HolderKey) -> Holder | None:
        return self._sessions.get(key.session, {}).get(key.request_id, {}).get(key)

    def _find_or_add(self, key: HolderKey, tenant: str, now: float) -> Holder:
        requests = self._sessions.setdefault(key.session, {})
        holder = requests.setdefault(key.request_id, {}).setdefault(key, Holder(key, tenant, now))
        holder.touched = now
        holder.ended = False
        return holder

    def _forget(self, holder: Holder) -> None:
        key = holder.key
        requests = self._sessions.get(key.session, {})
        holders = requests.get(key.request_id, {})
        holders.pop(key, None)
        if not holders:
            requests.pop(key.request_id, None)
        if not requests:
            self._sessions.pop(key.session, None)

    def _of(self, session: bytes, request_id: str | None = None) -> list[Holder]:
        requests = self._sessions.get(session, {})
        names = list(requests) if request_id is None else [request_id]
        return [holder for name in names for holder in requests.get(name, {}).values()]

    @property
    def held_count(self) -> int:
        return len(self._held)

    @property
    def busy_count(self) -> int:
        return self._copies.total()

    def is_copied(self, header: int) -> bool:
        """A copy out of this block may be running."""
        return self._copies[header] > 0

    def pin(self, chunk: Chunk, header: int) -> None:
        """The store itself reads this block until `unpin`."""
        chunk.protectors += 1
        self._copies[header] += 1

    def unpin(self, chunk: Chunk, header: int) -> None:
        chunk.protectors -= 1
        self._copy_stopped(header)

    def _copy_stopped(self, header: int) -> None:
        self._copies[header] -= 1
        if not self._copies[header]:
            del self._copies[header]
            self._freed(header)

    def acquire(self, key: HolderKey, tenant: str, chunk: Chunk, refs: list[tuple[Ref, int]], now: float) -> bool:
        """HELD leases on (ref, bytes) of one chunk, renewed if there already; False: a cap forbids it, none taken."""
        holder = self._find(key)
        fresh = sum(size for ref, size in refs if not (holder and self._is_held(holder, ref)))
        if self._session_bytes[key.session] + fresh > self._session_cap:
            return False
        if self._tenant_bytes[tenant] + fresh > self._tenant_cap:
            return False
        holder = self._find_or_add(key, tenant, now)
        for ref, size in refs:
            lease = holder.leases.get(ref[0])
            if lease is not None and lease.ref == ref:
                self._release_hold(lease)
                lease.held, lease.since = True, now
            else:
                lease = holder.leases[ref[0]] = Lease(holder, chunk, ref, size, now)
                self._of_chunk.setdefault(chunk, {})[lease] = None
            self._take_hold(lease)
        return True

    @staticmethod
    def _is_held(holder: Holder, ref: Ref) -> bool:
        lease = holder.leases.get(ref[0])
        return lease is not None and lease.ref == ref and lease.held

    def _take_hold(self, lease: Lease) -> None:
        lease.chunk.protectors += 1
        self._held[lease] = None
        self._session_bytes[lease.holder.key.session] += lease.size
        self._tenant_bytes[lease.holder.tenant] += lease.size

    def _release_hold(self, lease: Lease) -> None:
        if not lease.held:
            return
        lease.held = False
        lease.chunk.protectors -= 1
        del self._held[lease]
        self._session_bytes[lease.holder.key.session] -= lease.size
        self._tenant_bytes[lease.holder.tenant] -= lease.size

    def begin(self, key: HolderKey, ref: Ref) -> pb.Reason:
        """HELD -> BUSY; REASON_UNSPECIFIED: go. The caller has checked the generation."""
        holder = self._find(key)
        lease = holder.leases.get(ref[0]) if holder else None
        if holder is None or lease is None or lease.ref != ref:
            return holder.lost.get(ref, pb.REASON_NOT_IN_ANSWER) if holder else pb.REASON_NOT_IN_ANSWER
        lease.busy += 1
        lease.orphaned = False
        lease.chunk.protectors += 1
        self._copies[ref[0]] += 1
        return pb.REASON_UNSPECIFIED

    def why_lost(self, key: HolderKey, ref: Ref) -> pb.Reason:
        """Why this holder's lease was taken away; REASON_UNSPECIFIED if it had none."""
        holder = self._find(key)
        return holder.lost.get(ref, pb.REASON_UNSPECIFIED) if holder else pb.REASON_UNSPECIFIED

    def is_busy(self, key: HolderKey, ref: Ref) -> bool:
        holder = self._find(key)
        lease = holder.leases.get(ref[0]) if holder else None
        return lease is not None and lease.ref == ref and lease.busy > 0

    def end(self, key: HolderKey, ref: Ref, again: float | None = None) -> None:
        """One copy has stopped; with the last one the lease ends. Unknown ones are ignored.

        `again`: now, if it is to be HELD from now on instead, while its request goes on and the chunk is there.
        """
        holder = self._find(key)
        lease = holder.leases.get(ref[0]) if holder else None
        if holder is None or lease is None or lease.ref != ref or not lease.busy:
            return
        keep = again is not None and not holder.ended and lease.chunk.resident
        if again is not None and keep:
            self.acquire(key, holder.tenant, lease.chunk, [(ref, lease.size)], again)
        self._end_copies(lease, 1, keep)

    def _end_copies(self, lease: Lease, copies: int, keep: bool = False) -> None:
        lease.busy -= copies
        lease.chunk.protectors -= copies
        if not lease.busy and not keep:
            self._drop(lease)
        for _ in range(copies):
            self._copy_stopped(lease.ref[0])

    def _drop(self, lease: Lease) -> None:
        """Forgets a lease that no copy uses."""
        self._release_hold(lease)
        holder = lease.holder
        if holder.leases.get(lease.ref[0]) is lease:
            del holder.leases[lease.ref[0]]
        if not holder.leases and not holder.lost:
            self._forget(holder)
        siblings = self._of_chunk[lease.chunk]
        del siblings[lease]
        if not siblings:
            del self._of_chunk[lease.chunk]

    def _let_go(self, leases: Iterable[Lease]) -> int:
        """Releases what is not BUSY; BUSY ones end with their copies."""
        idle = [lease for lease in leases if not lease.busy]
        for lease in idle:
            self._drop(lease)
        return len(idle)

    def release(self, key: HolderKey, refs: Iterable[Ref]) -> int:
        """How many leases of exactly this holder were released; BUSY ones stay."""
        holder = self._find(key)
        if holder is None:
            return 0
        wanted = set(refs)
        return self._let_go([lease for lease in holder.leases.values() if lease.ref in wanted])

    def end_holder(self, holder: Holder) -> None:
        self._let_go(list(holder.leases.values()))
        if holder.leases:
            # Its copies still run: found again by `end` under the same key.
            holder.lost.clear()
            holder.ended = True
        else:
            self._forget(holder)

    def end_request(self, session: bytes, request_id: str, keep: HolderKey | None = None) -> None:
        """Every attempt and rank of a request in this session, but `keep`."""
        for holder in self._of(session, request_id):
            if holder.key != keep:
                self.end_holder(holder)

    def session_lost(self, session: bytes) -> None:
        """HELD leases end; BUSY ones wait for proof that their copies have stopped."""
        for holder in self._of(session):
            self.end_holder(holder)
            for lease in holder.leases.values():
                self._release_hold(lease)
                lease.orphaned = True

    def copies_stopped(self, session: bytes) -> int:
        """The orphaned copies of a session are known to have stopped: how many objects that frees."""
        freed = 0
        for holder in self._of(session):
            for lease in [lease for lease in holder.leases.values() if lease.orphaned]:
                self._end_copies(lease, lease.busy)
                freed += 1
        return freed

    def forget_before(self, touched: float) -> None:
        """Requests that were never ended and were last looked up before then."""
        for session in list(self._sessions):
            for holder in self._of(session):
                if holder.touched < touched:
                    self.end_holder(holder)

    def expire(self, now: float) -> None:
        """HELD leases past their TTL protect no longer."""
        while self._held:
            oldest = next(iter(self._held))
            if oldest.since + self._ttl > now:
                return
            self._release_hold(oldest)

    def oldest_revocable(self) -> Iterator[Chunk]:
        """Chunks that HELD leases protect and no copy does, longest held first."""
        for lease in list(self._held):
            if lease.held and not any(self._copies[header] for header in lease.chunk.objects.values()):
                yield lease.chunk

    def revoke(self, chunk: Chunk, reason: pb.Reason) -> int:
        """Ends every lease of a chunk that leaves the catalog; BUSY ones with their copies. How many were HELD."""
        held = 0
        for lease in list(self._of_chunk.get(chunk, ())):
            held += lease.held
            if lease.busy:
                self._release_hold(lease)
                continue
            lease.holder.lost[lease.ref] = reason
            self._drop(lease)
        return held
