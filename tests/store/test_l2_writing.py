"""The write side of L2: which class is written when, what a full queue or an outage costs, and what a restart owes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from l2_kit import MemoryTier, in_l2, until
from store_kit import CHUNK, SESSION, FakeMatcher, LocalStore, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.store.objects import ObjectKey
from services.store.reports import stats_of
from services.store.tiers.base import Write


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    tier = MemoryTier()
    yield tier
    tier.writing.set()


def started(directory: Path, tier: MemoryTier, **settings: object) -> LocalStore:
    return LocalStore(directory, tier=tier, matcher=FakeMatcher(), **settings)  # type: ignore[arg-type]


def domains(tier: MemoryTier) -> list[int]:
    return sorted({key.chunk.domain for key in tier.objects})


def put_each_class(store: LocalStore) -> None:
    space = store.space()
    store.put(space, text(1, CHUNK), document="d")
    store.put(space, text(2, CHUNK))
    store.put(space, text(3, CHUNK), exact=0)


CLASSES = {"documents": pb.DOMAIN_SEGMENT, "prompts": pb.DOMAIN_EXACT, "blended": pb.DOMAIN_BLENDED}


@pytest.mark.parametrize("named", list(CLASSES))
def test_each_class_goes_to_l2_as_its_setting_says(shm_dir: Path, tier: MemoryTier, named: str) -> None:
    settings = {f"l2_{name}": "through" if name == named else "none" for name in CLASSES}
    store = started(shm_dir, tier, **settings)
    put_each_class(store)
    until(in_l2(store, 1))
    with store.state.lock:
        store.state.evict_down_to(0)
    assert store.parts.l2 is not None
    assert store.parts.l2.writing.unwritten == 0
    store.close()
    assert domains(tier) == [CLASSES[named]]


@pytest.mark.parametrize("named", list(CLASSES))
def test_what_is_written_back_goes_to_l2_when_it_is_evicted(shm_dir: Path, tier: MemoryTier, named: str) -> None:
    settings = {f"l2_{name}": "back" if name == named else "none" for name in CLASSES}
    store = started(shm_dir, tier, **settings)
    put_each_class(store)
    with store.state.lock:
        store.state.evict_down_to(0)
    assert [chunk.key.domain for chunk in store.state.catalog] == [CLASSES[named]], "it goes when it has been written"
    until(in_l2(store, 1))
    with store.state.lock:
        store.state.evict_down_to(0)
    assert len(store.state.catalog) == 0
    store.close()
    assert domains(tier) == [CLASSES[named]]


def test_eviction_takes_others_first_and_never_waits_for_a_write(shm_dir: Path, tier: MemoryTier) -> None:
    tier.writing.clear()
    store = started(shm_dir, tier, l2_documents="none", l2_prompts="back", pages=8, slabs=1)
    space = store.space()
    store.put(space, text(1, CHUNK))
    for seed in range(2, 40):
        granted = store.put(space, text(seed, CHUNK), document=f"d{seed}")
        assert granted.outcomes() == [store_pb2.CHUNK_OUTCOME_GRANTED]
    assert pb.DOMAIN_EXACT in {chunk.key.domain for chunk in store.state.catalog}, "documents went before it"
    until(lambda: store.state.leases.busy_count == 1)
    for seed in range(40, 80):
        granted = store.put(space, text(seed, CHUNK))
        assert granted.outcomes() == [store_pb2.CHUNK_OUTCOME_GRANTED], "with nothing else to go, it goes unwritten"
    tier.writing.set()
    store.close()


def test_a_full_queue_drops_and_offers_again_when_there_is_room(shm_dir: Path, tier: MemoryTier) -> None:
    tier.writing.clear()
    store = started(shm_dir, tier, l2_queue_chunks=4, l2_write_threads=1)
    space = store.space()
    for seed in range(20):
        store.put(space, text(seed, CHUNK))
    stats = stats_of(store.parts, []).l2
    assert stats.dropped_writes >= 15
    assert stats.queued_writes <= 5
    tier.writing.set()
    until(in_l2(store, 20))
    assert len(tier.objects) == 20
    store.close()


def test_case_69_after_an_outage_what_was_not_written_is_written(shm_dir: Path, tier: MemoryTier) -> None:
    tier.down = True
    store = started(shm_dir, tier)
    space = store.space()
    for seed in range(10):
        store.put(space, text(seed, CHUNK))
    until(lambda: stats_of(store.parts, []).l2.failed_writes >= 2)
    assert store.lookup(space, [*text(3, CHUNK), 1]).prefix == CHUNK, "the arena serves meanwhile"
    assert in_l2(store, 0)()
    tier.down = False
    until(in_l2(store, 10))
    store.close()


def test_during_an_outage_eviction_does_not_wait_for_l2_to_come_back(shm_dir: Path, tier: MemoryTier) -> None:
    tier.down = True
    store = started(shm_dir, tier, l2_prompts="back", pages=8, slabs=1)
    space = store.space()
    store.put(space, text(1, CHUNK))
    with store.state.lock:
        store.state.evict_down_to(0)
    until(lambda: stats_of(store.parts, []).l2.failed_writes == 1)
    with store.state.lock:
        store.state.evict_down_to(0)
    assert len(store.state.catalog) == 0
    assert stats_of(store.parts, []).l2.lost_writes == 1
    store.close()


def test_a_restarted_store_writes_what_the_one_before_could_not(shm_dir: Path, tier: MemoryTier) -> None:
    tier.down = True
    store = started(shm_dir, tier)
    space = store.space()
    store.put(space, text(1, 3 * CHUNK))
    store.close()
    tier.down = False
    again = started(shm_dir, tier)
    until(in_l2(again, 3))
    again.close()
    once_more = started(shm_dir, tier)
    assert once_more.parts.l2 is not None
    assert all(chunk.in_l2 for chunk in once_more.state.catalog), "and what is there is not written again"
    once_more.close()


def test_a_chunk_that_will_not_live_long_enough_is_not_written_for_ever(shm_dir: Path, tier: MemoryTier) -> None:
    store = started(shm_dir, tier)
    space = store.space()
    store.put(space, text(1, CHUNK), document="d", ttl=1)
    store.put(space, text(2, CHUNK))
    until(in_l2(store, 1))
    assert domains(tier) == [pb.DOMAIN_EXACT]
    assert stats_of(store.parts, []).l2.failed_writes == 0
    store.close()


def test_a_chunk_offered_again_while_it_is_written_is_written_again(shm_dir: Path, tier: MemoryTier) -> None:
    """Its meta has changed meanwhile: what L2 got is not what the chunk is now."""
    tier.writing.clear()
    store = started(shm_dir, tier)
    space = store.space()
    store.put(space, text(1, CHUNK))
    until(lambda: store.state.leases.busy_count == 1)
    chunk = next(iter(store.state.catalog))
    writes: list[object] = []
    write = tier.write

    def counted(some: Sequence[Write], timeout: float) -> list[bool]:
        writes.extend(some)
        return write(some, timeout)

    tier.write = counted  # type: ignore[method-assign]
    assert store.parts.l2 is not None
    with store.state.lock:
        store.parts.l2.writing.offer(chunk)
    tier.writing.set()
    until(in_l2(store, 1))
    assert len(writes) == 1, "the second time"
    assert store.lookup(space, [*text(1, CHUNK), 1], session=SESSION).prefix == CHUNK
    store.close()


class Recording(MemoryTier):
    """Keeps how many objects each call was about; what is in `refused` it does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.refused: set[ObjectKey] = set()

    def write(self, writes: Sequence[Write], timeout: float) -> list[bool]:
        self.calls.append(len(writes))
        done = super().write([write for write in writes if write.key not in self.refused], timeout)
        return [write.key not in self.refused and all(done) for write in writes]


