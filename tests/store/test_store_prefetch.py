"""Lookups that need L2: what they wait for, what they give up, and that no step of it leaks."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from l2_kit import MemoryTier, empty_arena, in_l2, until
from store_kit import CHUNK, SESSION, FakeMatcher, Found, LocalStore, model_space, text
from test_store_lookup import segment_of

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.common.errors import KvblendError
from services.store.leasing.leases import HolderKey
from services.store.objects import ObjectKey
from services.store.tiers.base import Read


class PacedTier(MemoryTier):
    """Objects arrive when the test lets them: `steps` may still be read before reading stops."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = threading.Semaphore(0)
        self.paced = False
        self.seconds = 0.0
        self.reads: list[ObjectKey] = []
        self.calls: list[int] = []
        self.finding = threading.Event()
        self.finding.set()

    def find(self, keys: object, timeout: float) -> list[object_pb2.ObjectMeta | None]:
        self.finding.wait(timeout)
        return super().find(keys, timeout)  # type: ignore[arg-type]

    def read_into(self, reads: Sequence[Read], timeout: float) -> list[bool]:
        self.calls.append(len(reads))
        return super().read_into(reads, timeout)

    def read_one(self, key: ObjectKey, target: memoryview, timeout: float) -> bool:
        self.reads.append(key)
        if self.paced and not self.steps.acquire(timeout=timeout):
            return False
        time.sleep(self.seconds)
        return super().read_one(key, target, timeout)


@pytest.fixture
def tier() -> PacedTier:
    return PacedTier()


@pytest.fixture
def matcher() -> FakeMatcher:
    return FakeMatcher()


@pytest.fixture
def store(shm_dir: Path, tier: PacedTier, matcher: FakeMatcher) -> Iterator[LocalStore]:
    store = LocalStore(shm_dir, tier=tier, matcher=matcher)
    yield store
    tier.paced = False
    tier.finding.set()
    tier.reading.set()
    for _ in range(100):
        tier.steps.release()
    store.close()


def stored(store: LocalStore, seed: int, chunks: int, **options: object) -> list[int]:
    """A text in L2 alone."""
    tokens = text(seed, chunks * CHUNK)
    before = sum(owner == MemoryTier.tier_id for owner, *_ in store.outbox.held())
    store.put(store.space(), tokens, **options)
    until(in_l2(store, before + chunks))
    empty_arena(store)
    return tokens


