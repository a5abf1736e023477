"""Cases that need the whole store: slow and aborted tiers, hybrid models, many streams, joins, unexpected errors."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from process_kit import Agent, StoreProcess
from store_kit import CHUNK, OTHER_SESSION, SESSION, LocalStore, model_space, text
from test_store_l2 import MemoryTier, empty_arena, in_l2, until
from test_store_life import restarted

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.arena_format import BlockState
from services.common.errors import KvblendError
from services.common.failpoints import armed
from services.store.clearing import clear

GRANTED, PRESENT = store_pb2.CHUNK_OUTCOME_GRANTED, store_pb2.CHUNK_OUTCOME_PRESENT
BEING_WRITTEN = store_pb2.CHUNK_OUTCOME_BEING_WRITTEN


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def store(shm_dir: Path, tier: MemoryTier) -> Iterator[LocalStore]:
    (shm_dir / "sessions").mkdir()
    local = LocalStore(shm_dir, tier=tier)
    yield local
    local.close()


def check_blocks(store: LocalStore) -> None:
    """Every block is a chunk's or free, once; every free header is in the list once."""
    headers = store.state.pool.headers
    in_use = headers.in_state(*(state for state in BlockState if state != BlockState.FREE))
    assert sorted(in_use) == sorted(header for chunk in store.state.catalog for header in chunk.objects.values())
    assert sum(headers.get(header, "capacity_bytes") for header in in_use) == store.state.pool.used_bytes
    assert sorted([*headers._free, *in_use]) == list(range(headers.count))
    assert not sum(chunk.protectors for chunk in store.state.catalog) - store.state.leases.held_count


def test_case_24_a_hybrid_model_comes_back_group_by_group(store: LocalStore) -> None:
    space, prompt = store.space(model_space(groups=3, parallel=2)), text(1, 2 * CHUNK + 5)
    store.put(space, prompt)
    with restarted(store) as again:
        for rank in (0, 1):
            found = again.lookup(space, [*prompt, 1], rank=rank)
            assert (found.prefix, len(found.objects)) == (2 * CHUNK + 5, 9)
            assert sorted(item.place.group for item in found.objects) == [0] * 3 + [1] * 3 + [2] * 3


@pytest.mark.parametrize(
    "how", ["l2.fetch=raise", "l2.land=raise", "l2.fetch=raise@2", "l2.land=raise@3", "ended", "damaged"]
)
def test_case_51_a_fetch_that_is_aborted_at_any_step_frees_its_blocks_once(
    store: LocalStore, tier: MemoryTier, how: str
) -> None:
    space, prompt = store.space(model_space(groups=2)), text(1, 4 * CHUNK)
    store.put(space, prompt)
    until(in_l2(store, 4))
    empty_arena(store)
    with ExitStack() as stack:
        if "=" in how:
            stack.enter_context(armed(how))
            found = store.lookup(space, [*prompt, 1]).prefix
            assert found < 4 * CHUNK or how.startswith("l2.land"), "what has landed is kept"
        elif how == "ended":
            tier.reading.clear()
            asking = threading.Thread(target=lambda: _superseded(store, prompt))
            asking.start()
            until(lambda: store.state.pool.used_bytes > 0)
            store.lookups.end_request(SESSION, "r")
            tier.reading.set()
            asking.join()
        else:
            tier.objects.popitem()
            store.lookup(space, [*prompt, 1])
        store.lookups.end_request(SESSION, "r")
        until(lambda: not store.parts.l2.fetches.wanted_bytes)  # type: ignore[union-attr]
    check_blocks(store)
    if how != "damaged":
        assert store.lookup(space, [*prompt, 1], request="again").prefix == 4 * CHUNK
    store.lookups.end_request(SESSION, "again")
    empty_arena(store)
    check_blocks(store)
    assert not store.state.pool.used_bytes