@contextmanager
def queued(directory: Path, chunks: int) -> Iterator[tuple[LocalStore, Recording]]:
    """So many chunks wait, or are in the first call, until `tier.writing` is set."""
    tier = Recording()
    tier.writing.clear()
    store = started(directory, tier, l2_write_threads=1, pages=1024)
    try:
        for seed in range(chunks):
            store.put(store.space(), text(seed, CHUNK))
        yield store, tier
    finally:
        tier.writing.set()
        store.close()


def test_a_queue_is_written_several_chunks_a_call_once_the_tier_has_shown_its_speed(shm_dir: Path) -> None:
    with queued(shm_dir, 80) as (store, tier):
        tier.writing.set()
        until(in_l2(store, 80))
        assert tier.calls[0] == 1
        assert max(tier.calls) > 1
        assert sum(tier.calls) == 80
        assert store.state.leases.busy_count == 0
        # What is being written cannot be evicted.
        largest = max(chunk.size for chunk in store.state.catalog)
        assert max(tier.calls) * largest <= store.state.pool.capacity_bytes / 64


def test_one_chunk_of_a_call_that_is_refused_costs_the_others_nothing(shm_dir: Path) -> None:
    with queued(shm_dir, 8) as (store, tier):
        until(lambda: len(tier.calls) == 1)
        chunks = list(store.state.catalog)
        refused = chunks[5]
        tier.refused = {ObjectKey(refused.key, *place) for place in refused.objects}
        tier.writing.set()
        until(lambda: sum(chunk.in_l2 for chunk in chunks) == 7)
        until(lambda: stats_of(store.parts, []).l2.failed_writes > 0)
        assert not refused.in_l2
        tier.refused = set()
        until(in_l2(store, 8))
