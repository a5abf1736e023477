"""Who may hold how much, who pays, and that eviction never fails silently."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_kit import CHUNK, SESSION, FakeMatcher, LocalStore, Segment, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.store.clearing import clear
from services.store.eviction import POLICIES
from services.store.reports import dependencies, stats_of

GRANTED, PRESENT, DECLINED = (
    store_pb2.CHUNK_OUTCOME_GRANTED,
    store_pb2.CHUNK_OUTCOME_PRESENT,
    store_pb2.CHUNK_OUTCOME_DECLINED,
)
PAGE = 4096


@pytest.fixture
def store(shm_dir: Path) -> Iterator[LocalStore]:
    """64 blocks of a page."""
    store = LocalStore(shm_dir / "arena", tenant_quota_bytes={"small": 8 * PAGE}, pinned_share=0.25)
    yield store
    store.close()


def usage_of(store: LocalStore, tenant: str) -> store_pb2.TenantUsage:
    found = {item.tenant: item for item in stats_of(store.parts, []).tenants}
    return found.get(tenant, store_pb2.TenantUsage(tenant=tenant))


def chunks_of(store: LocalStore, tenant: str) -> int:
    return sum(chunk.info.tenant == tenant for chunk in store.state.catalog)


def test_a_tenant_at_its_quota_loses_chunks_of_its_own(store: LocalStore) -> None:
    small, other = store.space(tenant="small"), store.space(tenant="other")
    store.put(other, text(0, 8 * CHUNK))
    for seed in range(1, 6):
        assert store.put(small, text(seed, 4 * CHUNK)).outcomes() == [GRANTED] * 4
    assert (chunks_of(store, "small"), chunks_of(store, "other")) == (8, 8)
    used = usage_of(store, "small")
    assert (used.bytes, used.reserved_bytes, used.quota_bytes) == (8 * PAGE, 0, 8 * PAGE)
    assert usage_of(store, "other").quota_bytes == 0
    assert store.lookup(small, [*text(5, 4 * CHUNK), 1]).prefix == 4 * CHUNK, "the latest is there"


def test_case_67_more_than_a_quota_is_answered_as_quota(store: LocalStore) -> None:
    small = store.space(tenant="small")
    granted = store.reserve(small, text(1, 10 * CHUNK))
    assert granted.outcomes() == [GRANTED] * 8 + [DECLINED] * 2
    assert granted.reasons()[8:] == [pb.REASON_QUOTA] * 2
    assert usage_of(store, "small").reserved_bytes == 8 * PAGE
    store.writes.abort(SESSION, granted.number)
    assert usage_of(store, "small").reserved_bytes == 0


def test_pins_leave_room_for_what_nobody_pinned(store: LocalStore) -> None:
    space = store.space()
    pinned = store.reserve(space, text(1, 20 * CHUNK), document="d", pinned=True)
    assert pinned.outcomes() == [GRANTED] * 16 + [DECLINED] * 4
    assert pinned.reasons()[16:] == [pb.REASON_QUOTA] * 4
    store.write(pinned)
    assert not any(store.commit(pinned))
    assert usage_of(store, "default").pinned_bytes == 16 * PAGE
    # What is here already stays, but not for ever.
    store.put(space, text(2, 2 * CHUNK), document="e")
    again = store.put(space, text(2, 2 * CHUNK), document="e", pinned=True)
    assert (again.outcomes(), again.reasons()) == ([PRESENT] * 2, [pb.REASON_QUOTA] * 2)
    for seed in range(3, 60):
        assert store.put(space, text(seed, 2 * CHUNK)).outcomes() == [GRANTED] * 2
    assert store.lookup(space, [*text(1, 16 * CHUNK), 1], want_segments=False).prefix == 0
    assert sum(chunk.pinned for chunk in store.state.catalog) == 16
    scope = pb.ClearScope(document=pb.DocumentScope(tenant="default", document="d"))
    clear(store.state, store.writes, None, scope, False, 1.0)
    assert usage_of(store, "default").pinned_bytes == 0
    assert store.put(space, text(1, 16 * CHUNK), document="d", pinned=True).outcomes() == [GRANTED] * 16


def test_a_tenants_own_pins_are_bound_by_its_quota(store: LocalStore) -> None:
    granted = store.reserve(store.space(tenant="small"), text(1, 4 * CHUNK), document="d", pinned=True)
    assert granted.outcomes() == [GRANTED] * 2 + [DECLINED] * 2


def test_without_quotas_nobodys_traffic_pushes_others_below_their_fair_share(store: LocalStore) -> None:
    quiet, loud = store.space(tenant="quiet"), store.space(tenant="loud")
    store.put(quiet, text(0, 20 * CHUNK))
    for seed in range(1, 60):
        store.time.time += 1
        store.put(loud, text(seed, 4 * CHUNK))
    assert chunks_of(store, "quiet") == 20
    for seed in range(100, 140):
        store.time.time += 1
        store.put(quiet, text(seed, 4 * CHUNK))
    assert abs(chunks_of(store, "quiet") - chunks_of(store, "loud")) <= 4


@pytest.mark.parametrize("policy", POLICIES)
def test_case_31_any_policy_brings_usage_below_the_watermark(shm_dir: Path, policy: str) -> None:
    store = LocalStore(shm_dir / "arena", eviction_policy=policy)
    for seed in range(62):
        store.put(store.space(), text(seed, CHUNK))
        store.lookup(store.space(), [*text(seed // 2, CHUNK), 1], request=str(seed))
        store.lookups.end_request(SESSION, str(seed))
    assert store.state.pool.used_bytes > 0.95 * store.state.pool.capacity_bytes
    store.parts.keeper.step()
    assert store.state.pool.used_bytes <= 0.9 * store.state.pool.capacity_bytes
    store.close()


def test_case_31_a_keeper_that_died_shows(store: LocalStore) -> None:
    keeper = store.parts.keeper
    keeper.start()
    assert dependencies(store.parts)[0].ready
    keeper.close()
    assert not dependencies(store.parts)[0].ready


@pytest.mark.parametrize("policy", POLICIES)
def test_case_32_ten_times_the_capacity_leaves_the_last_and_refuses_nothing(shm_dir: Path, policy: str) -> None:
    store = LocalStore(shm_dir / "arena", eviction_policy=policy)
    space = store.space()
    for seed in range(160):
        store.time.time += 1
        assert store.put(space, text(seed, 4 * CHUNK)).outcomes() == [GRANTED] * 4
    assert store.lookup(space, [*text(159, 4 * CHUNK), 1]).prefix == 4 * CHUNK
    last = [store.lookup(space, [*text(seed, 4 * CHUNK), 1], request="x").prefix for seed in range(150, 160)]
    assert policy == "s3-fifo" or last == [4 * CHUNK] * 10
    store.close()


def test_a_watermark_that_cannot_be_reached_is_counted(store: LocalStore) -> None:
    granted = store.reserve(store.space(), text(1, 62 * CHUNK))
    assert granted.outcomes() == [GRANTED] * 62
    store.parts.keeper.step()
    assert store.state.stats.get("watermark_missed") == 1


def test_case_34_documents_outlast_always_new_orders_of_them(shm_dir: Path) -> None:
    """50 documents of two chunks, 200 prompts of 14 of them, an arena of twice their size."""
    matcher = FakeMatcher()
    store = LocalStore(shm_dir / "arena", pages=200, matcher=matcher)
    space = store.space()
    documents = {seed: store.put(space, text(seed, 2 * CHUNK), document=f"d{seed}").chunks for seed in range(50)}
    reuse, written = [], 0
    for number in range(200):
        store.time.time += 1
        order = [(7 * number + 3 * place * (number % 11 + 1)) % 50 for place in range(14)]
        order = list(dict.fromkeys(order))
        matcher.segments = [
            Segment(
                query_position=2 * CHUNK * place,
                stored_position=0,
                length=2 * CHUNK,
                domain=pb.DOMAIN_SEGMENT,
                context_class=pb.CONTEXT_CLASS_ALONE,
                chain_hashes=b"".join(chunk.chain_hash for chunk in documents[seed]),
                chunk_lengths=(CHUNK).to_bytes(4, "little") * 2,
            )
            for place, seed in enumerate(order)
        ]
        prompt = [token for seed in order for token in text(seed, 2 * CHUNK)]
        found = store.lookup(space, [*prompt, 1], request=str(number), want_segments=True, accept_blended=True)
        exact = found.summary.prefix_tokens - found.summary.blended_tokens
        reuse.append((found.prefix + found.segment_tokens) / len(prompt))
        granted = store.reserve(space, prompt, exact=exact, segment_tokens=[CHUNK] * (2 * len(order)))
        store.write(granted)
        written += len(granted.places())
        if granted.number:
            assert not any(store.commit(granted))
        store.lookups.end_request(SESSION, str(number))
    assert reuse == [1.0] * 200
    assert written <= 100, "no more than the documents themselves"
    store.close()
