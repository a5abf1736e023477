"""The publisher against model matchers over real gRPC: whatever fails, the log ends with what the catalog holds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matcher_model import FAULTS, L2, Catalog, ModelLog, ModelMatcher, chunk_added, serving

from kvblend.v1 import matcher_pb2
from services.common.channels import target_of
from services.common.errors import KvblendError
from services.store.publishing.change_log import Snapshot
from services.store.publishing.changes import STORE_OWNER, Added, batches_of
from services.store.publishing.publisher import NoMatchers, Publisher

NAME = "store-a"
EPOCH = 7


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at, "it never came true"
        time.sleep(0.005)


@contextmanager
def publishing(
    catalog: Catalog, address: str, snapshot: Snapshot | None = None, *, epoch: int = EPOCH, **options: float
) -> Iterator[Publisher]:
    publisher = Publisher(
        NAME,
        epoch,
        target_of(address),
        snapshot or catalog.snapshot,
        probe_seconds=0.02,
        timeout=options.pop("timeout", 20),
        **options,
    )  # type: ignore[arg-type]
    catalog.append = publisher.append
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


def agrees(model: ModelMatcher, catalog: Catalog, publisher: Publisher) -> bool:
    """The log is what the catalog is, at the stream's last position, and the publisher knows."""
    return settled(model, catalog, publisher) and model.log.in_l2() == catalog.of(L2)


def settled(model: ModelMatcher, catalog: Catalog, publisher: Publisher) -> bool:
    """As `agrees`; but a removal of L2's that the log lost for good leaves a claim."""
    in_l2 = model.log.in_l2()
    return (
        not publisher.trouble()
        and not model.has_faults()
        and model.log.streams().get(NAME) == (EPOCH, publisher.position().sequence)
        and model.log.owned(NAME) == catalog.of(STORE_OWNER)
        and catalog.of(L2).items() <= in_l2.items()
        and in_l2.keys() <= catalog.ever_added
    )


@pytest.fixture
def model() -> ModelMatcher:
    return ModelMatcher()


@pytest.fixture
def address(model: ModelMatcher, shm_dir: Path) -> Iterator[str]:
    with serving(model, shm_dir / "matcher.sock") as served:
        yield served