@dataclass
class Asking:
    """A lookup on a thread of its own."""

    thread: threading.Thread
    found: list[Found] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def join(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive()


def ask(store: LocalStore, tokens: list[int], **options: object) -> Asking:
    def look() -> None:
        try:
            asking.found.append(store.lookup(store.space(), tokens, **options))  # type: ignore[arg-type]
        except KvblendError as error:
            asking.errors.append(error.reason)

    asking = Asking(threading.Thread(target=look))
    asking.thread.start()
    return asking


def is_clean(store: LocalStore) -> bool:
    """Nothing is leased, reserved or on its way, and every byte in use belongs to a chunk in the catalog."""
    with store.state.lock:
        headers = store.state.pool.headers
        known = sum(
            headers.get(header, "capacity_bytes") for chunk in store.state.catalog for header in chunk.objects.values()
        )
        assert store.parts.l2 is not None
        return (
            store.state.leases.held_count == 0
            and store.state.leases.busy_count == 0
            and store.parts.l2.fetches.wanted_bytes == 0
            and store.state.pool.used_bytes == known
            and all(chunk.protectors == 0 for chunk in store.state.catalog)
        )


def test_a_hole_in_the_middle_hides_nothing_behind_it(store: LocalStore, tier: PacedTier, matcher: FakeMatcher) -> None:
    """The prefix ends there; what a matcher knows behind it is served from L2 all the same."""
    prompt = stored(store, 1, 5)
    hole = next(key for key, (meta, _) in tier.objects.items() if meta.stored_position == 2 * CHUNK)
    del tier.objects[hole]
    claim = segment_of(store.space(), prompt, 0)
    claim.domain, claim.context_class = pb.DOMAIN_EXACT, pb.CONTEXT_CLASS_IN_PROMPT
    matcher.segments = [claim]
    found = store.lookup(
        store.space(), [*prompt, 1], want_segments=True, classes=[pb.CONTEXT_CLASS_IN_PROMPT], prefill=1
    )
    assert (found.prefix, found.segment_tokens) == (2 * CHUNK, 2 * CHUNK)
    assert found.summary.l2_chunks == 4


def test_a_fetch_that_fails_in_the_prefix_hides_nothing_behind_it(
    store: LocalStore, tier: PacedTier, matcher: FakeMatcher
) -> None:
    """L2 said that it had the chunk, and had not: a document behind it serves where the prefix was to."""
    prompt = stored(store, 1, 4)
    document = stored(store, 2, 1, document="d")
    tokens = [*prompt[: 2 * CHUNK], *document, 1]
    store.put(store.space(), tokens[: 3 * CHUNK])
    until(in_l2(store, 6))
    empty_arena(store)
    broken = next(
        key
        for key, (meta, _) in tier.objects.items()
        if meta.stored_position == CHUNK and meta.tokens[:4] == prompt[CHUNK].to_bytes(4, "little")
    )
    read = tier.read_one
    tier.read_one = lambda key, *rest: key != broken and read(key, *rest)  # type: ignore[method-assign]
    matcher.segments = [segment_of(store.space(), document, 2 * CHUNK)]
    found = store.lookup(store.space(), tokens, want_segments=True)
    assert (found.prefix, found.segment_tokens) == (CHUNK, CHUNK)


def test_chunks_of_one_lookup_come_several_a_call_and_one_that_fails_costs_only_itself(
    store: LocalStore, tier: PacedTier
) -> None:
    prompt = stored(store, 1, 12)
    broken = next(key for key, (meta, _) in tier.objects.items() if meta.stored_position == 10 * CHUNK)
    read = tier.read_one
    tier.read_one = lambda key, *rest: key != broken and read(key, *rest)  # type: ignore[method-assign]
    assert store.lookup(store.space(), [*prompt, 1]).prefix == 10 * CHUNK
    assert tier.calls[0] == 1, "the first shows how fast the tier is"
    assert max(tier.calls) > 1
    assert len(tier.calls) < sum(tier.calls) == 12
    until(lambda: len(store.state.catalog) == 11)


def test_partial_results_at_the_deadline_and_the_rest_is_kept(store: LocalStore, tier: PacedTier) -> None:
    prompt = stored(store, 1, 4)
    tier.paced = True
    tier.steps.release()
    found = store.lookup(store.space(), [*prompt, 1], remaining=0.3)
    assert found.prefix == CHUNK
    assert found.reasons()[pb.REASON_DEADLINE] == 3 * CHUNK
    for _ in range(3):
        tier.steps.release()
    until(lambda: len(store.state.catalog) == 4)
    assert store.lookup(store.space(), [*prompt, 1], request="b").summary.l1_chunks == 4


def test_what_a_request_would_have_kept_is_given_up_when_it_ends(store: LocalStore, tier: PacedTier) -> None:
    prompt = stored(store, 1, 4)
    tier.paced = True
    store.lookup(store.space(), [*prompt, 1], remaining=0.1)
    store.lookups.end_request(SESSION, "r")
    for _ in range(4):
        tier.steps.release()
    until(lambda: is_clean(store))
    assert len(tier.reads) == 1, "the chunk that was being read, and none behind it"


def test_the_prompts_first_missing_chunk_comes_first(store: LocalStore, tier: PacedTier) -> None:
    prompt = stored(store, 1, 6)
    store.lookup(store.space(), [*prompt, 1])
    positions = [tier.objects[key][0].stored_position // CHUNK for key in tier.reads]
    assert positions[0] == 0
    assert sorted(positions) == list(range(6))


def test_two_lookups_share_a_fetch_and_one_that_ends_leaves_it_to_the_other(store: LocalStore, tier: PacedTier) -> None:
    prompt = stored(store, 1, 2)
    tier.paced = True
    first = ask(store, [*prompt, 1], remaining=30.0)
    until(lambda: len(tier.reads) == 1)
    second = ask(store, [*prompt, 2], request="b", remaining=30.0)
    until(lambda: store.parts.l2 is not None and len(store.parts.l2.fetches._orders) == 2)
    store.lookups.end_request(SESSION, "r")
    first.join()
    assert first.errors == ["SUPERSEDED"]
    for _ in range(2):
        tier.steps.release()
    second.join()
    assert second.found[0].prefix == 2 * CHUNK
    assert len(tier.reads) == 2
    store.lookups.end_request(SESSION, "b")
    until(lambda: is_clean(store))


def end_while_asking(store: LocalStore, tier: PacedTier, prompt: list[int]) -> Asking:
    tier.finding.clear()
    asking = ask(store, [*prompt, 1], remaining=30.0)
    until(lambda: store.parts.l2 is not None and store.parts.l2.speed.latency > 0.01)
    return asking


def end_while_reading(store: LocalStore, tier: PacedTier, prompt: list[int]) -> Asking:
    tier.paced = True
    asking = ask(store, [*prompt, 1], remaining=30.0)
    until(lambda: len(tier.reads) == 1)
    return asking


def end_between_chunks(store: LocalStore, tier: PacedTier, prompt: list[int]) -> Asking:
    asking = end_while_reading(store, tier, prompt)
    tier.steps.release()
    until(lambda: len(store.state.catalog) == 1 and len(tier.reads) > 1)
    return asking


@pytest.mark.parametrize("how", ["end", "gone"])
@pytest.mark.parametrize("when", [end_while_asking, end_while_reading, end_between_chunks])
def test_case_51_a_lookup_aborted_at_each_step_leaves_nothing(
    store: LocalStore, tier: PacedTier, when: Callable[..., Asking], how: str
) -> None:
    prompt = stored(store, 1, 4)
    asking = when(store, tier, prompt)
    if how == "gone":
        store.lookups.give_up(HolderKey(SESSION, "r", 1, 0))
        asking.join()
    store.lookups.end_request(SESSION, "r")
    asking.join()
    assert asking.errors == (["SUPERSEDED"] if how == "end" else [])
    tier.paced = False
    tier.finding.set()
    for _ in range(10):
        tier.steps.release()
    until(lambda: is_clean(store))
    assert store.lookup(store.space(), [*prompt, 1], request="b").prefix == 4 * CHUNK


def test_case_51_what_is_being_fetched_is_not_evicted_and_its_room_not_given_away(
    store: LocalStore, tier: PacedTier
) -> None:
    prompt = stored(store, 1, 2)
    tier.paced = True
    asking = ask(store, [*prompt, 1], remaining=30.0)
    until(lambda: len(tier.reads) == 1)
    for seed in range(200):
        store.put(store.space(), text(seed + 10, CHUNK))
    for _ in range(2):
        tier.steps.release()
    asking.join()
    # `lookup` compares every byte that it was given.
    assert asking.found[0].prefix == 2 * CHUNK


def test_what_landed_waits_for_its_lease_though_the_arena_is_full(shm_dir: Path, tier: PacedTier) -> None:
    """Each chunk that lands needs the room of another: not of those that landed before it."""
    store = LocalStore(shm_dir, tier=tier, pages=8, slabs=1, l2_fetch_share=1.0, lease_session_share=1.0)
    prompt = stored(store, 1, 8)
    for seed in range(10, 18):
        store.put(store.space(), text(seed, CHUNK))
    assert store.lookup(store.space(), [*prompt, 1]).prefix >= 4 * CHUNK
    store.close()


def test_temporary_chunks_leave_with_their_last_lease(shm_dir: Path, tier: PacedTier) -> None:
    store = LocalStore(shm_dir, tier=tier, l2_fetched="temporary")
    prompt = stored(store, 1, 3)
    kept = store.put(store.space(), text(2, CHUNK))
    for request in ("a", "b"):
        assert store.lookup(store.space(), [*prompt, 1], request=request).prefix == 3 * CHUNK
    store.lookups.end_request(SESSION, "a")
    assert len(store.state.catalog) == 4, "another still has them"
    store.lookups.end_request(SESSION, "b")
    assert [chunk.key.chain_hash for chunk in store.state.catalog] == [kept.chunks[0].chain_hash]
    until(lambda: is_clean(store))
    store.close()


def test_a_temporary_chunk_that_comes_too_late_is_freed(shm_dir: Path, tier: PacedTier) -> None:
    store = LocalStore(shm_dir, tier=tier, l2_fetched="temporary")
    prompt = stored(store, 1, 2)
    tier.paced = True
    store.lookup(store.space(), [*prompt, 1], remaining=0.1)
    for _ in range(2):
        tier.steps.release()
    until(lambda: len(tier.reads) == 2)
    until(lambda: store.state.pool.used_bytes == 0)
    store.close()


def test_the_arena_is_never_full_of_what_is_on_its_way(store: LocalStore, tier: PacedTier) -> None:
    """A quarter of 64 pages; an object of this model needs one of them, and 1 KiB of KV."""
    prompt = stored(store, 1, 40)
    tier.paced = True
    asking = ask(store, [*prompt, 1], remaining=0.3)
    assert store.parts.l2 is not None
    until(lambda: bool(tier.reads))
    assert store.parts.l2.fetches.wanted_bytes <= 16 * 4096
    asking.join()


# Slower than computing.


def lookup_seconds(store: LocalStore, tokens: list[int], **options: object) -> tuple[float, Found]:
    begun = time.monotonic()
    found = store.lookup(store.space(), tokens, **options)  # type: ignore[arg-type]
    return time.monotonic() - begun, found


@pytest.mark.parametrize("stops", ["finding", "reading"])
def test_case_29_and_68_a_tier_that_hangs_costs_a_share_of_computing_then_nothing(
    store: LocalStore, tier: PacedTier, stops: str
) -> None:
    """Whatever the deadline: 30 s here, and computing the prompt would take 10."""
    prompt = stored(store, 1, 10)
    getattr(tier, stops).clear()
    seconds, found = lookup_seconds(store, [*prompt, 1], prefill=16, remaining=30.0)
    patience = 10.0 * store.settings.l2_patience
    assert found.prefix == 0
    assert found.reasons()[pb.REASON_SLOWER_THAN_COMPUTE] == 10 * CHUNK
    assert patience <= seconds < 5.0
    begun = time.monotonic()
    for number in range(20):
        again = store.lookup(store.space(), [*prompt, 1], request=f"r{number}", prefill=16, remaining=30.0)
        assert again.reasons()[pb.REASON_SLOWER_THAN_COMPUTE] == 10 * CHUNK
    assert time.monotonic() - begun < 20 * patience, "it is known now"


def test_a_tier_that_recovered_is_used_again(store: LocalStore, tier: PacedTier) -> None:
    """While it is slow, a chunk is fetched now and then that nobody waits for."""
    prompt, other = stored(store, 1, 10), stored(store, 2, 10)
    tier.reading.clear()
    assert store.lookup(store.space(), [*prompt, 1], prefill=16, remaining=30.0).prefix == 0
    assert store.lookup(store.space(), [*other, 1], request="s", prefill=16, remaining=30.0).prefix == 0
    tier.reading.set()

    def is_used() -> bool:
        time.sleep(0.02)
        found = store.lookup(store.space(), [*other, 1], request="t", prefill=16)
        store.lookups.end_request(SESSION, "t")
        return found.prefix == 10 * CHUNK

    until(is_used)


def test_what_has_been_gained_is_not_lost_by_waiting_on(store: LocalStore, tier: PacedTier) -> None:
    """The tier stops after three chunks: the answer has them, and comes soon."""
    prompt = stored(store, 1, 10)
    tier.paced = True
    for _ in range(3):
        tier.steps.release()
    seconds, found = lookup_seconds(store, [*prompt, 1], prefill=16, remaining=30.0)
    assert found.prefix == 3 * CHUNK
    assert found.reasons()[pb.REASON_SLOWER_THAN_COMPUTE] == 7 * CHUNK
    assert seconds < 5.0, "computing the rest takes 7 s"


def test_a_known_slow_tier_is_not_waited_for(store: LocalStore, tier: PacedTier) -> None:
    prompt = stored(store, 1, 4)
    assert store.parts.l2 is not None
    store.parts.l2.speed.measure(1000, lambda: time.sleep(0.05) is None)
    found = store.lookup(store.space(), [*prompt, 1], prefill=1000)
    assert (found.prefix, found.reasons()[pb.REASON_SLOWER_THAN_COMPUTE]) == (0, 4 * CHUNK)


def test_segments_that_are_slower_than_computing_keep_their_claims(
    store: LocalStore, tier: PacedTier, matcher: FakeMatcher
) -> None:
    """L2 has them: that a lookup would not wait is no reason to tell matchers otherwise."""
    document = stored(store, 1, 2, document="d")
    matcher.segments = [segment_of(store.space(), document, 0)]
    tier.finding.clear()
    found = store.lookup(store.space(), [*document, 1], want_segments=True, prefill=160, remaining=30.0)
    assert found.reasons()[pb.REASON_SLOWER_THAN_COMPUTE] == 2 * CHUNK
    tier.finding.set()
    assert store.parts.l2 is not None
    store.parts.l2.ask(store.space(), []).result()
    assert in_l2(store, 2)()
    found = store.lookup(store.space(), [*document, 1], request="b", want_segments=True, prefill=1)
    assert found.segment_tokens == 2 * CHUNK


def test_every_rank_and_group_comes_or_none_does(shm_dir: Path, tier: PacedTier) -> None:
    store = LocalStore(shm_dir, tier=tier)
    space = store.space(model_space(parallel=2, groups=2))
    prompt = text(1, 2 * CHUNK)
    store.put(space, prompt)
    until(in_l2(store, 2))
    empty_arena(store)
    last = [key for key in tier.objects if (key.group, key.rank) == (1, 1)]
    read = tier.read_one
    tier.read_one = lambda key, *rest: key != last[1] and read(key, *rest)  # type: ignore[method-assign]
    found = [store.lookup(space, [*prompt, 1], rank=rank) for rank in (0, 1)]
    assert [item.prefix for item in found] == [found[0].prefix] * 2
    assert found[0].prefix in (0, CHUNK)
    store.lookups.end_request(SESSION, "r")
    until(lambda: is_clean(store))
    store.close()
