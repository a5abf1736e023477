"""A text that was stored under several names is cleared by each of them, also after restarts, in every tier."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_kit import Agent, StoreProcess
from store_kit import CHUNK, OTHER_SESSION, LocalStore, model_space, text
from test_store_l2 import MemoryTier, until
from test_store_life import restarted

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.failpoints import armed
from services.store import names
from services.store.clearing import clear

PRESENT = store_pb2.CHUNK_OUTCOME_PRESENT
BEING_WRITTEN = store_pb2.CHUNK_OUTCOME_BEING_WRITTEN


@pytest.fixture
def store(shm_dir: Path) -> Iterator[LocalStore]:
    (shm_dir / "sessions").mkdir()
    local = LocalStore(shm_dir)
    yield local
    local.close()


def document(name: str) -> pb.ClearScope:
    return pb.ClearScope(document=pb.DocumentScope(tenant="default", document=name))


def cleared(store: LocalStore, name: str) -> int:
    return clear(store.state, store.writes, store.parts.l2, document(name), True, 5.0).removed_chunks


# The records themselves.


@settings(max_examples=200, deadline=None)
@given(
    st.integers(names.ROOM_BYTES, 4096),
    st.lists(st.text(min_size=1, max_size=80).filter(lambda name: len(name.encode()) <= 256), max_size=30),
    st.binary(max_size=64),
)
def test_names_are_read_as_they_were_appended_or_stand_for_any(size: int, given_names: list[str], old: bytes) -> None:
    area = memoryview(bytearray(old.ljust(size, b"\xff")[:size]))
    names.erase(area)
    known: list[str] = []
    for name in given_names:
        added = names.append(area, name)
        assert added in (name, names.ANY)
        if added not in known:
            known.append(added)
        assert names.read(area) == known
        assert name in known or names.ANY in known, "clearing by this name would miss it"
    assert len(known) <= names.MAX_NAMES + 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "bb", "ccc"]), unique=True), st.data())
def test_damaged_names_stand_for_any(given_names: list[str], data: st.DataObject) -> None:
    area = memoryview(bytearray(names.ROOM_BYTES))
    for name in given_names:
        names.append(area, name)
    place = data.draw(st.integers(0, sum(6 + len(name) for name in given_names) + 1))
    area[place] = data.draw(st.integers(0, 255))
    found = names.read(area)
    assert names.ANY in found or set(given_names) <= set(found)


@pytest.mark.parametrize("number", [1, 2])
def test_a_store_that_is_killed_while_it_writes_a_name_has_it_or_not(number: int) -> None:
    area = memoryview(bytearray(b"\xee" * names.ROOM_BYTES))
    names.erase(area)
    before = [f"name {n}" for n in range(number - 1)]
    for name in before:
        names.append(area, name)
    with armed("name.write=raise"), pytest.raises(RuntimeError):
        names.append(area, "lost")
    assert names.read(area) == before
    assert names.append(area, "other") == "other"
    assert names.read(area) == [*before, "other"]


# In the arena.


def test_every_name_outlives_a_restart(store: LocalStore) -> None:
    space, body = store.space(model_space(groups=2, parallel=2)), text(1, 2 * CHUNK + 3)
    for name in ("one", "two", "three"):
        store.put(space, body, document=name)
    with restarted(store) as again:
        assert {frozenset(chunk.documents) for chunk in again.state.catalog} == {frozenset(["one", "two", "three"])}
        assert all(chunk.info.document == "one" for chunk in again.state.catalog)
        assert cleared(again, "four") == 0
        assert cleared(again, "two") == 3
        assert not again.state.pool.used_bytes


def test_more_names_than_there_is_room_for_are_cleared_by_any(store: LocalStore) -> None:
    space, body = store.space(), text(1, CHUNK)
    for number in range(40):
        store.put(space, body, document=f"{number} {'x' * 200}")
    store.put(space, text(2, CHUNK), document="other")
    with restarted(store) as again:
        assert max(len(chunk.documents) for chunk in again.state.catalog) <= names.MAX_NAMES + 2
        assert cleared(again, f"39 {'x' * 200}") == 1, "it is not known which names it has"
        assert [chunk.documents for chunk in again.state.catalog] == [{"other"}]


def test_a_block_that_is_used_again_has_none_of_the_old_names(store: LocalStore) -> None:
    space = store.space()
    for seed in range(70):
        store.put(space, text(seed, CHUNK), document="first")
        store.put(space, text(seed, CHUNK), document=f"second {seed}")
    with restarted(store) as again:
        assert {len(chunk.documents) for chunk in again.state.catalog} == {2}
        assert cleared(again, "second 69") == 1


def test_a_text_that_is_being_written_gets_the_name_of_who_offers_it_meanwhile(store: LocalStore) -> None:
    space, body = store.space(), text(1, CHUNK)
    first = store.reserve(space, body, document="mine")
    assert store.reserve(space, body, document="yours", session=OTHER_SESSION).outcomes() == [BEING_WRITTEN]
    store.write(first)
    assert store.commit(first) == [0]
    assert store.reserve(space, body, document="yours", session=OTHER_SESSION).outcomes() == [PRESENT]
    with restarted(store) as again:
        assert cleared(again, "yours") == 1


def test_clearing_the_second_name_stops_a_write_under_the_first(store: LocalStore) -> None:
    space, body = store.space(), text(1, CHUNK)
    first = store.reserve(space, body, document="mine")
    store.reserve(space, body, document="yours", session=OTHER_SESSION)
    cleared(store, "yours")
    store.write(first)
    assert store.commit(first) == [pb.REASON_CLEARED]


# In L2.


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def with_l2(shm_dir: Path, tier: MemoryTier) -> Iterator[LocalStore]:
    (shm_dir / "sessions").mkdir()
    local = LocalStore(shm_dir, tier=tier)
    yield local
    local.close()


def names_in(tier: MemoryTier) -> list[set[str]]:
    return [set(meta.documents) for meta, _ in list(tier.objects.values())]


def test_l2_learns_a_second_name_and_forgets_the_text_by_it(with_l2: LocalStore, tier: MemoryTier) -> None:
    space, body = with_l2.space(), text(1, CHUNK)
    with_l2.put(space, body, document="one")
    until(lambda: names_in(tier) == [{"one"}])
    until(lambda: all(chunk.in_l2 for chunk in with_l2.state.catalog))
    with_l2.put(space, body, document="two")
    until(lambda: names_in(tier) == [{"one", "two"}])
    with with_l2.state.lock:
        with_l2.state.evict_down_to(0)
    assert with_l2.lookup(space, [*body, 1]).prefix == 0, "it is a document"
    assert cleared(with_l2, "two") == 0
    assert not tier.objects


def test_a_name_that_comes_while_l2_is_being_written_gets_there_too(with_l2: LocalStore, tier: MemoryTier) -> None:
    space, body = with_l2.space(), text(1, CHUNK)
    tier.writing.clear()
    with_l2.put(space, body, document="one")
    until(lambda: with_l2.state.leases.busy_count == 1)
    with_l2.put(space, body, document="two")
    tier.writing.set()
    until(lambda: names_in(tier) == [{"one", "two"}])


def test_a_restart_does_not_believe_that_l2_knows_a_name_that_came_too_late(
    with_l2: LocalStore, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, body = with_l2.space(), text(1, CHUNK)
    tier.writing.clear()
    with_l2.put(space, body, document="one")
    until(lambda: with_l2.state.leases.busy_count == 1)
    with_l2.put(space, body, document="two")
    # The second write does not come about.
    monkeypatch.setattr(with_l2.parts.l2.writing, "_put", lambda _: False)  # type: ignore[union-attr]
    tier.writing.set()
    until(lambda: with_l2.state.leases.busy_count == 0)
    until(lambda: names_in(tier) == [{"one"}])
    with restarted(with_l2) as again:
        (chunk,) = again.state.catalog
        assert chunk.documents == {"one", "two"}
        assert not chunk.in_l2


def test_what_l2_does_not_know_yet_is_cleared_there_all_the_same(with_l2: LocalStore, tier: MemoryTier) -> None:
    space, body = with_l2.space(), text(1, CHUNK)
    with_l2.put(space, body, document="one")
    until(lambda: all(chunk.in_l2 for chunk in with_l2.state.catalog))
    tier.writing.clear()
    with_l2.put(space, body, document="two")
    assert names_in(tier) == [{"one"}]
    assert cleared(with_l2, "two") == 1
    assert not tier.objects
    tier.writing.set()
    until(lambda: with_l2.state.leases.busy_count == 0)
    until(lambda: not tier.objects)


# Over the wire.


def test_clearing_by_the_second_name_after_kills(shm_dir: Path) -> None:
    body = text(1, 3 * CHUNK)
    process = StoreProcess(shm_dir)
    for name in ("one", "two"):
        with process, Agent(process) as agent:
            agent.put(body, name)
    with process, Agent(process) as agent:
        assert agent.call("Clear", scope=document("two")).removed_chunks == 3
        assert agent.stats().tiers[0].used_bytes == 0