def test_tells_what_was_there_before_and_what_changes(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    for number in range(10):
        catalog.add(number)
    with publishing(catalog, address) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
        catalog.remove(3)
        catalog.add(3, L2)
        last = catalog.add(11)
        assert (publisher.position().store, publisher.position().epoch) == (NAME, EPOCH)
        assert publisher.position().sequence == last
        assert publisher.wait_durable(last, 30)
        assert agrees(model, catalog, publisher)
        assert publisher.durable_position() == publisher.position()
        assert publisher.depth() == 0
    assert model.resets == 1


def test_an_empty_store_says_so_and_voids_what_an_older_epoch_owned(model: ModelMatcher, address: str) -> None:
    old = matcher_pb2.PublishRequest(
        store=NAME, epoch=EPOCH - 1, first_sequence=1, batches=batches_of([chunk_added(1)])
    )
    model.log.publish(old)
    catalog = Catalog()
    with publishing(catalog, address) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
    assert model.log.owned(NAME) == {}


def test_pages_are_bounded_and_a_large_store_arrives_whole(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    for number in range(3000):
        catalog.add(number)
    with publishing(catalog, address, max_changes=100) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
    assert [page.reset for page in model.pages if page.batches] == [True] + [False] * 5
    assert max(page.ByteSize() for page in model.pages) < 1 << 20


def test_replicas_share_the_work_and_either_is_enough(shm_dir: Path) -> None:
    log, catalog = ModelLog(), Catalog()
    one, two = ModelMatcher(log), ModelMatcher(log)
    first, second = shm_dir / "1.sock", shm_dir / "2.sock"
    with publishing(catalog, f"unix:{first},unix:{second}") as publisher:
        with serving(two, second):
            with serving(one, first):
                eventually(lambda: agrees(one, catalog, publisher))
                eventually(lambda: len(one.pages) > 3 and len(two.pages) > 3)
            for number in range(50):
                catalog.add(number)
            eventually(lambda: agrees(two, catalog, publisher))
    assert one.resets + two.resets == 1, "a replica that goes costs nothing: the log has it all"


def test_what_a_failed_over_log_lost_is_noticed_with_nothing_new_to_publish(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    with publishing(catalog, address) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
        for number in range(20):
            assert publisher.wait_durable(catalog.add(number), 30)
        assert publisher.wait_durable(catalog.remove(4), 30)
        for records in (1, 3):
            model.log.lose(records)
            eventually(lambda: agrees(model, catalog, publisher))
    assert model.resets == 1, "it was sent again under the same sequences"


def test_case_57_a_log_that_lost_more_than_is_kept_is_told_everything(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    with publishing(catalog, address, max_changes=5) as publisher:
        for number in range(40):
            catalog.add(number)
            catalog.add(number, L2)
        eventually(lambda: agrees(model, catalog, publisher))
        for _ in range(3):
            model.log.lose(1000)
            eventually(lambda: agrees(model, catalog, publisher))
    assert model.resets >= 4


def test_another_process_that_takes_the_name_over_ends_publishing_and_is_shown(
    model: ModelMatcher, address: str
) -> None:
    catalog, theirs = Catalog(), Catalog()
    with publishing(catalog, address) as publisher:
        catalog.add(1)
        eventually(lambda: agrees(model, catalog, publisher))
        with publishing(theirs, address, epoch=EPOCH + 1) as other:
            theirs.add(2)
            eventually(lambda: not other.trouble() and other.depth() == 0)
            eventually(lambda: "taken over the name 'store-a'" in publisher.trouble())
            last = catalog.add(3)
            assert not publisher.wait_durable(last, 30), "nobody waits for it"
            assert publisher.durable_position().sequence == 0
            assert model.log.owned(NAME) == theirs.of(STORE_OWNER)
            asked = len(model.pages)
            eventually(lambda: len(model.pages) >= asked + 3)
            assert {page.epoch for page in model.pages[asked:]} == {EPOCH + 1}, "the other one alone goes on"


def test_a_stranger_at_the_same_epoch_is_noticed_and_its_claims_go(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    with publishing(catalog, address) as publisher:
        catalog.add(1)
        eventually(lambda: agrees(model, catalog, publisher))
        first = publisher.position().sequence + 1
        claims = batches_of([chunk_added(98), chunk_added(99)])
        model.log.publish(matcher_pb2.PublishRequest(store=NAME, epoch=EPOCH, first_sequence=first, batches=claims))
        eventually(lambda: agrees(model, catalog, publisher))
        assert model.resets == 2


def test_case_65_the_store_starts_long_before_the_matcher(model: ModelMatcher, shm_dir: Path) -> None:
    catalog = Catalog()
    path = shm_dir / "matcher.sock"
    with publishing(catalog, f"unix:{path}", max_changes=50) as publisher:
        for number in range(500):
            catalog.add(number)
        assert not publisher.wait_durable(publisher.position().sequence, 30), "a log that is away delays nobody"
        assert publisher.depth() == 500
        assert publisher.trouble()
        with serving(model, path):
            eventually(lambda: agrees(model, catalog, publisher))


def test_case_58_and_57_the_process_dies_and_another_takes_its_address(shm_dir: Path) -> None:
    """First one with the same log, then one whose log is gone."""
    catalog = Catalog()
    path = shm_dir / "matcher.sock"
    log = ModelLog()
    with publishing(catalog, f"unix:{path}") as publisher:
        for generation in range(4):
            model = ModelMatcher(log if generation < 2 else None)
            with serving(model, path):
                catalog.add(generation)
                eventually(lambda model=model: agrees(model, catalog, publisher))  # type: ignore[misc]
            catalog.add(100 + generation)
            catalog.remove(generation)
    assert sum(record.reset for record in log.records) == 1


@pytest.mark.parametrize("reason", ["LOG_UNAVAILABLE", "NOT_READY", "INTERNAL"])
def test_a_refusal_is_shown_delays_nobody_and_passes(model: ModelMatcher, address: str, reason: str) -> None:
    catalog = Catalog()
    with publishing(catalog, address) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
        model.refusal = KvblendError(reason, "because")
        last = catalog.add(1)
        eventually(lambda: f"{reason}: because" in publisher.trouble())
        assert not publisher.wait_durable(last, 30)
        assert publisher.depth() == 1
        model.refusal = None
        eventually(lambda: agrees(model, catalog, publisher))


def test_a_hanging_matcher_delays_nobody_for_long_and_is_caught_up_later(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    with publishing(catalog, address, timeout=0.5) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
        model.hang.set()
        for number in range(50):
            catalog.add(number)
        eventually(lambda: bool(publisher.trouble()))
        assert not publisher.wait_durable(publisher.position().sequence, 30)
        model.hang.clear()
        model.released.set()
        eventually(lambda: agrees(model, catalog, publisher))


def test_who_falls_too_far_behind_is_told_everything_again(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    with publishing(catalog, address, max_changes=10) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
        model.hang.set()
        for number in range(200):
            catalog.add(number % 30)
            if number % 3:
                catalog.remove(number % 30)
        model.hang.clear()
        model.released.set()
        eventually(lambda: agrees(model, catalog, publisher))
        assert model.resets >= 2


def test_case_40_what_is_cleared_in_l2_while_the_log_is_away_is_cleared_in_it_later(
    model: ModelMatcher, address: str
) -> None:
    catalog = Catalog()
    with publishing(catalog, address, max_changes=10) as publisher:
        for number in range(6):
            catalog.add(number, L2)
        eventually(lambda: agrees(model, catalog, publisher))
        model.refusal = KvblendError("LOG_UNAVAILABLE", "away")
        catalog.clear("d1")
        for number in range(50):
            catalog.add(number)
        model.refusal = None
        eventually(lambda: agrees(model, catalog, publisher))
        assert len(model.log.in_l2()) == 4
        assert model.resets == 2


def test_case_70_what_was_waited_for_is_in_the_log_every_time(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    with publishing(catalog, address) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
        for number in range(100):
            last = catalog.add(number)
            assert publisher.wait_durable(last, 30)
            assert len(model.log.owned(NAME)) == number + 1


def test_waiting_ends_by_its_time(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    with publishing(catalog, address) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
        model.hang.set()
        last = catalog.add(1)
        assert not publisher.wait_durable(last, 0.05)
        model.hang.clear()
        model.released.set()
        assert publisher.wait_durable(last, 30)


def test_sequences_are_unique_and_in_the_order_of_calls_from_many_threads(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    with publishing(catalog, address) as publisher:
        numbers: list[int] = []

        def work(thread: int) -> None:
            for turn in range(100):
                numbers.append(catalog.add(turn % 7, STORE_OWNER, thread))
                if turn % 3 == 0:
                    numbers.append(catalog.remove(turn % 7))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        model.log.lose(3)
        for thread in threads:
            thread.join()
        assert len(set(numbers)) == len(numbers)
        eventually(lambda: agrees(model, catalog, publisher))


def test_a_snapshot_that_fails_is_tried_again(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    catalog.add(1)
    failures = [RuntimeError("first"), RuntimeError("second")]

    def snapshot() -> list[Added]:
        if failures:
            raise failures.pop()
        return catalog.snapshot()

    with publishing(catalog, address, snapshot) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))


def test_who_asks_to_tell_again_while_a_snapshot_is_taken_gets_another_one(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    catalog.add(1)
    begun, asked = threading.Event(), threading.Event()
    taken: list[int] = []

    def snapshot() -> list[Added]:
        taken.append(len(taken))
        begun.set()
        assert asked.wait(30)
        return catalog.snapshot()

    with publishing(catalog, address, snapshot) as publisher:
        assert begun.wait(30)
        # As a check does that has just found what the log lacks.
        publisher.tell_again("check")
        asked.set()
        eventually(lambda: len(taken) == 2)
        eventually(lambda: agrees(model, catalog, publisher))


def test_without_matchers_everything_still_works() -> None:
    outbox = NoMatchers(NAME, EPOCH)
    assert [outbox.append(chunk_added(number)) for number in (1, 2)] == [1, 2]
    position = outbox.position()
    assert (position.store, position.epoch, position.sequence) == (NAME, EPOCH, 2)
    assert (outbox.durable_position().sequence, outbox.depth(), outbox.trouble()) == (0, 0, "")
    assert not outbox.wait_durable(2, 30)


def test_close_ends_calls_in_flight_and_threads(model: ModelMatcher, address: str) -> None:
    catalog = Catalog()
    model.hang.set()
    with publishing(catalog, address):
        catalog.add(1)
    assert not [thread for thread in threading.enumerate() if thread.name == "publish"]


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.store.publishing.publisher._FIRST_BACKOFF", 0.002)
    monkeypatch.setattr("services.store.publishing.publisher._LAST_BACKOFF", 0.02)


owners = st.sampled_from([STORE_OWNER, L2])
changes = st.lists(st.tuples(st.booleans(), st.integers(0, 6), owners, st.integers(0, 3)), max_size=40)
faults = st.lists(st.sampled_from(FAULTS), max_size=8)


@pytest.mark.usefixtures("quick_retries")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes, faults, faults, st.sampled_from([3, 1000]))
def test_any_history_under_any_faults_ends_with_the_catalogs_table(
    shm_dir: Path, history: list[tuple[bool, int, str, int]], some: list[str], other: list[str], kept: int
) -> None:
    log, catalog = ModelLog(), Catalog()
    models = [ModelMatcher(log, some), ModelMatcher(log, other)]
    with ExitStack() as stack:
        served = [stack.enter_context(serving(model, shm_dir / f"{at}.sock")) for at, model in enumerate(models)]
        publisher = stack.enter_context(publishing(catalog, ",".join(served), max_changes=kept))
        for is_add, number, owner, version in history:
            if is_add:
                catalog.add(number, owner, version)
            else:
                catalog.remove(number, owner)
        eventually(lambda: all(settled(model, catalog, publisher) for model in models))
