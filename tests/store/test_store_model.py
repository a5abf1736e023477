"""The store against a simple model: random orders of everything that agents and time can do.

Every block holds known bytes of its key, and late writers write at any time. So whatever reuses a block too
early, answers with the wrong chunk, or forgets a lease is seen as wrong bytes. That the machine sees such
faults is itself tested, with stores that are broken on purpose.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from store_kit import CHUNK, OTHER_SESSION, SESSION, Found, Granted, Leased, LocalStore, known_bytes, model_space, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.arena_format import BlockState, SessionFile
from services.store.arena.allocator import Allocator
from services.store.arena.headers import HeaderTable
from services.store.catalog import Catalog
from services.store.clearing import clear
from services.store.keeping import copies_stopped
from services.store.leasing.leases import LeaseTable
from services.store.writing.writes import Writes

_HEAD = text(1, CHUNK)
# Texts that share beginnings, so that chains branch; one is longer than a whole chunk count.
TEXTS = [
    _HEAD + text(2, CHUNK),
    _HEAD + text(3, CHUNK + 5),
    _HEAD + text(2, CHUNK)[:7] + text(4, CHUNK),
    text(5, 3 * CHUNK),
    text(6, 5),
]
SESSIONS = (SESSION, OTHER_SESSION)
texts = st.integers(0, len(TEXTS) - 1)
sessions = st.sampled_from(SESSIONS)
# One space is in use more than its neighbours, so that lookups find something.
spaces = st.sampled_from([0, 0, 0, 1, 2])
names = st.sampled_from(["r1", "r2", "r3"])


class StoreMachine(RuleBasedStateMachine):
    writes: Bundle[Granted] = Bundle("writes")
    answers: Bundle[Found] = Bundle("answers")
    copies: Bundle[tuple[Found, Leased]] = Bundle("copies")
    stored: Bundle[tuple[int, int]] = Bundle("stored")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvb-", dir="/dev/shm"))
        (self.directory / "sessions").mkdir()
        self.files = [SessionFile(self.directory, session) for session in SESSIONS]
        self.store = LocalStore(self.directory, pages=12, lease_ttl_seconds=50, reservation_ttl_seconds=20)
        for session in SESSIONS:
            self.store.parts.sessions.hello(session, "test")
        one, two = model_space(groups=2), model_space(parallel=2)
        self.spaces = [self.store.space(one, tenant="a"), self.store.space(one, tenant="b"), self.store.space(two)]
        # (space id, domain, chain hash, group, rank) of what was committed and not cleared since.
        self.committed: set[tuple[bytes, int, bytes, int, int]] = set()
        self.open: dict[int, tuple[Granted, float]] = {}
        self.cleared: set[int] = set()
        self.running: list[tuple[Found, Leased]] = []
        self.answered: list[tuple[Found, Leased]] = []

    def teardown(self) -> None:
        self.store.close()
        for file in self.files:
            file.close()
        shutil.rmtree(self.directory)

    # Writing.

    @rule(
        target=writes,
        space=spaces,
        which=texts,
        session=sessions,
        rank=st.integers(0, 1),
        document=st.sampled_from(["", "d", "e"]),
        exact=st.booleans(),
    )
    def reserve(self, space: int, which: int, session: bytes, rank: int, document: str, exact: bool) -> object:
        resolved = self.spaces[space]
        rank = min(rank, resolved.shape.ranks - 1)
        options: dict[str, Any] = (
            {"document": document} if document else {"exact": None if exact else min(CHUNK, len(TEXTS[which]))}
        )
        granted = self.store.reserve(resolved, TEXTS[which], session=session, rank=rank, **options)
        for chunk in granted.chunks:
            assert bool(chunk.places) == (chunk.outcome == store_pb2.CHUNK_OUTCOME_GRANTED)
            if chunk.outcome == store_pb2.CHUNK_OUTCOME_PRESENT:
                names = [
                    (resolved.space_id, domain, chunk.chain_hash, group, rank)
                    for domain in {chunk.domain, pb.DOMAIN_EXACT}
                    for group in range(resolved.shape.groups)
                ]
                assert any(name in self.committed for name in names)
        if not granted.number:
            return multiple()
        self.open[granted.number] = (granted, self.store.time.time + self.store.writes.ttl)
        return granted

    @rule(target=stored, space=spaces, which=texts, session=sessions, document=st.sampled_from(["", "", "d"]))
    def store_whole(self, space: int, which: int, session: bytes, document: str) -> tuple[int, int]:
        """All ranks reserve, copy and commit without a pause."""
        for rank in range(self.spaces[space].shape.ranks):
            granted = self.reserve(space, which, session, rank, document, True)
            if isinstance(granted, Granted):
                self.commit(granted)
        return space, which

    @rule(granted=writes)
    def copy(self, granted: Granted) -> None:
        """A copy that may come late; it stops at commit, abort, or its session's word."""
        if granted.number in self.open:
            self.store.write(granted)

    @rule(granted=consumes(writes))
    def commit(self, granted: Granted) -> None:
        if granted.number not in self.open:
            return
        _, deadline = self.open.pop(granted.number)
        self.store.write(granted)
        reasons = self.store.commit(granted)
        late = deadline <= self.store.time.time
        for (chunk, place), reason in zip(granted.places(), reasons, strict=True):
            if late:
                assert reason == pb.REASON_RESERVATION_EXPIRED
            elif granted.number in self.cleared:
                assert reason in (pb.REASON_CLEARED, pb.REASON_UNSPECIFIED)
            if reason == pb.REASON_UNSPECIFIED:
                self.committed.add((granted.space.space_id, chunk.domain, chunk.chain_hash, place.group, granted.rank))

    @rule(granted=consumes(writes))
    def abort(self, granted: Granted) -> None:
        self.open.pop(granted.number, None)
        self.store.writes.abort(granted.session, granted.number)

    # Reading.

    @rule(
        target=answers,
        space=spaces,
        which=texts,
        session=sessions,
        rank=st.integers(0, 1),
        request=names,
        blended=st.booleans(),
    )
    def look_up(self, space: int, which: int, session: bytes, rank: int, request: str, blended: bool) -> Found:
        resolved = self.spaces[space]
        rank = min(rank, resolved.shape.ranks - 1)
        found = self.store.lookup(
            resolved, [*TEXTS[which], 1], request=request, session=session, rank=rank, accept_blended=blended
        )
        for item in found.objects:
            name = (resolved.space_id, item.domain, item.chain_hash, item.place.group, rank)
            assert name in self.committed, "served what nobody committed, or what was cleared"
            assert blended or item.domain == pb.DOMAIN_EXACT
            self.answered.append((found, item))
        assert found.prefix <= len(TEXTS[which])
        return found

    @rule(target=copies, found=answers, number=st.integers(0, 3))
    def begin(self, found: Found, number: int) -> object:
        if number >= len(found.objects) or self.store.begin(found, found.objects[number]):
            return multiple()
        copy = (found, found.objects[number])
        self.running.append(copy)
        return copy

    @rule(target=copies, known=stored, session=sessions, request=names, number=st.integers(0, 3))
    def retrieve(self, known: tuple[int, int], session: bytes, request: str, number: int) -> object:
        """A lookup whose copy begins at once."""
        return self.begin(self.look_up(*known, session, 0, request, False), number)

    @rule(copy=consumes(copies))
    def end(self, copy: tuple[Found, Leased]) -> None:
        if copy in self.running:
            self.store.end(*copy)
            self.running.remove(copy)

    @rule(session=sessions, request=names)
    def end_request(self, session: bytes, request: str) -> None:
        self.store.lookups.end_request(session, request)

    # Time, sessions, clearing.

    @rule(seconds=st.sampled_from([0.5, 5, 30, 700]))
    def wait(self, seconds: float) -> None:
        self.store.time.time += seconds
        self.store.parts.keeper.step()

    @rule(session=sessions)
    def lose_and_drain(self, session: bytes) -> None:
        """The agent reconnects after its grace, lets its copies stop, and says so."""
        self.store.parts.sessions.goodbye(session)
        self.store.time.time += 5
        self.store.parts.keeper.step()
        for granted, _ in list(self.open.values()):
            if granted.session == session:
                del self.open[granted.number]
        self.running = [copy for copy in self.running if copy[0].holder.session != session]
        copies_stopped(self.store.state, self.store.writes, session)
        self.store.parts.sessions.hello(session, "test")

    @rule(scope=st.sampled_from(["everything", "a", "d", "d"]), force=st.sampled_from([True, True, False]))
    def clear(self, scope: str, force: bool) -> None:
        message = {
            "everything": pb.ClearScope(everything=True),
            "a": pb.ClearScope(tenant="a"),
            "d": pb.ClearScope(document=pb.DocumentScope(tenant="a", document="d")),
        }[scope]
        clear(self.store.state, self.store.writes, None, message, force, 1.0)
        self.cleared |= set(self.open)
        here = self.names_here()
        if scope == "everything":
            self.committed &= here
        elif scope == "a":
            self.committed = {name for name in self.committed if name[0] != self.spaces[0].space_id or name in here}

    def names_here(self) -> set[tuple[bytes, int, bytes, int, int]]:
        return {
            (chunk.key.space_id, chunk.key.domain, chunk.key.chain_hash, group, rank)
            for chunk in self.store.state.catalog
            for group, rank in chunk.objects
        }

    # What must always hold.

    @invariant()
    def committed_blocks_hold_their_own_bytes(self) -> None:
        pool = self.store.state.pool
        for chunk in self.store.state.catalog:
            for (group, rank), header in chunk.objects.items():
                payload = bytes(pool.payload(header))
                key = chunk.key
                own = known_bytes(key.space_id, key.domain, key.chain_hash, group, rank, len(payload))
                assert payload == own, "a committed block has other bytes"
                assert pool.headers.state(header) == BlockState.COMMITTED
        assert self.names_here() <= self.committed

    @invariant()
    def running_copies_read_their_own_bytes(self) -> None:
        for found, item in self.running:
            self.store.check_bytes(found, item)
            assert self.store.state.pool.headers.generation(item.place.header) == item.place.generation

    @invariant()
    def a_reader_without_a_lease_notices_that_its_block_is_anothers(self) -> None:
        for found, item in self.answered[-40:]:
            if self.store.state.pool.headers.generation(item.place.header) == item.place.generation:
                self.store.check_bytes(found, item)

    @invariant()
    def blocks_lie_apart_and_add_up(self) -> None:
        headers = self.store.state.pool.headers
        used = headers.in_state(*(state for state in BlockState if state != BlockState.FREE))
        places = sorted(
            (headers.get(h, "slab"), headers.get(h, "offset"), headers.get(h, "capacity_bytes")) for h in used
        )
        for (slab, offset, size), (next_slab, next_offset, _) in pairwise(places):
            assert slab < next_slab or offset + size <= next_offset
        assert sum(size for *_, size in places) == self.store.state.pool.used_bytes

    @invariant()
    def writers_in_flight_keep_their_blocks(self) -> None:
        headers = self.store.state.pool.headers
        for granted, _ in self.open.values():
            for _, place in granted.places():
                assert headers.generation(place.header) == place.generation
                assert headers.state(place.header) in (BlockState.RESERVED, BlockState.QUARANTINED)

    @invariant()
    def matchers_are_told_what_is_here(self) -> None:
        complete = {(chunk.key.chain_hash, chunk.key.domain) for chunk in self.store.state.catalog if chunk.complete}
        assert {(chain_hash, domain) for _, chain_hash, domain in self.store.outbox.held()} == complete

    @invariant()
    def leases_add_up(self) -> None:
        state = self.store.state
        assert state.leases.busy_count == len(self.running)
        protectors = sum(chunk.protectors for chunk in state.catalog)
        assert protectors <= state.leases.held_count + state.leases.busy_count
        if not self.running and not state.leases.held_count:
            assert protectors == 0
        # Counted at each chunk, so that one that nobody leases may leave without a search.
        of_chunks = Counter(chunk for holder in state.leases._all() for _, chunk, *_ in holder.leases.values())
        assert of_chunks == Counter({chunk: chunk.leases for chunk in of_chunks})
        assert sum(chunk.leases for chunk in state.catalog) <= of_chunks.total()


