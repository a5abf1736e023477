"""The lower tier behind the arena, with a tier in memory whose speed and health the test chooses."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from l2_kit import MemoryTier, empty_arena, in_l2, until
from store_kit import CHUNK, SESSION, FakeMatcher, LocalStore, model_space, text
from test_store_lookup import segment_of

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2, store_pb2
from services.common.errors import KvblendError
from services.store.clearing import clear
from services.store.objects import ChunkKey
from services.store.publishing.changes import STORE_OWNER, Cleared, Removed


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def matcher() -> FakeMatcher:
    return FakeMatcher()


@pytest.fixture
def store(shm_dir: Path, tier: MemoryTier, matcher: FakeMatcher) -> Iterator[LocalStore]:
    store = LocalStore(shm_dir, tier=tier, matcher=matcher, l2_timeout_seconds=5.0)
    yield store
    tier.reading.set()
    tier.writing.set()
    store.close()


def test_what_is_stored_comes_back_from_l2(store: LocalStore, tier: MemoryTier) -> None:
    space, prompt = store.space(model_space(groups=2)), text(1, 3 * CHUNK)
    store.put(space, prompt)
    until(in_l2(store, 3))
    assert len(tier.objects) == 6
    empty_arena(store)
    found = store.lookup(space, [*prompt, 1])
    assert (found.prefix, found.summary.l1_chunks, found.summary.l2_chunks) == (3 * CHUNK, 0, 3)
    assert len(found.objects) == 6
    assert store.lookup(space, [*prompt, 1], request="b").summary.l1_chunks == 3
    assert store.state.stats.get("l2_written_chunks") == 3, "what came from L2 is not written again"


def test_segments_come_back_from_l2(store: LocalStore, matcher: FakeMatcher) -> None:
    space, document = store.space(), text(1, 2 * CHUNK + 3)
    store.put(space, document, document="d")
    until(in_l2(store, 3))
    empty_arena(store)
    matcher.segments = [segment_of(space, document, 5)]
    found = store.lookup(space, [*text(2, 5), *document, 1], want_segments=True)
    assert (found.segment_tokens, found.summary.l2_chunks) == (2 * CHUNK + 3, 3)
    assert found.segments[0].document == "d"


def test_case_29_late_data_is_a_miss_and_kept_for_the_next_time(store: LocalStore, tier: MemoryTier) -> None:
    space, prompt = store.space(), text(1, 3 * CHUNK)
    store.put(space, prompt)
    until(in_l2(store, 3))
    tail = [chunk for chunk in store.state.catalog if chunk.info.stored_position >= CHUNK]
    with store.state.lock:
        for chunk in tail:
            store.state.remove(chunk, pb.REASON_EVICTED)
    tier.reading.clear()
    found = store.lookup(space, [*prompt, 1], remaining=0.1)
    assert (found.prefix, found.reasons()) == (CHUNK, {pb.REASON_DEADLINE: 2 * CHUNK, pb.REASON_LAST_TOKEN: 1})
    tier.reading.set()
    until(lambda: len(store.state.catalog) == 3)
    assert store.lookup(space, [*prompt, 1], request="b").prefix == 3 * CHUNK


def test_case_68_content_in_the_arena_is_never_asked_for_in_l2(store: LocalStore, tier: MemoryTier) -> None:
    space, prompt = store.space(), text(1, 2 * CHUNK)
    store.put(space, prompt)
    store.lookup(space, prompt)
    assert tier.asked == []


def test_case_23_a_failed_write_is_never_published(store: LocalStore, tier: MemoryTier) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    tier.down = True
    store.put(space, prompt)
    until(lambda: store.state.stats.get("l2_write_failures") == 1)
    assert in_l2(store, 0)()
    empty_arena(store)
    assert store.lookup(space, [*prompt, 1]).prefix == 0


def test_a_failed_read_is_a_miss_and_leaves_nothing(store: LocalStore, tier: MemoryTier) -> None:
    space, prompt = store.space(), text(1, 2 * CHUNK)
    store.put(space, prompt)
    until(in_l2(store, 2))
    empty_arena(store)
    read = tier.read_one
    tier.read_one = lambda *arguments: not read(*arguments)  # type: ignore[method-assign]
    assert store.lookup(space, [*prompt, 1]).prefix == 0
    assert store.state.pool.used_bytes == 0


def test_case_33_written_chunks_can_be_evicted(store: LocalStore) -> None:
    space = store.space()
    for seed in range(100):
        store.put(space, text(seed, CHUNK))
    until(lambda: store.state.leases.busy_count == 0)
    empty_arena(store)
    assert store.state.pool.used_bytes == 0


def test_a_chunk_is_not_evicted_while_it_is_written_but_others_are(store: LocalStore, tier: MemoryTier) -> None:
    tier.writing.clear()
    space = store.space()
    for seed in range(300):
        assert store.put(space, text(seed, CHUNK)).outcomes() == [store_pb2.CHUNK_OUTCOME_GRANTED]
    until(lambda: store.state.leases.busy_count == store.settings.l2_write_threads)
    tier.writing.set()


def test_what_is_cleared_leaves_l2_and_does_not_come_back(store: LocalStore, tier: MemoryTier) -> None:
    mine, theirs = store.space(tenant="a"), store.space(tenant="b")
    for space in (mine, theirs):
        store.put(space, text(1, CHUNK), document="d")
    until(in_l2(store, 2))
    empty_arena(store)
    cleared = clear(store.state, store.writes, store.parts.l2, pb.ClearScope(tenant="a"), False, 1.0)
    assert (cleared.removed_chunks, cleared.removed_l2_chunks) == (0, 1)
    assert {key.chunk.space_id for key in tier.objects} == {theirs.space_id}
    assert in_l2(store, 1)()
    assert store.outbox.changes[-1] == Cleared("memory", tenant="a"), "also what the tier had lost before"


@pytest.mark.parametrize(
    ("scope", "told"),
    [
        (pb.ClearScope(everything=True), Cleared("memory")),
        (pb.ClearScope(space_id=b"s" * 16), Cleared("memory", space_id=b"s" * 16)),
        (
            pb.ClearScope(document=pb.DocumentScope(tenant="a", document="d")),
            Cleared("memory", tenant="a", document="d"),
        ),
    ],
)
def test_case_40_matchers_hear_of_every_clearing_of_l2(store: LocalStore, scope: pb.ClearScope, told: Cleared) -> None:
    """L2 claims of chunks that this store does not have would stay else."""
    clear(store.state, store.writes, store.parts.l2, scope, False, 1.0)
    assert store.outbox.changes == [told]


def test_a_document_that_l2_knows_by_another_name_than_matchers_do_goes_chunk_by_chunk(store: LocalStore) -> None:
    space = store.space(tenant="a")
    granted = store.put(space, text(1, CHUNK), document="d")
    until(in_l2(store, 1))
    empty_arena(store)
    scope = pb.ClearScope(document=pb.DocumentScope(tenant="a", document="d"))
    clear(store.state, store.writes, store.parts.l2, scope, False, 1.0)
    key = ChunkKey(space.space_id, pb.DOMAIN_SEGMENT, granted.chunks[0].chain_hash)
    assert store.outbox.changes[-1] == Removed(key, "memory")


def test_a_leased_chunk_that_outlives_a_clearing_is_not_claimed_for_l2_again(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    until(in_l2(store, 1))
    assert {added.owner for added in store.state.snapshot()} == {STORE_OWNER, "memory"}
    store.lookup(space, [*prompt, 1])
    cleared = clear(store.state, store.writes, store.parts.l2, pb.ClearScope(everything=True), False, 1.0)
    assert (cleared.kept_leased_chunks, cleared.removed_l2_chunks) == (1, 1)
    assert {added.owner for added in store.state.snapshot()} == {STORE_OWNER}
    assert {owner for owner, *_ in store.outbox.held()} == {STORE_OWNER}


def test_a_fetch_that_a_clear_overtakes_comes_to_nothing(store: LocalStore, tier: MemoryTier) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    until(in_l2(store, 1))
    empty_arena(store)
    tier.reading.clear()
    store.lookup(space, [*prompt, 1], remaining=0.05)
    kept = dict(tier.objects)
    clear(store.state, store.writes, store.parts.l2, pb.ClearScope(everything=True), False, 1.0)
    tier.objects.update(kept)
    tier.reading.set()
    until(lambda: store.state.pool.used_bytes == 0)
    assert len(store.state.catalog) == 0


def test_a_write_that_a_clear_overtakes_is_deleted(store: LocalStore, tier: MemoryTier) -> None:
    tier.writing.clear()
    store.put(store.space(), text(1, CHUNK))
    until(lambda: store.state.leases.busy_count == 1)
    clear(store.state, store.writes, store.parts.l2, pb.ClearScope(everything=True), True, 1.0)
    tier.writing.set()
    until(lambda: store.state.leases.busy_count == 0)
    until(lambda: not tier.objects)
    assert in_l2(store, 0)()


def test_clearing_says_so_if_l2_cannot_be_cleared(store: LocalStore, tier: MemoryTier) -> None:
    tier.down = True
    with pytest.raises(KvblendError, match="L2_UNAVAILABLE"):
        clear(store.state, store.writes, store.parts.l2, pb.ClearScope(everything=True), False, 1.0)
    assert store.outbox.changes == [], "matchers hear of it when it is done"


def test_fetching_that_is_slower_than_computing_is_not_done(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, 2 * CHUNK)
    store.put(space, prompt)
    until(in_l2(store, 2))
    empty_arena(store)
    assert store.parts.l2 is not None
    store.parts.l2.speed.measure(10, lambda: time.sleep(0.01) is None)
    slow = store.lookup(space, [*prompt, 1], prefill=1000)
    assert (slow.prefix, slow.reasons()[pb.REASON_SLOWER_THAN_COMPUTE]) == (0, 2 * CHUNK)
    store.lookups.end_request(SESSION, "r")

    def fetched() -> bool:
        found = store.lookup(space, [*prompt, 1], prefill=1)
        store.lookups.end_request(SESSION, "r")
        return found.prefix == 2 * CHUNK

    until(fetched)


def test_what_l2_lost_is_taken_off_the_matchers_table(
    store: LocalStore, tier: MemoryTier, matcher: FakeMatcher
) -> None:
    space, document = store.space(), text(1, CHUNK)
    store.put(space, document, document="d")
    until(in_l2(store, 1))
    empty_arena(store)
    tier.objects.clear()
    matcher.segments = [segment_of(space, document, 0)]
    matcher.log_position = 77
    before = len(store.outbox.changes)
    assert store.lookup(space, [*document, 1], want_segments=True).segment_tokens == 0
    until(in_l2(store, 0))
    key = ChunkKey(space.space_id, pb.DOMAIN_SEGMENT, matcher.segments[0].chain_hashes)
    assert store.outbox.changes[before:] == [Removed(key, STORE_OWNER), Removed(key, "memory", seen_position=77)]


def test_a_tier_that_is_down_is_not_taken_for_an_empty_one(
    store: LocalStore, tier: MemoryTier, matcher: FakeMatcher
) -> None:
    space, document = store.space(), text(1, CHUNK)
    store.put(space, document, document="d")
    until(in_l2(store, 1))
    empty_arena(store)
    tier.down = True
    matcher.segments = [segment_of(space, document, 0)]
    store.lookup(space, [*document, 1], want_segments=True)
    assert store.parts.l2 is not None
    store.parts.l2.ask(space, []).result()
    assert in_l2(store, 1)()


def test_documents_only_may_be_written_through(shm_dir: Path, tier: MemoryTier) -> None:
    store = LocalStore(shm_dir, tier=tier, l2_prompts="none")
    store.put(store.space(), text(1, CHUNK))
    store.put(store.space(), text(2, CHUNK), document="d")
    until(in_l2(store, 1))
    assert {key.chunk.domain for key in tier.objects} == {pb.DOMAIN_SEGMENT}
    store.close()


def test_a_request_that_ends_while_l2_is_slow_leaves_no_lease(store: LocalStore, tier: MemoryTier) -> None:
    """Case 51: the end comes while the prefetch runs."""
    space, prompt = store.space(), text(1, 2 * CHUNK)
    store.put(space, prompt)
    until(in_l2(store, 2))
    empty_arena(store)
    tier.reading.clear()
    ended: list[str] = []

    def look() -> None:
        try:
            store.lookup(space, [*prompt, 1], remaining=10)
        except KvblendError as error:
            ended.append(error.reason)

    thread = threading.Thread(target=look)
    thread.start()
    until(lambda: store.state.pool.used_bytes > 0)
    store.lookups.end_request(SESSION, "r")
    tier.reading.set()
    thread.join()
    assert ended == ["SUPERSEDED"]
    assert store.state.leases.held_count == 0


def test_what_l2_has_of_another_tenant_or_model_is_no_answer(store: LocalStore, tier: MemoryTier) -> None:
    space, prompt = store.space(), text(1, 2 * CHUNK)
    for field, foreign in (("tenant", "somebody else"), ("model_space_id", bytes(16)), ("space_id", bytes(16))):
        store.put(space, prompt)
        until(in_l2(store, 2))
        empty_arena(store)
        kept = [object_pb2.ObjectMeta.FromString(meta.SerializeToString()) for meta, _ in tier.objects.values()]
        for meta, _ in tier.objects.values():
            setattr(meta, field, foreign)
        assert store.lookup(space, [*prompt, 1], request=field).prefix == 0
        for (meta, _), was in zip(tier.objects.values(), kept, strict=True):
            meta.CopyFrom(was)
        assert store.lookup(space, [*prompt, 1], request=f"{field} again").prefix == 2 * CHUNK
        store.lookups.end_request(SESSION, f"{field} again")
