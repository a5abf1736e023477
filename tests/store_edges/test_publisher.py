"""The publisher against a model of the matcher over real gRPC: whatever fails, tables end as the catalog is."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matcher_model import FAULTS, L2, STORE, Catalog, ModelMatcher, chunk_added, serving

from kvblend.v1 import matcher_pb2
from services.store.change_log import Snapshot
from services.store.publisher import Publisher

NAME = "store-a"
EPOCH = 7
KINDS = (matcher_pb2.OWNER_KIND_STORE, matcher_pb2.OWNER_KIND_L2)


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at, "it never came true"
        time.sleep(0.005)


@contextmanager
def publishing(
    catalog: Catalog, targets: list[str], snapshot: Snapshot | None = None, **options: float
) -> Iterator[Publisher]:
    publisher = Publisher(
        NAME,
        EPOCH,
        targets,
        snapshot or catalog.snapshot,
        probe_seconds=0.02,
        timeout=options.pop("timeout", 20),
        **options,
    )  # type: ignore[arg-type]
    catalog.added, catalog.removed = publisher.added, publisher.removed
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


def agrees(model: ModelMatcher, catalog: Catalog, publisher: Publisher) -> bool:
    """The table is what the catalog is, at the stream's last position, and the publisher knows."""
    return all(replica.in_step for replica in publisher._replicas) and has_all(model, catalog, publisher)


def has_all(model: ModelMatcher, catalog: Catalog, publisher: Publisher) -> bool:
    return (
        not model.has_late_pages()
        and model.applied(NAME) == (EPOCH, publisher.position().sequence)
        and all(model.held(NAME, kind) == catalog.of(kind) for kind in KINDS)
    )


@pytest.fixture
def model() -> ModelMatcher:
    return ModelMatcher()


@pytest.fixture
def target(model: ModelMatcher, shm_dir: Path) -> Iterator[str]:
    with serving(model, shm_dir / "matcher.sock") as address:
        yield address


def test_tells_what_was_there_before_and_what_changes(model: ModelMatcher, target: str) -> None:
    catalog = Catalog()
    for number in range(10):
        catalog.add(number)
    with publishing(catalog, [target]) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
        catalog.remove(3)
        catalog.add(3, L2)
        last = catalog.add(11)
        assert (publisher.position().store, publisher.position().epoch) == (NAME, EPOCH)
        assert publisher.position().sequence == last
        assert publisher.wait_applied(last, 30)
        assert agrees(model, catalog, publisher)
        assert publisher.depth() == 0
    assert model.resets == 1


def test_an_empty_store_says_so_and_voids_what_an_older_epoch_owned(model: ModelMatcher, target: str) -> None:
    old = matcher_pb2.PublishRequest(
        store=NAME, epoch=EPOCH - 1, first_sequence=1, events=[matcher_pb2.ChangeEvent(added=chunk_added(1))]
    )
    model.Publish(old, None)
    catalog = Catalog()
    with publishing(catalog, [target]) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
    assert model.held(NAME, KINDS[0]) == {}


def test_pages_are_bounded_and_a_large_store_arrives_whole(model: ModelMatcher, target: str) -> None:
    catalog = Catalog()
    for number in range(3000):
        catalog.add(number)
    with publishing(catalog, [target], max_lag=100) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
    assert model.resets == 1
    assert model.largest_page == 512


def test_case_57_a_restarted_matcher_is_told_everything_again_with_nothing_new_to_publish(
    model: ModelMatcher, target: str
) -> None:
    catalog = Catalog()
    with publishing(catalog, [target]) as publisher:
        for number in range(20):
            catalog.add(number)
        eventually(lambda: agrees(model, catalog, publisher))
        for _ in range(3):
            model.restart()
            eventually(lambda: agrees(model, catalog, publisher))


def test_a_matcher_that_lost_its_place_is_noticed_with_nothing_new_to_publish(model: ModelMatcher, target: str) -> None:
    catalog = Catalog()
    with publishing(catalog, [target]) as publisher:
        catalog.add(1)
        eventually(lambda: agrees(model, catalog, publisher))
        model.forget_stream(NAME)
        eventually(lambda: agrees(model, catalog, publisher))


def test_a_stranger_under_the_stores_name_is_noticed_and_its_claims_go(model: ModelMatcher, target: str) -> None:
    catalog = Catalog()
    with publishing(catalog, [target]) as publisher:
        catalog.add(1)
        eventually(lambda: agrees(model, catalog, publisher))
        claim = matcher_pb2.PublishRequest(
            store=NAME,
            epoch=EPOCH,
            first_sequence=publisher.position().sequence + 1,
            events=[matcher_pb2.ChangeEvent(added=chunk_added(99))],
        )
        model.Publish(claim, None)
        eventually(lambda: agrees(model, catalog, publisher))


def test_case_65_the_store_starts_long_before_the_matcher(model: ModelMatcher, shm_dir: Path) -> None:
    catalog = Catalog()
    path = shm_dir / "matcher.sock"
    with publishing(catalog, [f"unix:{path}"], max_lag=50) as publisher:
        for number in range(500):
            catalog.add(number)
        assert publisher.wait_applied(publisher.position().sequence, 0), "a matcher that is away delays nobody"
        assert publisher.depth() == 500
        with serving(model, path):
            eventually(lambda: agrees(model, catalog, publisher))


def test_case_58_and_57_the_process_dies_and_another_takes_its_address(shm_dir: Path) -> None:
    catalog = Catalog()
    path = shm_dir / "matcher.sock"
    with ExitStack() as stack:
        publisher = stack.enter_context(publishing(catalog, [f"unix:{path}"]))
        for generation in range(3):
            model = ModelMatcher()
            with serving(model, path):
                catalog.add(generation)
                eventually(lambda model=model: agrees(model, catalog, publisher))  # type: ignore[misc]
            catalog.add(100 + generation)
            catalog.remove(generation)


