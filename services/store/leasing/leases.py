"""Who may copy what out of the arena: leases of (session, request, attempt, rank), one an object.

HELD after a lookup: forbids eviction until a soft TTL; later the object may go, but while it is still there
the lease is good. BUSY while a copy runs: never revoked, ended by its holder alone, or by proof that the
holder is dead or drained. A lookup takes hundreds of leases at once, so a holder's leases are columns, not
objects. Not thread-safe.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from kvblend.v1 import common_pb2 as pb
from services.store.catalog import Chunk

# (header, generation)
Ref = tuple[int, int]
# (generation, chunk, bytes, the hold that it came with)
_Lease = tuple[int, Chunk, int, "_Hold"]


class HolderKey(NamedTuple):
    session: bytes
    request_id: str
    attempt: int
    rank: int


@dataclass(frozen=True)
class Objects:
    """Objects to be leased, as columns; those of one chunk stand together. `sizes` in bytes."""

    chunks: Sequence[Chunk]
    headers: Sequence[int]
    generations: Sequence[int]
    sizes: Sequence[int]

    def __len__(self) -> int:
        return len(self.headers)

    def cut(self, first: int, end: int) -> "Objects":
        if (first, end) == (0, len(self)):
            return self
        part = slice(first, end)
        return Objects(self.chunks[part], self.headers[part], self.generations[part], self.sizes[part])

    def by_chunk(self) -> "Iterator[Objects]":
        first = 0
        for end in range(1, len(self) + 1):
            if end == len(self) or self.chunks[end] is not self.chunks[first]:
                yield self.cut(first, end)
                first = end


@dataclass(eq=False)
class Holder:
    key: HolderKey
    tenant: str
    touched: float
    # Its request has ended; only copies that still run are left.
    ended: bool = False
    # By header. HELD are those whose hold still has them.
    leases: dict[int, _Lease] = field(default_factory=dict)
    # Copies that run.
    busy: Counter[int] = field(default_factory=Counter)
    # BUSY ones whose session was lost.
    orphaned: set[int] = field(default_factory=set)
    # What was taken away from it, and why.
    lost: dict[Ref, pb.Reason] = field(default_factory=dict)

    def has(self, ref: Ref) -> bool:
        lease = self.leases.get(ref[0])
        return lease is not None and lease[0] == ref[1]

    def holds(self, header: int) -> bool:
        lease = self.leases.get(header)
        return lease is not None and header in lease[3].sizes


@dataclass(eq=False)
class _Hold:
    """What one holder took at one moment: within their TTL they forbid eviction and count against the caps."""

    holder: Holder
    since: float
    # Bytes by header, in the order of taking.
    sizes: dict[int, int]


class LeaseTable:
    def __init__(self, ttl: float, session_cap: int, tenant_cap: int, freed: Callable[[int], None]) -> None:
        """`ttl` seconds; caps in bytes; `freed(header)` is called when the last copy of a condemned block stops."""
        self._ttl = ttl
        self._session_cap = session_cap
        self._tenant_cap = tenant_cap
        self._freed = freed
        # session -> request id -> holders.
        self._sessions: dict[bytes, dict[str, dict[HolderKey, Holder]]] = {}
        # Longest held first.
        self._holds: OrderedDict[_Hold, None] = OrderedDict()
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

    def _all(self) -> list[Holder]:
        return [holder for session in self._sessions for holder in self._of(session)]

    @property
    def held_count(self) -> int:
        return sum(len(hold.sizes) for hold in self._holds)

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

    # HELD.

    def acquire(self, key: HolderKey, tenant: str, objects: Objects, now: float) -> int:
        """HELD leases on the objects of one chunk after the other, renewed if there already.

        Returns of how many objects: all, or those of the chunks before the first that a cap forbids.
        """
        fits = self._room(key, tenant, objects)
        if fits:
            self._take(self._find_or_add(key, tenant, now), objects.cut(0, fits), now)
        return fits

    def _room(self, key: HolderKey, tenant: str, objects: Objects) -> int:
        """How many of the objects the caps allow, in whole chunks."""
        session_left = self._session_cap - self._session_bytes[key.session]
        left = min(session_left, self._tenant_cap - self._tenant_bytes[tenant])
        if sum(objects.sizes) <= left:
            return len(objects)
        holder = self._find(key)
        fits = 0
        for of_chunk in objects.by_chunk():
            refs = zip(of_chunk.headers, of_chunk.generations, strict=True)
            fresh = [
                size
                for ref, size in zip(refs, of_chunk.sizes, strict=True)
                if not (holder and holder.holds(ref[0]) and holder.has(ref))
            ]
            left -= sum(fresh)
            if left < 0:
                break
            fits += len(of_chunk)
        return fits

    def _take(self, holder: Holder, objects: Objects, now: float) -> None:
        headers, chunks = objects.headers, objects.chunks
        if holder.leases:
            for header in holder.leases.keys() & set(headers):
                self._unhold(holder, header)
                self._forget_lease(holder, header)
        hold = _Hold(holder, now, dict(zip(headers, objects.sizes, strict=True)))
        self._holds[hold] = None
        holder.leases.update(zip(headers, zip(objects.generations, chunks, objects.sizes, repeat(hold)), strict=True))
        for chunk in chunks:
            chunk.protectors += 1
            chunk.leases += 1
        self._count(holder, sum(hold.sizes.values()))

    def _count(self, holder: Holder, more_bytes: int) -> None:
        self._session_bytes[holder.key.session] += more_bytes
        self._tenant_bytes[holder.tenant] += more_bytes

    def _unhold(self, holder: Holder, header: int) -> bool:
        """The lease protects no longer. False: it did not."""
        _, chunk, size, hold = holder.leases[header]
        if hold.sizes.pop(header, None) is None:
            return False
        chunk.protectors -= 1
        self._count(holder, -size)
        if not hold.sizes:
            del self._holds[hold]
        return True

    def _unhold_all(self, holder: Holder) -> None:
        leases = holder.leases
        for hold in {lease[3] for lease in leases.values()}:
            if hold.sizes:
                self._count(holder, -sum(hold.sizes.values()))
                for header in hold.sizes:
                    leases[header][1].protectors -= 1
                hold.sizes.clear()
                del self._holds[hold]

    def expire(self, now: float) -> None:
        """HELD leases past their TTL protect no longer."""
        while self._holds:
            hold = next(iter(self._holds))
            if hold.since + self._ttl > now:
                return
            for header in list(hold.sizes):
                self._unhold(hold.holder, header)

    def oldest_revocable(self) -> Iterator[Chunk]:
        """Chunks that HELD leases protect and no copy does, longest held first."""
        for hold in list(self._holds):
            for header in list(hold.sizes):
                if header in hold.sizes:
                    chunk = hold.holder.leases[header][1]
                    if not any(self._copies[one] for one in chunk.objects.values()):
                        yield chunk

    # BUSY.

    def begin(self, key: HolderKey, ref: Ref) -> pb.Reason:
        """HELD -> BUSY; REASON_UNSPECIFIED: go. The caller has checked the generation."""
        holder = self._find(key)
        if holder is None or not holder.has(ref):
            return holder.lost.get(ref, pb.REASON_NOT_IN_ANSWER) if holder else pb.REASON_NOT_IN_ANSWER
        header = ref[0]
        holder.busy[header] += 1
        holder.orphaned.discard(header)
        holder.leases[header][1].protectors += 1
        self._copies[header] += 1
        return pb.REASON_UNSPECIFIED

    def why_lost(self, key: HolderKey, ref: Ref) -> pb.Reason:
        """Why this holder's lease was taken away; REASON_UNSPECIFIED if it had none."""
        holder = self._find(key)
        return holder.lost.get(ref, pb.REASON_UNSPECIFIED) if holder else pb.REASON_UNSPECIFIED

    def is_busy(self, key: HolderKey, ref: Ref) -> bool:
        holder = self._find(key)
        return holder is not None and holder.has(ref) and holder.busy[ref[0]] > 0

    def end(self, key: HolderKey, ref: Ref, again: float | None = None) -> None:
        """One copy has stopped; with the last one the lease ends. Unknown ones are ignored.

        `again`: now, if it is to be HELD from now on instead, while its request goes on and the chunk is there.
        """
        holder = self._find(key)
        if holder is None or not holder.has(ref) or not holder.busy[ref[0]]:
            return
        header = ref[0]
        generation, chunk, size, _ = holder.leases[header]
        keep = again is not None and not holder.ended and chunk.resident
        if again is not None and keep:
            self.acquire(key, holder.tenant, Objects([chunk], [header], [generation], [size]), again)
        self._end_copies(holder, header, 1, keep)

    def _end_copies(self, holder: Holder, header: int, copies: int, keep: bool = False) -> None:
        holder.busy[header] -= copies
        holder.leases[header][1].protectors -= copies
        if not holder.busy[header]:
            del holder.busy[header]
            if not keep:
                self._drop(holder, header)
        for _ in range(copies):
            self._copy_stopped(header)

    # Their end.

    def _forget_lease(self, holder: Holder, header: int) -> None:
        """What protected is given back already."""
        holder.leases.pop(header)[1].leases -= 1

    def _drop(self, holder: Holder, header: int) -> None:
        """Forgets a lease that no copy uses."""
        self._unhold(holder, header)
        holder.orphaned.discard(header)
        self._forget_lease(holder, header)
        if not holder.leases and not holder.lost:
            self._forget(holder)

    def release(self, key: HolderKey, refs: Iterable[Ref]) -> int:
        """How many leases of exactly this holder were released; BUSY ones stay."""
        holder = self._find(key)
        if holder is None:
            return 0
        idle = [ref[0] for ref in dict.fromkeys(refs) if holder.has(ref) and not holder.busy[ref[0]]]
        for header in idle:
            self._drop(holder, header)
        return len(idle)

    def end_holder(self, holder: Holder) -> None:
        """Releases what is not BUSY; BUSY ones end with their copies, found by `end` under the same key."""
        if holder.busy:
            for header in [header for header in holder.leases if not holder.busy[header]]:
                self._drop(holder, header)
            holder.lost.clear()
            holder.ended = True
            return
        self._unhold_all(holder)
        for lease in holder.leases.values():
            lease[1].leases -= 1
        holder.leases.clear()
        self._forget(holder)

    def end_request(self, session: bytes, request_id: str) -> None:
        """Every attempt and rank of a request in this session."""
        for holder in self._of(session, request_id):
            self.end_holder(holder)

    def session_lost(self, session: bytes) -> None:
        """HELD leases end; BUSY ones wait for proof that their copies have stopped."""
        for holder in self._of(session):
            self.end_holder(holder)
            self._unhold_all(holder)
            holder.orphaned.update(holder.leases)

    def copies_stopped(self, session: bytes) -> int:
        """The orphaned copies of a session are known to have stopped: how many objects that frees."""
        freed = 0
        for holder in self._of(session):
            for header in list(holder.orphaned):
                self._end_copies(holder, header, holder.busy[header])
                freed += 1
        return freed

    def forget_before(self, touched: float) -> None:
        """Requests that were never ended and were last looked up before then."""
        for session in list(self._sessions):
            for holder in self._of(session):
                if holder.touched < touched:
                    self.end_holder(holder)

    def revoke(self, chunk: Chunk, reason: pb.Reason) -> int:
        """Ends every lease of a chunk that leaves the catalog; BUSY ones with their copies. How many were HELD."""
        held = 0
        # Most chunks leave without any lease.
        for holder in self._all() if chunk.leases else ():
            for header in chunk.objects.values():
                lease = holder.leases.get(header)
                if lease is None or lease[1] is not chunk:
                    continue
                held += self._unhold(holder, header)
                if not holder.busy[header]:
                    holder.lost[header, lease[0]] = reason
                    self._drop(holder, header)
        return held
