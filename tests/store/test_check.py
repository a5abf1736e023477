"""`CheckStore`: each kind of damage, made on purpose, is found, named and repaired; a healthy store has none."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_kit import CHUNK, SESSION, FakeMatcher, LocalStore, Segment, model_space, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.arena_format import BlockState, SessionFile, meta_offset
from services.common.errors import KvblendError
from services.common.tokens import encode_u32
from services.store.arena.blocks import Writer
from services.store.check.checks import Checks
from services.store.check.stopped import check_stopped

FOREVER = float("inf")


def filled(directory: Path) -> LocalStore:
    local = LocalStore(directory, pages=256)
    space = local.space()
    for seed in range(5):
        local.put(space, text(seed, 2 * CHUNK))
    local.put(local.space(model_space(parallel=2, groups=2)), text(9, CHUNK + 3))
    return local


@pytest.fixture
def store(shm_dir: Path) -> Iterator[LocalStore]:
    local = filled(shm_dir)
    yield local
    local.close()


def found(store: LocalStore, fix: bool = False) -> dict[str, tuple[int, int]]:
    """Kind -> (how many, how many repaired)."""
    answers = [item for item in Checks(store.parts).run(fix, lambda: FOREVER) if item.ended]
    assert not any(item.unfinished for item in answers)
    assert all(finding.examples for item in answers for finding in item.findings)
    return {finding.kind: (finding.count, finding.fixed) for item in answers for finding in item.findings}


def some_header(store: LocalStore, number: int = 0) -> int:
    chunk = sorted(store.state.catalog, key=lambda chunk: chunk.key)[number]
    return chunk.objects[0, 0]


def flip(store: LocalStore, header: int, offset: int) -> None:
    headers = store.state.pool.headers
    place = headers.get(header, "slab"), headers.get(header, "offset") + offset
    store.arena.view(*place, 1)[0] ^= 1


def wrong_place(store: LocalStore) -> None:
    headers, header = store.state.pool.headers, some_header(store)
    headers.set(header, "offset", headers.get(some_header(store, 1), "offset"))


def wrong_size(store: LocalStore) -> None:
    store.state.pool.headers.set(some_header(store), "payload_bytes", 1 << 20)


def wrong_state(store: LocalStore) -> None:
    store.state.pool.headers.set(some_header(store), "state", 77)


def lost_object(store: LocalStore) -> None:
    header = some_header(store)
    store.state.pool.headers.set_state(header, BlockState.FREE)
    store.state.pool.headers.list_free_again()


def nobodys_object(store: LocalStore) -> None:
    chunk = store.state.catalog.of_header(some_header(store))
    assert chunk is not None
    store.state.catalog.remove(chunk)
    store.state.policy.removed(chunk)


def dead_writers_block(store: LocalStore) -> None:
    assert store.state.pool.reserve(1000, 200, Writer(SESSION, 5)) is not None


def block_without_header(store: LocalStore) -> None:
    assert store.state.pool.allocator.allocate(5000) is not None


def freed_twice(store: LocalStore) -> None:
    headers = store.state.pool.headers
    headers._free.append(headers._free[0])


def forgotten_header(store: LocalStore) -> None:
    store.state.pool.headers._free.pop()


def damaged_meta(store: LocalStore) -> None:
    header = some_header(store)
    flip(store, header, meta_offset(store.state.pool.headers.get(header, "payload_bytes")) + 40)


def anothers_meta(store: LocalStore) -> None:
    headers = store.state.pool.headers
    one, other = some_header(store, 0), some_header(store, 1)
    meta = store.state.pool.read_meta(other)
    assert meta is not None
    flags = headers.get(one, "flags")
    store.state.pool.commit(one, meta, flags)


def another_checksum(store: LocalStore) -> None:
    store.state.pool.headers.set(some_header(store), "checksum", 123)


def damaged_payload(store: LocalStore) -> None:
    flip(store, some_header(store), 100)


@pytest.mark.parametrize(
    ("damage", "kind", "count"),
    [
        (wrong_place, "HEADER_DAMAGED", 1),
        (wrong_size, "HEADER_DAMAGED", 1),
        (wrong_state, "HEADER_DAMAGED", 1),
        (lost_object, "OBJECT_LOST", 1),
        (nobodys_object, "BLOCK_LEAKED", 1),
        (dead_writers_block, "BLOCK_LEAKED", 1),
        (block_without_header, "BLOCK_LEAKED", 1),
        (freed_twice, "FREE_LIST", 1),
        (forgotten_header, "FREE_LIST", 1),
        (damaged_meta, "META_DAMAGED", 1),
        (anothers_meta, "META_DISAGREES", 1),
        (another_checksum, "META_DISAGREES", 1),
        (damaged_payload, "PAYLOAD_DAMAGED", 1),
    ],
)
def test_damage_is_found_named_and_repaired(
    store: LocalStore, damage: Callable[[LocalStore], None], kind: str, count: int
) -> None:
    assert found(store) == {}
    held = len(store.state.catalog)
    damage(store)
    assert found(store)[kind] == (count, 0)
    assert found(store)[kind] == (count, 0), "without a fix nothing changes"
    mended = found(store, fix=True)
    assert mended[kind] == (count, count)
    assert found(store) == {}
    assert len(store.state.catalog) >= held - 1
    # Nothing is lost for good: the arena empties to the last page, and whole slabs are whole.
    with store.state.lock:
        for chunk in list(store.state.catalog):
            store.state.remove(chunk, pb.REASON_CLEARED)
    allocator = store.state.pool.allocator
    assert allocator.used_bytes == 0
    assert allocator.longest_free_bytes == store.arena.slab_bytes
    listed, free = store.state.pool.headers.free_lists()
    assert len(listed) == len(free) == store.arena.headers
    assert store.state.arena_usage.message().whole_bytes == 0


def test_what_is_repaired_is_a_miss_and_can_be_stored_again(store: LocalStore) -> None:
    for seed in range(5):
        assert store.lookup(store.space(), [*text(seed, 2 * CHUNK), 1], request=str(seed)).prefix == 2 * CHUNK
    store.lookups.end_request(SESSION, "0")
    damaged_payload(store)
    assert found(store, fix=True)["PAYLOAD_DAMAGED"] == (1, 1)
    for seed in range(5):
        tokens = text(seed, 2 * CHUNK)
        store.put(store.space(), tokens)
        assert store.lookup(store.space(), [*tokens, 1], request=f"again {seed}").prefix == 2 * CHUNK


def test_blocks_that_do_not_fit_between_their_neighbours_are_named(store: LocalStore) -> None:
    allocator = store.state.pool.allocator
    first = next(iter(allocator._blocks))
    del allocator._ending[first + allocator._blocks[first]]
    count, fixed = found(store, fix=True)["FREE_RUNS"]
    assert (count > 0, fixed) == (True, 0)


def test_a_leaked_block_whose_writer_may_be_alive_is_quarantined(store: LocalStore, shm_dir: Path) -> None:
    agent = SessionFile(shm_dir, SESSION)
    try:
        dead_writers_block(store)
        assert found(store, fix=True) == {"BLOCK_LEAKED": (1, 1)}
        assert len(store.writes.quarantined()) == 1
        assert found(store) == {}
    finally:
        agent.close()
    store.writes.copies_stopped(SESSION)
    assert not store.writes.quarantined()


def test_what_is_being_read_stays_until_its_copy_has_stopped(store: LocalStore) -> None:
    tokens = text(0, 2 * CHUNK)
    reading = store.lookup(store.space(), [*tokens, 1])
    item = reading.objects[0]
    assert store.begin(reading, item) == 0
    flip(store, item.place.header, 100)
    assert found(store, fix=True)["PAYLOAD_DAMAGED"] == (1, 1)
    assert store.state.pool.headers.state(item.place.header) == BlockState.CONDEMNED
    assert found(store) == {}
    store.end(reading, item)
    assert store.state.pool.headers.state(item.place.header) == BlockState.FREE


def test_reservations_and_quarantine_are_no_disagreement(store: LocalStore) -> None:
    store.reserve(store.space(), text(50, 2 * CHUNK))
    late = store.reserve(store.space(), text(51, CHUNK))
    assert found(store) == {}
    store.time.time += 1000
    store.writes.expire()
    assert found(store) == {}
    assert late.number


def test_a_healthy_store_under_load_gives_no_alarm(store: LocalStore) -> None:
    space = store.space()
    stopping = threading.Event()
    failures: list[BaseException] = []

    def load(first: int) -> None:
        try:
            for seed in range(first, 1_000_000, 2):
                if stopping.is_set():
                    return
                store.put(space, text(seed, 4 * CHUNK))
                if seed % 7 == 0:
                    with store.state.lock:
                        store.state.evict_down_to(store.state.pool.capacity_bytes // 3)
        except BaseException as error:
            failures.append(error)

    users = [threading.Thread(target=load, args=(1000 + number,)) for number in range(2)]
    for user in users:
        user.start()
    try:
        for turn in range(100):
            assert found(store, fix=turn % 2 == 1) == {}
    finally:
        stopping.set()
        for user in users:
            user.join()
    assert not failures
    assert store.state.stats.get("evicted_chunks") > 0


def test_one_check_at_a_time(store: LocalStore) -> None:
    checks = Checks(store.parts)
    running = checks.run(False, lambda: FOREVER)
    next(running)
    with pytest.raises(KvblendError, match="another check"):
        next(checks.run(False, lambda: FOREVER))
    running.close()
    assert list(checks.run(False, lambda: FOREVER))


def test_a_check_without_time_says_so_for_every_part(store: LocalStore) -> None:
    for item in Checks(store.parts).run(False, lambda: 0.0):
        assert item.unfinished
        assert not item.findings


# Matchers.


def found_at(position: int, length: int) -> Segment:
    return Segment(position, 0, length, chain_hashes=bytes(32), chunk_lengths=encode_u32([length]))


def test_chunks_that_matchers_do_not_find_are_told_again(shm_dir: Path) -> None:
    matcher = FakeMatcher()
    local = LocalStore(shm_dir, pages=256, matcher=matcher)
    local.put(local.space(), text(1, 3 * CHUNK + 2))
    length = 3 * CHUNK
    matcher.segments = [found_at(0, length)]
    assert found(local) == {}
    assert len(matcher.requests[0].tokens) == 4 * length, "all whole chunks in one question"
    matcher.segments = [found_at(0, CHUNK)]
    assert found(local) == {}, "asked alone, each chunk is found"
    matcher.segments = []
    assert found(local) == {"LOG_LACKS": (3, 0)}
    assert not local.outbox.told
    assert found(local, fix=True) == {"LOG_LACKS": (3, 3)}
    assert local.outbox.told == ["check"]
    local.close()


def test_a_stream_out_of_step_is_named(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalStore(shm_dir, matcher=FakeMatcher())
    monkeypatch.setattr("services.store.check.log._STEP_SECONDS", 0.1)
    monkeypatch.setattr(local.outbox, "wait_durable", lambda *_: False)
    monkeypatch.setattr(local.outbox, "trouble", lambda: "the log is away")
    answers = [item for item in Checks(local.parts).run(True, lambda: FOREVER) if item.part == store_pb2.CHECK_PART_LOG]
    (finding,) = answers[-1].findings
    assert (finding.kind, list(finding.examples)) == ("LOG_OUT_OF_STEP", ["the log is away"])
    assert local.outbox.told == ["check"]
    local.close()


def test_matchers_that_are_away_leave_their_part_unfinished(shm_dir: Path) -> None:
    local = LocalStore(shm_dir, matcher=FakeMatcher(error=KvblendError("MATCHER_UNAVAILABLE", "nobody answers")))
    local.put(local.space(), text(1, CHUNK))
    answers = [item for item in Checks(local.parts).run(False, lambda: FOREVER) if item.ended]
    assert [item.unfinished for item in answers] == ["", "", "nobody answers"]
    local.close()


# A stopped store's arena.


def offline(directory: Path, fix: bool = False) -> dict[str, tuple[int, int]]:
    answers = [item for item in check_stopped(directory, fix) if item.ended]
    return {finding.kind: (finding.count, finding.fixed) for item in answers for finding in item.findings}


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (wrong_place, "HEADER_DAMAGED"),
        (wrong_state, "HEADER_DAMAGED"),
        (damaged_meta, "META_DAMAGED"),
        (anothers_meta, "META_DISAGREES"),
        (damaged_payload, "PAYLOAD_DAMAGED"),
    ],
)
def test_a_stopped_stores_arena_is_checked_in_place(
    shm_dir: Path, damage: Callable[[LocalStore], None], kind: str
) -> None:
    store = filled(shm_dir)
    with pytest.raises(KvblendError, match="runs"):
        list(check_stopped(shm_dir, False))
    damage(store)
    store.close()
    before = (shm_dir / "catalog").read_bytes()
    first = offline(shm_dir)
    assert first[kind] == (1, 0)
    assert (shm_dir / "catalog").read_bytes() == before, "without a fix nothing changes"
    assert offline(shm_dir, fix=True) == {name: (count, count) for name, (count, _) in first.items()}
    assert offline(shm_dir) == {}


def test_where_there_is_no_arena_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(KvblendError, match="no arena"):
        list(check_stopped(tmp_path, False))
    (tmp_path / "lock").touch()
    (tmp_path / "catalog").write_bytes(b"x" * 5000)
    with pytest.raises(KvblendError, match="cannot be read"):
        list(check_stopped(tmp_path, False))