def test_a_hanging_matcher_delays_nobody_and_is_caught_up_later(
    model: ModelMatcher, target: str, shm_dir: Path
) -> None:
    healthy = ModelMatcher()
    catalog = Catalog()
    with serving(healthy, shm_dir / "healthy.sock") as other:
        with publishing(catalog, [target, other], timeout=1.0) as publisher:
            eventually(lambda: agrees(model, catalog, publisher) and agrees(healthy, catalog, publisher))
            model.hang.set()
            for number in range(50):
                catalog.add(number)
            eventually(lambda: has_all(healthy, catalog, publisher))
            # The hanging one falls out of step, and then nobody waits for it any more.
            eventually(lambda: publisher.wait_applied(publisher.position().sequence, 0))
            assert publisher.depth() > 0
            model.hang.clear()
            model.released.set()
            eventually(lambda: agrees(model, catalog, publisher) and publisher.depth() == 0)


def test_who_falls_too_far_behind_is_told_everything_again(model: ModelMatcher, target: str) -> None:
    catalog = Catalog()
    with publishing(catalog, [target], max_lag=10) as publisher:
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


def test_wait_applied_waits_for_who_is_in_step(model: ModelMatcher, target: str) -> None:
    catalog = Catalog()
    with publishing(catalog, [target]) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
        model.hang.set()
        last = catalog.add(1)
        assert not publisher.wait_applied(last, 0.05)
        model.hang.clear()
        model.released.set()
        assert publisher.wait_applied(last, 30)
        assert model.applied(NAME) == (EPOCH, last)


def test_case_70_what_was_waited_for_is_found_every_time(model: ModelMatcher, target: str) -> None:
    catalog = Catalog()
    with publishing(catalog, [target]) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))
        for number in range(200):
            last = catalog.add(number)
            assert publisher.wait_applied(last, 30)
            assert len(model.held(NAME, KINDS[0])) == number + 1


def test_sequences_are_unique_and_in_the_order_of_calls_from_many_threads(model: ModelMatcher, target: str) -> None:
    catalog = Catalog()
    with publishing(catalog, [target]) as publisher:
        numbers: list[int] = []

        def work(thread: int) -> None:
            for turn in range(100):
                numbers.append(catalog.add(turn % 7, STORE, thread))
                if turn % 3 == 0:
                    numbers.append(catalog.remove(turn % 7))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        model.restart()
        for thread in threads:
            thread.join()
        assert len(set(numbers)) == len(numbers)
        eventually(lambda: agrees(model, catalog, publisher))


def test_a_snapshot_that_fails_is_tried_again(model: ModelMatcher, target: str) -> None:
    catalog = Catalog()
    catalog.add(1)
    failures = [RuntimeError("first"), RuntimeError("second")]

    def snapshot() -> list[matcher_pb2.ChunkAdded]:
        if failures:
            raise failures.pop()
        return catalog.snapshot()

    with publishing(catalog, [target], snapshot) as publisher:
        eventually(lambda: agrees(model, catalog, publisher))


def test_without_matchers_everything_still_works() -> None:
    catalog = Catalog()
    with publishing(catalog, []) as publisher:
        assert [catalog.add(1), catalog.remove(1)] == [1, 2]
        assert publisher.wait_applied(2, 0)
        assert publisher.depth() == 0


def test_close_ends_calls_in_flight_and_threads(model: ModelMatcher, target: str) -> None:
    catalog = Catalog()
    model.hang.set()
    with publishing(catalog, [target]):
        catalog.add(1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("publish-")]


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.store.publisher._FIRST_BACKOFF", 0.002)
    monkeypatch.setattr("services.store.publisher._LAST_BACKOFF", 0.02)


owners = st.sampled_from([STORE, L2])
changes = st.lists(st.tuples(st.booleans(), st.integers(0, 6), owners, st.integers(0, 3)), max_size=40)
faults = st.lists(st.sampled_from(FAULTS), max_size=8)


@pytest.mark.usefixtures("quick_retries")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes, faults, faults, st.sampled_from([3, 1000]))
def test_any_history_under_any_faults_ends_with_the_catalogs_table(
    shm_dir: Path, history: list[tuple[bool, int, matcher_pb2.Owner, int]], some: list[str], other: list[str], lag: int
) -> None:
    catalog = Catalog()
    models = [ModelMatcher(some), ModelMatcher(other)]
    with ExitStack() as stack:
        targets = [
            stack.enter_context(serving(model, shm_dir / f"{number}.sock")) for number, model in enumerate(models)
        ]
        publisher = stack.enter_context(publishing(catalog, targets, max_lag=lag))
        for is_add, number, owner, version in history:
            if is_add:
                catalog.add(number, owner, version)
            else:
                catalog.remove(number, owner)
        for model in models:
            eventually(lambda model=model: settled(model, catalog, publisher))  # type: ignore[misc]


def settled(model: ModelMatcher, catalog: Catalog, publisher: Publisher) -> bool:
    """As `agrees`; but a reset leaves L2's owners alone, so one whose removal was skipped may be left."""
    store, l2 = KINDS
    known, claimed = catalog.of(l2), model.held(NAME, l2)
    return (
        not model.has_late_pages()
        and model.applied(NAME) == (EPOCH, publisher.position().sequence)
        and model.held(NAME, store) == catalog.of(store)
        and known.items() <= claimed.items()
        and claimed.keys() <= catalog.ever_added
    )