def test_case_51_a_fetch_that_finds_no_room_by_an_error_gives_back_what_it_took(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, prompt = store.space(model_space(groups=2)), text(1, CHUNK)
    store.put(space, prompt)
    until(in_l2(store, 1))
    empty_arena(store)
    make_block, made = store.state.make_block, []

    def second_fails(*arguments: Any) -> int | None:
        if made:
            raise RuntimeError("out of luck")
        made.append(make_block(*arguments))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(store.state, "make_block", second_fails)
        assert store.lookup(space, [*prompt, 1]).prefix == 0
        store.lookups.end_request(SESSION, "r")
        until(lambda: not store.parts.l2.fetches.wanted_bytes)  # type: ignore[union-attr]
    assert made
    check_blocks(store)
    assert not store.state.pool.used_bytes


def _superseded(store: LocalStore, prompt: list[int]) -> None:
    with pytest.raises(KvblendError, match="SUPERSEDED"):
        store.lookup(store.space(model_space(groups=2)), [*prompt, 1])


def test_case_51_what_is_being_written_to_l2_is_not_evicted_and_its_block_not_reused(
    store: LocalStore, tier: MemoryTier
) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    tier.writing.clear()
    granted = store.put(space, prompt)
    until(lambda: store.state.leases.busy_count == 1)
    with store.state.lock:
        store.state.evict_down_to(0)
    assert len(store.state.catalog) == 1
    clear(store.state, store.writes, None, pb.ClearScope(everything=True), True, 1.0)
    for seed in range(100, 180):
        store.put(space, text(seed, CHUNK))
    (chunk, place) = granted.places()[0]
    assert store.read(place) == granted.bytes_of(chunk, place), "the transfer would send another's bytes"
    tier.writing.set()
    until(lambda: store.state.leases.busy_count == 0)
    until(lambda: not store.state.condemned)


def test_case_52_a_slow_tier_behind_a_full_arena_rejects_nothing(store: LocalStore, tier: MemoryTier) -> None:
    """Ten arenas' worth of text while L2 takes nothing; what L2 has is fetched meanwhile."""
    space, known = store.space(), text(1, 2 * CHUNK)
    store.put(space, known)
    until(in_l2(store, 2))
    empty_arena(store)
    tier.writing.clear()
    for seed in range(100, 740):
        assert store.put(space, text(seed, CHUNK)).outcomes() == [GRANTED]
        if seed % 100 == 0:
            with store.state.lock:
                store.state.evict_down_to(store.state.pool.capacity_bytes // 2)
            request = str(seed)
            assert store.lookup(space, [*known, 1], request=request).prefix == 2 * CHUNK
            store.lookups.end_request(SESSION, request)
    assert store.state.leases.busy_count <= 2, "only what is being sent is held"
    tier.writing.set()
    until(lambda: store.state.leases.busy_count == 0)
    check_blocks(store)


def test_case_60_eight_clients_with_64_streams_each_fail_nothing(shm_dir: Path) -> None:
    texts = [text(seed, 2 * CHUNK) for seed in range(16)]
    with StoreProcess(shm_dir, arena_bytes=8 << 20) as process, ExitStack() as stack:
        agents = [stack.enter_context(Agent(process)) for _ in range(8)]
        for tokens in texts:
            agents[0].put(tokens)

        def stream(number: int) -> None:
            agent, request = agents[number % 8], str(number)
            objects, summary = agent.lookup([*texts[number % 16], 1], request)
            assert summary.prefix_tokens == 2 * CHUNK
            assert agent.retrieve(objects, request) == [0, 0]
            agent.put(text(1000 + number, CHUNK))
            agent.call("EndRequests", request_ids=[request])

        pools = [stack.enter_context(ThreadPoolExecutor(64)) for _ in agents]
        running = [pool.submit(stream, 8 * place + number) for number, pool in enumerate(pools) for place in range(64)]
        for future in running:
            future.result()
        stats = agents[0].stats()
        assert (stats.checksum_failures, stats.held_leases, stats.busy_leases) == (0, 0, 0)
        assert (stats.stored_chunks, stats.reserved_objects) == (32 + 512, 0)


@pytest.mark.parametrize("how", ["committed", "aborted"])
def test_whoever_finds_a_text_being_written_learns_what_came_of_it(shm_dir: Path, how: str) -> None:
    tokens = text(1, 2 * CHUNK)
    with StoreProcess(shm_dir) as process, Agent(process) as first, Agent(process) as second:
        mine = first.reserve(tokens)
        assert [chunk.outcome for chunk in second.reserve(tokens).chunks] == [BEING_WRITTEN] * 2
        if how == "committed":
            first.call("Commit", reservation_id=mine.reservation_id, written=first.copy(mine))
        else:
            first.call("Abort", reservation_id=mine.reservation_id)
        again = second.reserve(tokens)
        assert [chunk.outcome for chunk in again.chunks] == [PRESENT if how == "committed" else GRANTED] * 2


def test_each_rank_has_its_own_leases_under_one_request(store: LocalStore) -> None:
    space, prompt = store.space(model_space(parallel=2)), text(1, CHUNK)
    store.put(space, prompt)
    one = store.lookup(space, [*prompt, 1], rank=0)
    two = store.lookup(space, [*prompt, 1], rank=1, session=OTHER_SESSION)
    assert one.objects[0].place != two.objects[0].place
    assert store.begin(one, two.objects[0]) == pb.REASON_NOT_IN_ANSWER, "another rank's object"
    assert store.begin(one, one.objects[0]) == store.begin(two, two.objects[0]) == 0
    store.end(one, one.objects[0])
    assert store.state.leases.busy_count == 1
    store.end(two, two.objects[0])
    assert (store.state.leases.held_count, store.state.leases.busy_count) == (0, 0)


def test_caps_hold_for_each_session_and_each_tenant(shm_dir: Path) -> None:
    local = LocalStore(shm_dir, lease_session_share=0.25, lease_tenant_share=0.5)
    try:
        spaces = [local.space(tenant=tenant) for tenant in ("a", "b")]
        prompts = [text(seed, 24 * CHUNK) for seed in (1, 2)]
        for space, prompt in zip(spaces, prompts, strict=True):
            local.put(space, prompt)
        found = [
            local.lookup(space, [*prompt, 1], request=request, session=session).prefix // CHUNK
            for request, space, prompt, session in (
                ("1", spaces[0], prompts[0], SESSION),
                ("2", spaces[1], prompts[1], SESSION),
                ("3", spaces[0], prompts[0], OTHER_SESSION),
                ("4", spaces[0], prompts[0], bytes(range(32, 48))),
            )
        ]
        assert found == [16, 0, 16, 0], "a session may lease 16 blocks of 64, a tenant 32"
    finally:
        local.close()


# Faults inside the store.


@pytest.mark.parametrize(
    "point", ["reserve.chunk", "meta.write", "commit.state", "commit.visible", "l2.write", "l2.mark"]
)
@pytest.mark.parametrize("passage", [1, 2, 3])
def test_an_unexpected_error_leaves_no_block_behind(store: LocalStore, point: str, passage: int) -> None:
    space, prompt = store.space(model_space(groups=2)), text(1, 2 * CHUNK)
    with armed(f"{point}=raise@{passage}"):
        try:
            store.put(space, prompt)
        except RuntimeError:
            assert not point.startswith("l2")
        until(lambda: store.state.leases.busy_count == 0 and not store.parts.l2.writing.unwritten)  # type: ignore[union-attr]
    check_blocks(store)
    assert not store.writes.reserved()
    assert {(chain_hash, domain) for owner, chain_hash, domain in store.outbox.held() if not owner} == {
        (chunk.key.chain_hash, chunk.key.domain) for chunk in store.state.catalog if chunk.complete
    }
    store.put(space, prompt)
    assert store.lookup(space, [*prompt, 1]).prefix == 2 * CHUNK