_LIMITS = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)


def test_the_store_does_what_the_model_says() -> None:
    run_state_machine_as_test(StoreMachine, settings=_LIMITS)


def _frees_at_expiry(patch: pytest.MonkeyPatch) -> None:
    """Time alone gives a writer's blocks away."""
    quarantine = Writes._quarantine

    def broken(self: Writes, reservation: Any) -> None:
        quarantine(self, reservation)
        kept = self._quarantined[reservation.number]
        for header in kept.headers:
            self._state.pool.free(header)
        kept.headers.clear()

    patch.setattr(Writes, "_quarantine", broken)


def _allocates_twice(patch: pytest.MonkeyPatch) -> None:
    """Every eighth block lies where the one before it lies."""
    allocate = Allocator.allocate
    places: WeakKeyDictionary[Allocator, list[Any]] = WeakKeyDictionary()

    def broken(self: Allocator, size: int) -> Any:
        last = places.setdefault(self, [])
        if len(last) % 8 == 7 and last[-1]:
            last.append(None)
            return last[-2]
        last.append(allocate(self, size))
        return last[-1]

    patch.setattr(Allocator, "allocate", broken)


def _evicts_under_copies(patch: pytest.MonkeyPatch) -> None:
    """A block is freed although a copy out of it runs."""
    patch.setattr(LeaseTable, "is_copied", lambda self, header: False)


def _keeps_generations(patch: pytest.MonkeyPatch) -> None:
    """A freed block's readers are not told."""

    def broken(self: HeaderTable, header: int) -> None:
        self.set_state(header, BlockState.FREE)
        self._free.append(header)

    patch.setattr(HeaderTable, "free", broken)


def _ignores_domains(patch: pytest.MonkeyPatch) -> None:
    """A blended chunk answers an exact lookup."""
    get = Catalog.get

    def broken(self: Catalog, key: Any) -> Any:
        found = get(self, key)
        if found is None and key.domain == pb.DOMAIN_EXACT:
            return next((chunk for chunk in self if chunk.key.chain_hash == key.chain_hash), None)
        return found

    patch.setattr(Catalog, "get", broken)


@pytest.mark.parametrize(
    "break_it",
    [_frees_at_expiry, _allocates_twice, _evicts_under_copies, _keeps_generations, _ignores_domains],
)
def test_a_broken_store_fails_the_model(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    quick = settings(_LIMITS, max_examples=400, phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(StoreMachine, settings=quick)
