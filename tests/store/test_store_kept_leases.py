"""Leases that a retrieve keeps: HELD again after the copy, so that they age, count and give way like others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from process_kit import Agent, StoreProcess
from store_kit import CHUNK, SESSION, Found, LocalStore, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.arena_format import SessionFile
from services.store.clearing import clear
from services.store.keeping import copies_stopped


@pytest.fixture
def store(shm_dir: Path) -> Iterator[LocalStore]:
    (shm_dir / "sessions").mkdir()
    file = SessionFile(shm_dir, SESSION)
    local = LocalStore(shm_dir)
    local.parts.sessions.hello(SESSION, "test")
    yield local
    local.close()
    file.close()


@pytest.fixture
def found(store: LocalStore) -> Found:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    return store.lookup(space, [*prompt, 1])


def end(store: LocalStore, found: Found) -> None:
    with store.state.lock:
        for item in found.objects:
            store.state.end_copy(found.holder, (item.place.header, item.place.generation), keep=True)


def counts(store: LocalStore) -> tuple[int, int, int]:
    """(HELD, BUSY, protectors)."""
    protectors = sum(chunk.protectors for chunk in store.state.catalog)
    return store.state.leases.held_count, store.state.leases.busy_count, protectors


def test_a_kept_lease_is_held_again_and_copied_again(store: LocalStore, found: Found) -> None:
    for _ in range(3):
        assert store.begin(found, found.objects[0]) == 0
        end(store, found)
        assert counts(store) == (1, 0, 1)
    end(store, found)
    assert counts(store) == (1, 0, 1), "no copy ran"
    store.lookups.end_request(SESSION, "r")
    assert counts(store) == (0, 0, 0)


def test_a_kept_lease_starts_its_time_anew(store: LocalStore, found: Found) -> None:
    store.begin(found, found.objects[0])
    store.time.time += 100
    store.parts.keeper.step()
    assert counts(store) == (0, 1, 1)
    end(store, found)
    assert counts(store) == (1, 0, 1)
    store.time.time += 59
    store.parts.keeper.step()
    assert counts(store) == (1, 0, 1)
    store.time.time += 2
    store.parts.keeper.step()
    assert counts(store) == (0, 0, 0)
    assert store.begin(found, found.objects[0]) == 0, "it is still there"


@pytest.mark.parametrize("how", ["ended", "cleared", "lost"])
def test_nothing_is_kept_for_a_request_or_a_chunk_that_is_gone(
    store: LocalStore,
    found: Found,
    how: str,
) -> None:
    store.begin(found, found.objects[0])
    if how == "ended":
        store.lookups.end_request(SESSION, "r")
    elif how == "cleared":
        clear(store.state, store.writes, None, pb.ClearScope(everything=True), True, 1.0)
    else:
        store.parts.sessions.goodbye(SESSION)
        store.time.time += 5
        store.parts.keeper.step()
    end(store, found)
    assert counts(store) == (0, 0, 0)
    assert not store.state.condemned
    assert copies_stopped(store.state, store.writes, SESSION) == 0


def test_kept_leases_give_way_under_pressure_and_say_so(store: LocalStore, found: Found) -> None:
    store.begin(found, found.objects[0])
    end(store, found)
    granted = store.reserve(store.space(), text(9, 64 * CHUNK))
    assert store_pb2.CHUNK_OUTCOME_DECLINED not in granted.outcomes()
    assert store.begin(found, found.objects[0]) == pb.REASON_LEASE_REVOKED


def test_keeping_over_the_wire(shm_dir: Path) -> None:
    with StoreProcess(shm_dir) as process, Agent(process) as agent:
        agent.put(text(1, 2 * CHUNK))
        objects, _ = agent.lookup([*text(1, 2 * CHUNK), 1])
        refs = [store_pb2.ObjectRef(header=item.place.header, generation=item.place.generation) for item in objects]
        key = pb.RequestKey(request_id="r", attempt=1)
        for _ in range(2):
            assert not any(agent.call("BeginCopy", request=key, objects=refs).reasons)
            assert agent.stats().busy_leases == 2
            agent.call("EndCopy", request=key, objects=refs, keep=True)
            assert (agent.stats().held_leases, agent.stats().busy_leases) == (2, 0)
        assert agent.retrieve(objects) == [0, 0]
        assert agent.stats().held_leases == 0
