"""Chunk life in one process: reservations, leases, quarantine, eviction, clearing, recovery."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_kit import CHUNK, OTHER_SESSION, SESSION, LocalStore, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.arena_format import BlockState, SessionFile, open_catalog
from services.common.errors import KvblendError
from services.store.clearing import clear, validate_scope
from services.store.keeping import copies_stopped
from services.store.publishing.changes import Removed

GRANTED, PRESENT = store_pb2.CHUNK_OUTCOME_GRANTED, store_pb2.CHUNK_OUTCOME_PRESENT
BEING_WRITTEN, DECLINED = store_pb2.CHUNK_OUTCOME_BEING_WRITTEN, store_pb2.CHUNK_OUTCOME_DECLINED


@pytest.fixture
def store(shm_dir: Path) -> Iterator[LocalStore]:
    (shm_dir / "sessions").mkdir()
    files = [SessionFile(shm_dir, session) for session in (SESSION, OTHER_SESSION)]
    store = LocalStore(shm_dir, lease_ttl_seconds=60, reservation_ttl_seconds=30)
    for session in (SESSION, OTHER_SESSION):
        store.parts.sessions.hello(session, "test")
    yield store
    store.close()
    for file in files:
        file.close()


# Writing.


def test_what_is_reserved_is_not_visible(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    granted = store.reserve(space, prompt)
    assert store.lookup(space, [*prompt, 1]).prefix == 0
    assert store.reserve(space, prompt, session=OTHER_SESSION).outcomes() == [BEING_WRITTEN]
    store.write(granted)
    assert store.commit(granted) == [0]
    assert store.lookup(space, [*prompt, 1], request="b").prefix == CHUNK
    assert store.reserve(space, prompt).outcomes() == [PRESENT]


def test_case_05_an_expired_write_never_becomes_visible(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.writes.ttl = 0
    granted = store.reserve(space, prompt)
    assert store.lookup(space, [*prompt, 1]).prefix == 0
    store.write(granted)
    assert store.commit(granted) == [pb.REASON_RESERVATION_EXPIRED]
    assert store.lookup(space, [*prompt, 1], request="b").prefix == 0
    assert store.state.pool.used_bytes == 0


def test_case_54_an_old_write_cannot_complete_a_newer_one(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    old = store.reserve(space, prompt)
    store.time.time += 31
    store.parts.keeper.step()
    new = store.reserve(space, prompt, session=OTHER_SESSION)
    assert new.outcomes() == [GRANTED]
    assert store.commit(old) == [pb.REASON_RESERVATION_EXPIRED]
    assert store.lookup(space, [*prompt, 1]).prefix == 0
    store.write(new)
    assert store.commit(new) == [0]
    assert store.lookup(space, [*prompt, 1], request="b").prefix == CHUNK


def test_a_quarantined_block_is_reused_only_when_its_copy_has_stopped(store: LocalStore) -> None:
    space = store.space()
    late = store.reserve(space, text(1, 4 * CHUNK))
    held = {place.header for _, place in late.places()}
    store.time.time += 10_000
    store.parts.keeper.step()
    for seed in range(100, 200):
        granted = store.put(space, text(seed, CHUNK))
        assert held.isdisjoint(place.header for _, place in granted.places())
    store.write(late)
    for chunk in store.state.catalog:
        for header in chunk.objects.values():
            assert store.state.pool.headers.state(header) == BlockState.COMMITTED
    assert len(store.writes.quarantined()) == 4
    store.writes.abort(SESSION, late.number)
    assert len(store.writes.quarantined()) == 0


@pytest.mark.parametrize("how", ["drained", "dead"])
def test_a_lost_sessions_writes_wait_for_word_or_proof(store: LocalStore, shm_dir: Path, how: str) -> None:
    late = store.reserve(store.space(), text(1, CHUNK))
    store.parts.sessions.goodbye(SESSION)
    store.time.time += 5
    store.parts.keeper.step()
    assert len(store.writes.quarantined()) == 1
    store.parts.keeper.step()
    assert len(store.writes.quarantined()) == 1, "its agent lives"
    if how == "drained":
        assert copies_stopped(store.state, store.writes, SESSION) == 1
    else:
        (shm_dir / "sessions" / SESSION.hex()).unlink()
        store.parts.keeper.step()
    assert len(store.writes.quarantined()) == 0
    assert store.state.pool.used_bytes == 0
    with pytest.raises(KvblendError, match="UNKNOWN_RESERVATION"):
        store.commit(late)


def test_a_reconnect_within_the_grace_keeps_everything(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    store.lookup(space, [*prompt, 1])
    granted = store.reserve(space, text(2, CHUNK))
    store.parts.sessions.goodbye(SESSION)
    store.time.time += 1
    store.parts.keeper.step()
    store.parts.sessions.hello(SESSION, "test")
    store.time.time += 10
    store.parts.keeper.step()
    assert store.state.leases.held_count == 1
    store.write(granted)
    assert store.commit(granted) == [0]


def test_commit_takes_what_is_named_and_frees_the_rest(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, 3 * CHUNK)
    granted = store.reserve(space, prompt)
    store.write(granted)
    del granted.chunks[1]
    assert store.commit(granted) == [0, 0]
    assert store.state.pool.used_bytes == 2 * 4096
    assert store.lookup(space, [*prompt, 1]).prefix == CHUNK
    with pytest.raises(KvblendError, match="UNKNOWN_RESERVATION"):
        store.commit(granted)


def test_a_stranger_can_neither_commit_nor_abort(store: LocalStore) -> None:
    granted = store.reserve(store.space(), text(1, CHUNK))
    granted.session = OTHER_SESSION
    with pytest.raises(KvblendError, match="UNKNOWN_RESERVATION"):
        store.commit(granted)
    store.writes.abort(OTHER_SESSION, granted.number)
    granted.session = SESSION
    store.write(granted)
    assert store.commit(granted) == [0]


def test_case_71_with_the_arena_full_every_outcome_is_told(store: LocalStore) -> None:
    """Twice the capacity in one request that is not committed yet: nothing can be evicted for it."""
    granted = store.reserve(store.space(), text(1, 128 * CHUNK))
    assert granted.outcomes() == [GRANTED] * 64 + [DECLINED] * 64
    assert granted.reasons()[64:] == [pb.REASON_NO_SPACE] * 64
    store.write(granted)
    assert store.commit(granted) == [0] * 64
    assert store.lookup(store.space(), text(1, 128 * CHUNK)).prefix == 64 * CHUNK // 2, "half may be leased"


def test_case_32_ten_times_the_capacity_leaves_the_latest(store: LocalStore) -> None:
    space = store.space()
    for seed in range(640):
        assert store.put(space, text(seed, CHUNK)).outcomes() == [GRANTED]
    for seed in range(640 - 50, 640):
        assert store.lookup(space, [*text(seed, CHUNK), 1], request=str(seed)).prefix == CHUNK
        store.lookups.end_request(SESSION, str(seed))
    gone = [change for change in store.outbox.changes if isinstance(change, Removed)]
    assert len(gone) == store.state.stats.get("evicted_chunks")
    assert len(store.outbox.held()) == len(store.state.catalog)


# Leases.


def test_case_01_an_ended_request_frees_its_leases(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, 4 * CHUNK)
    store.put(space, prompt)
    store.lookup(space, [*prompt, 1])
    store.lookups.end_request(SESSION, "r")
    assert store.state.leases.held_count == 0
    for seed in range(100, 164):
        store.put(space, text(seed, CHUNK))
    assert store.lookup(space, [*prompt, 1], request="b").prefix == 0


def test_case_02_releasing_part_leaves_the_rest(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, 8 * CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, [*prompt, 1])
    refs = [(item.place.header, item.place.generation) for item in found.objects]
    with store.state.lock:
        assert store.state.leases.release(found.holder, refs[:4]) == 4
        assert store.state.leases.release(found.holder, refs[:4]) == 0
    chunks = [store.state.catalog.of_header(header) for header, _ in refs]
    assert [chunk.protectors for chunk in chunks if chunk] == [0] * 4 + [1] * 4
    for item in found.objects[4:]:
        assert store.begin(found, item) == 0
        store.end(found, item)
    assert [chunk.protectors for chunk in chunks if chunk] == [0] * 8


def test_case_03_ending_twice_or_before_a_lookup_does_nothing(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    store.lookups.end_request(SESSION, "r")
    store.lookup(space, [*prompt, 1])
    store.lookups.end_request(SESSION, "r")
    store.lookups.end_request(SESSION, "r")
    assert store.state.leases.held_count == 0
    assert store.state.catalog.get(next(iter(store.state.catalog)).key).protectors == 0  # type: ignore[union-attr]


def test_case_04_a_lease_past_its_time_is_good_while_the_object_is_there(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, [*prompt, 1])
    store.time.time += 120
    store.parts.keeper.step()
    assert store.state.leases.held_count == 0
    assert store.begin(found, found.objects[0]) == 0


def test_case_66_what_was_evicted_after_its_lease_is_reported(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, [*prompt, 1])
    store.time.time += 120
    store.parts.keeper.step()
    for seed in range(100, 200):
        store.put(space, text(seed, CHUNK))
    assert store.begin(found, found.objects[0]) == pb.REASON_EVICTED
    with open_catalog(store.arena.directory) as view:
        assert view.generation(found.objects[0].place.header) != found.objects[0].place.generation


def test_case_06_a_late_release_takes_nothing_from_another(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    first = store.lookup(space, [*prompt, 1], request="a")
    store.time.time += 120
    store.parts.keeper.step()
    second = store.lookup(space, [*prompt, 1], request="b", session=OTHER_SESSION)
    refs = [(item.place.header, item.place.generation) for item in first.objects]
    with store.state.lock:
        store.state.leases.release(first.holder, refs)
        store.state.leases.release(first.holder, refs)
    for seed in range(100, 200):
        store.put(space, text(seed, CHUNK))
    assert store.begin(second, second.objects[0]) == 0
    store.check_bytes(second, second.objects[0])


def test_case_53_a_copy_longer_than_every_limit_reads_its_own_bytes(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, [*prompt, 1])
    assert store.begin(found, found.objects[0]) == 0
    store.time.time += 100_000
    store.parts.keeper.step()
    for seed in range(100, 300):
        store.put(space, text(seed, CHUNK))
    clear(store.state, store.writes, None, pb.ClearScope(everything=True), True, 1.0)
    for seed in range(300, 500):
        store.put(space, text(seed, CHUNK))
    store.check_bytes(found, found.objects[0])
    store.end(found, found.objects[0])
    assert store.state.leases.busy_count == 0
    assert not store.state.condemned


def test_held_leases_give_way_oldest_first_and_say_so(store: LocalStore) -> None:
    space = store.space()
    texts = [text(seed, CHUNK) for seed in range(64)]
    for tokens in texts:
        store.put(space, tokens)
    found = [
        store.lookup(space, [*tokens, 1], request=str(number), session=(SESSION, OTHER_SESSION)[number % 2])
        for number, tokens in enumerate(texts[:60])
    ]
    leased = [item for item in found if item.objects]
    assert len(leased) == 32, "a tenant's leases protect half of the arena"
    assert {pb.REASON_QUOTA} < set(found[-1].reasons())
    granted = store.reserve(space, text(1000, 40 * CHUNK))
    assert granted.outcomes() == [GRANTED] * 40
    reasons = [store.begin(item, item.objects[0]) for item in leased]
    assert reasons == [pb.REASON_LEASE_REVOKED] * 8 + [0] * 24
    assert store.state.stats.get("revoked_leases") == 8


def test_a_lost_sessions_leases_end_but_running_copies_stay(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, 2 * CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, [*prompt, 1])
    store.begin(found, found.objects[0])
    store.parts.sessions.goodbye(SESSION)
    store.time.time += 5
    store.parts.keeper.step()
    assert (store.state.leases.held_count, store.state.leases.busy_count) == (0, 1)
    assert copies_stopped(store.state, store.writes, SESSION) == 1
    assert store.state.leases.busy_count == 0


def test_a_request_that_is_never_ended_is_forgotten(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, [*prompt, 1])
    store.time.time += 601
    store.parts.keeper.step()
    assert store.begin(found, found.objects[0]) == pb.REASON_NOT_IN_ANSWER


def test_corrupt_bytes_are_dropped_only_on_a_readers_word(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, [*prompt, 1])
    ref = (found.objects[0].place.header, found.objects[0].place.generation)
    with store.state.lock:
        store.state.report_corrupt(found.holder, ref)
    assert len(store.state.catalog) == 1
    store.begin(found, found.objects[0])
    with store.state.lock:
        store.state.report_corrupt(found.holder, ref)
    store.end(found, found.objects[0])
    assert len(store.state.catalog) == 0
    assert store.state.pool.used_bytes == 0


# Eviction.


def test_blended_goes_first_then_tails_of_prompts_then_documents(store: LocalStore) -> None:
    space = store.space()
    store.put(space, text(3, 2 * CHUNK), document="d")
    store.time.time += 1
    store.put(space, text(1, 4 * CHUNK))
    store.time.time += 1
    store.put(space, text(2, 2 * CHUNK), exact=0)
    store.put(space, text(4, CHUNK), document="p", pinned=True)
    store.time.time += 1
    now = store.state.clock.now()
    order = [(chunk.key.domain, chunk.info.stored_position // CHUNK) for chunk in store.state.policy.victims(now)]
    prompts = [(pb.DOMAIN_EXACT, position) for position in (3, 2, 1, 0)]
    documents = [(pb.DOMAIN_SEGMENT, position) for position in (0, 1)]
    assert order == [(pb.DOMAIN_BLENDED, 1), (pb.DOMAIN_BLENDED, 0), *prompts, *documents]
    store.time.time += 100
    store.lookup(space, [*text(1, 4 * CHUNK), 1])
    late = store.state.policy.victims(store.state.clock.now())
    assert [chunk.key.domain for chunk in late][2:4] == [pb.DOMAIN_SEGMENT] * 2, "documents age too"


def test_case_31_over_the_watermark_room_is_made_by_itself(store: LocalStore) -> None:
    space = store.space()
    for seed in range(62):
        store.put(space, text(seed, CHUNK))
    assert store.state.pool.used_bytes > 0.95 * store.state.pool.capacity_bytes
    store.parts.keeper.step()
    assert store.state.pool.used_bytes <= 0.9 * store.state.pool.capacity_bytes


def test_documents_expire(store: LocalStore) -> None:
    space, document = store.space(), text(1, CHUNK)
    store.put(space, document, document="d", ttl=100)
    store.time.time += 101
    assert store.reserve(space, document, document="d").outcomes() == [GRANTED]
    store.parts.keeper.step()
    assert len(store.state.catalog) == 0


def test_a_text_stored_again_keeps_the_longer_promise(store: LocalStore) -> None:
    space, document = store.space(), text(1, CHUNK)
    store.put(space, document, document="d", ttl=100)
    assert store.put(space, document, document="e", pinned=True, first_position=77).outcomes() == [PRESENT]
    chunk = next(iter(store.state.catalog))
    assert (chunk.pinned, chunk.expires_at, chunk.documents, chunk.info.stored_position) == (True, 0.0, {"d", "e"}, 0)


# Clearing.


def test_clear_by_scope(store: LocalStore) -> None:
    mine, theirs = store.space(tenant="a"), store.space(tenant="b")
    for space in (mine, theirs):
        store.put(space, text(1, CHUNK), document="d")
        store.put(space, text(2, CHUNK))

    def cleared(scope: pb.ClearScope) -> int:
        validate_scope(scope)
        return clear(store.state, store.writes, None, scope, False, 1.0).removed_chunks

    assert cleared(pb.ClearScope(document=pb.DocumentScope(tenant="a", document="d"))) == 1
    assert cleared(pb.ClearScope(tenant="a")) == 1
    assert cleared(pb.ClearScope(space_id=theirs.space_id)) == 2
    assert cleared(pb.ClearScope(everything=True)) == 0
    assert store.outbox.held() == set()


@pytest.mark.parametrize(
    "scope", [pb.ClearScope(), pb.ClearScope(everything=False), pb.ClearScope(tenant=""), pb.ClearScope(space_id=b"x")]
)
def test_a_scope_that_names_nothing_clears_nothing(scope: pb.ClearScope) -> None:
    with pytest.raises(KvblendError, match="INVALID_ARGUMENT"):
        validate_scope(scope)


def test_clear_keeps_what_is_leased_unless_forced(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, [*prompt, 1])
    everything = pb.ClearScope(everything=True)
    gentle = clear(store.state, store.writes, None, everything, False, 1.0)
    assert (gentle.removed_chunks, gentle.kept_leased_chunks) == (0, 1)
    assert clear(store.state, store.writes, None, everything, True, 1.0).removed_chunks == 1
    assert store.begin(found, found.objects[0]) == pb.REASON_CLEARED


def test_what_was_being_written_when_its_scope_was_cleared_stays_invisible(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    granted = store.reserve(space, prompt)
    clear(store.state, store.writes, None, pb.ClearScope(tenant="default"), False, 1.0)
    store.write(granted)
    assert store.commit(granted) == [pb.REASON_CLEARED]
    assert store.lookup(space, [*prompt, 1]).prefix == 0
    assert store.state.pool.used_bytes == 0


# Restart.


@contextmanager
def restarted(store: LocalStore, *, killed: bool = True, **options: int) -> Iterator[LocalStore]:
    """A new store over the same directory, as after a kill or an orderly stop."""
    if killed:
        os.close(store.arena._lock)
    else:
        store.arena.close()
    again = LocalStore(store.arena.directory, **options)
    yield again
    # The old one's close comes last.
    store.arena._lock = again.arena._lock


@pytest.mark.parametrize("killed", [True, False])
def test_a_restarted_store_serves_what_was_committed(store: LocalStore, killed: bool) -> None:
    space, prompt, document = store.space(), text(1, 2 * CHUNK + 3), text(2, CHUNK)
    store.put(space, prompt)
    store.put(space, document, document="d", pinned=True, ttl=1000)
    store.reserve(space, text(3, CHUNK))
    with restarted(store, killed=killed) as again:
        assert again.arena.epoch > store.arena.epoch
        found = again.lookup(space, [*prompt, 1, 2])
        assert found.prefix == 2 * CHUNK + 3
        assert {item.verify for item in found.objects} == {killed}
        pinned = next(chunk for chunk in again.state.catalog if chunk.documents)
        assert (pinned.pinned, pinned.expires_at) == (True, store.time.time + 1000)
        assert len(again.writes.quarantined()) == 1, "its agent lives and may still be copying"
        assert not again.writes.reserved()
        assert len(again.state.snapshot()) == 4
        again.parts.keeper.step()
        assert not again.state.unverified


def test_a_late_commit_after_a_restart_frees_its_blocks(store: LocalStore) -> None:
    granted = store.reserve(store.space(), text(1, CHUNK))
    with restarted(store) as again:
        store.write(granted)
        again.writes.commit(SESSION, granted.number, [])
        assert len(again.writes.quarantined()) == 0
        assert again.state.pool.used_bytes == 0


def test_damage_that_a_crash_left_is_found(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, 2 * CHUNK)
    granted = store.put(space, prompt)
    place = granted.chunks[1].places[0]
    store.arena.view(place.slab, place.offset, 4)[:] = b"oops"
    with restarted(store) as again:
        again.parts.keeper.step()
        assert again.lookup(space, [*prompt, 1]).prefix == CHUNK
        assert again.state.stats.get("checksum_failures") == 1


def test_damaged_headers_are_dropped_not_served(store: LocalStore) -> None:
    space = store.space()
    for seed in range(4):
        store.put(space, text(seed, CHUNK))
    headers = store.state.pool.headers
    headers.set(0, "meta_checksum", 1)
    headers.set(1, "slab", 99)
    headers.set(2, "offset", headers.get(3, "offset"))
    with restarted(store) as again:
        assert len(again.state.catalog) == 0
        again.put(space, text(9, 60 * CHUNK))


def test_another_shape_starts_empty_and_invalidates_old_maps(store: LocalStore) -> None:
    store.put(store.space(), text(1, CHUNK))
    with open_catalog(store.arena.directory) as old:
        epoch = old.epoch
        with restarted(store, pages=32) as again:
            assert old.epoch > epoch
            assert len(again.state.catalog) == 0
            assert again.arena.epoch > epoch
            assert len(list(again.arena.directory.glob("slab-*"))) == 2
