"""The change log: gapless pages, exact checkpoints under races, whatever the matchers' log loses, in bounded memory."""

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matcher_model import L2, Catalog, ModelLog, chunk_added, chunk_removed

from kvblend.v1 import matcher_pb2
from services.store.publishing.change_log import ChangeLog, Page, Snapshot
from services.store.publishing.changes import STORE_OWNER, Added, Change, Cleared, Removed, batches_of

CAPACITY = 8
KEYS = 6
OWNERS = [STORE_OWNER, L2]
PAGE = 3

some_changes = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, KEYS - 1), st.sampled_from(OWNERS), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, KEYS - 1), st.just(STORE_OWNER)),
        st.tuples(st.just("clear"), st.sampled_from(["", "d0", "d1"])),
    ),
    max_size=6,
)
histories = st.lists(
    st.one_of(
        st.tuples(st.just("change"), some_changes),
        # Whether the answer arrives, and what happens before and after the catalog is read if a snapshot is taken.
        st.tuples(st.just("publish"), st.booleans(), some_changes, some_changes),
        st.tuples(st.just("lose"), st.integers(1, 6)),
    ),
    max_size=30,
)


def make(catalog: Catalog, changes: list[Any]) -> None:
    for kind, *arguments in changes:
        getattr(catalog, kind)(*arguments)


def send(log: ModelLog, page: Page) -> int:
    return log.publish(
        matcher_pb2.PublishRequest(
            store="s", epoch=1, first_sequence=page.first, batches=batches_of(page.changes), reset=page.reset
        )
    ).durable_sequence


def publish(changes: ChangeLog, log: ModelLog, snapshot: Snapshot, answered: bool = True) -> None:
    """What the publisher does with one page."""
    page = changes.page(PAGE, 1 << 20)
    if page is None:
        changes.acknowledge(send(log, Page(changes.durable + 1, [], reset=False)))
        changes.start_over(snapshot)
        page = changes.page(PAGE, 1 << 20)
    assert page is not None
    durable = send(log, page)
    if answered:
        changes.acknowledge(durable)


@settings(max_examples=400, deadline=None)
@given(histories)
def test_whatever_happens_the_log_ends_with_what_the_catalog_holds(history: list[Any]) -> None:
    changes, log, catalog = ChangeLog(CAPACITY, 1 << 20), ModelLog(), Catalog()
    catalog.append = changes.append

    def snapshot(before: list[Any], after: list[Any]) -> list[Added]:
        make(catalog, before)
        taken = catalog.snapshot()
        make(catalog, after)
        return taken

    parts = [part for item in history for part in item[1:] if isinstance(part, list)]
    clearings = sum(step[0] == "clear" for part in parts for step in part)
    for kind, *arguments in history:
        if kind == "change":
            make(catalog, *arguments)
        elif kind == "publish":
            publish(changes, log, lambda raced=arguments[1:]: snapshot(*raced), arguments[0])  # type: ignore[misc]
        else:
            log.lose(*arguments)
        assert len(changes) <= CAPACITY + 2 * KEYS + 1 + clearings, "at most the capacity and one checkpoint"
    for _ in range(10 * (CAPACITY + len(history) * KEYS)):
        publish(changes, log, catalog.snapshot)
        if changes.complete and changes.durable == changes.last:
            break
    assert changes.complete
    assert changes.durable == changes.last == log.streams()["s"][1], "publishing comes to an end"
    assert log.owned("s") == catalog.of(STORE_OWNER)
    assert catalog.of(L2).items() <= log.in_l2().items()
    assert log.in_l2().keys() <= catalog.ever_added
    if not any(kind == "lose" for kind, *_ in history):
        assert not log.in_l2().keys() & catalog.cleared


def started(max_changes: int = CAPACITY, held: list[Added] | None = None, max_bytes: int = 1 << 20) -> ChangeLog:
    """It has taken a checkpoint, and the matchers' log has all of it."""
    log = ChangeLog(max_changes, max_bytes)
    log.start_over(lambda: held or [])
    log.acknowledge(log.last)
    return log


def page_of(log: ChangeLog, max_changes: int = 100, max_bytes: int = 1 << 20) -> Page:
    page = log.page(max_changes, max_bytes)
    assert page is not None
    return page


def test_at_first_the_log_is_told_everything() -> None:
    log = ChangeLog(CAPACITY, 1 << 20)
    assert log.append(chunk_added(1)) == 1
    assert log.page(100, 1 << 20) is None
    log.start_over(lambda: [chunk_added(1), chunk_added(2)])
    assert page_of(log) == Page(2, [Cleared(STORE_OWNER), chunk_added(1), chunk_added(2)], reset=True)
    assert not log.complete
    log.acknowledge(4)
    assert log.complete


def test_a_store_that_holds_nothing_says_so() -> None:
    log = ChangeLog(CAPACITY, 1 << 20)
    log.start_over(lambda: [])
    assert page_of(log) == Page(1, [Cleared(STORE_OWNER)], reset=True), "an empty page would change nothing"


def test_what_a_failed_over_log_lost_is_sent_again_under_the_same_sequences() -> None:
    log = started()
    for number in range(5):
        log.append(chunk_added(number))
    log.acknowledge(6)
    assert page_of(log) == Page(7, [], reset=False)
    log.acknowledge(3)
    assert page_of(log) == Page(4, [chunk_added(number) for number in (2, 3, 4)], reset=False)


def test_what_it_lost_and_is_not_kept_asks_for_everything_under_fresh_sequences() -> None:
    log = started()
    for number in range(3 * CAPACITY):
        log.append(chunk_added(number))
        log.acknowledge(log.last)
    assert len(log) == CAPACITY
    log.acknowledge(2 * CAPACITY + 1)
    assert page_of(log).first == 2 * CAPACITY + 2, "as much is kept as its capacity"
    log.acknowledge(2)
    assert log.page(100, 1 << 20) is None
    log.start_over(lambda: [chunk_added(9)])
    assert page_of(log) == Page(3 * CAPACITY + 2, [Cleared(STORE_OWNER), chunk_added(9)], reset=True)


def test_a_checkpoint_that_was_lost_before_it_was_complete_starts_again() -> None:
    log = ChangeLog(CAPACITY, 1 << 20)
    log.start_over(lambda: [chunk_added(number) for number in range(30)])
    log.acknowledge(20)
    assert not page_of(log).reset
    log.acknowledge(0)
    assert (page_of(log).first, page_of(log).reset) == (1, True)


def test_more_than_was_ever_sent_is_somebody_elses() -> None:
    log = started()
    log.acknowledge(50)
    assert log.page(100, 1 << 20) is None
    log.start_over(lambda: [])
    assert page_of(log) == Page(51, [Cleared(STORE_OWNER)], reset=True)


def test_a_checkpoint_larger_than_the_capacity_is_sent_to_its_end_while_changes_go_on() -> None:
    log = ChangeLog(CAPACITY, 1 << 20)
    log.start_over(lambda: [chunk_added(number) for number in range(100)])
    for _ in range(5):
        log.acknowledge(page_of(log, 20).last)
        log.append(chunk_added(1000))
    log.acknowledge(page_of(log, 20).last)
    assert log.complete
    assert len(log) <= CAPACITY, "then it is as any other changes"


def test_memory_is_bounded_in_bytes() -> None:
    size = chunk_added(0).wire_bytes
    log = started(max_changes=1000, max_bytes=10 * size)
    for number in range(100):
        log.append(chunk_added(2 * number))
    assert len(log) == 10


def test_pages_are_bounded_in_bytes_but_never_empty_while_there_is_something() -> None:
    log = started()
    for number in range(5):
        log.append(chunk_added(2 * number))
    size = chunk_added(0).wire_bytes
    for limit, expected in ((1, 1), (2 * size, 2), (3 * size - 1, 2), (100 * size, 5)):
        assert len(page_of(log, 512, limit).changes) == expected


def test_a_clearing_that_the_log_has_not_heard_of_is_carried_over_to_the_next_checkpoint() -> None:
    log = started()
    cleared = Cleared(L2, tenant="t")
    log.append(cleared)
    for number in range(2 * CAPACITY):
        log.append(chunk_added(number))
    assert log.page(100, 1 << 20) is None
    log.start_over(lambda: [chunk_added(1, L2)])
    assert page_of(log).changes == [Cleared(STORE_OWNER), cleared, chunk_added(1, L2)]
    log.acknowledge(log.last)
    log.start_over(lambda: [])
    assert page_of(log).changes == [Cleared(STORE_OWNER)], "once is enough"


def test_a_late_report_does_not_remove_what_the_snapshot_has() -> None:
    """Only the log knows which came first; a claim too many is reported again, one too few is lost."""
    log = ChangeLog(CAPACITY, 1 << 20)

    def snapshot() -> list[Added]:
        log.append(chunk_removed(1, L2, seen=5))
        log.append(chunk_removed(2, L2))
        return [chunk_added(1, L2), chunk_added(2, L2)]

    log.start_over(snapshot)
    assert page_of(log).changes == [Cleared(STORE_OWNER), chunk_added(1, L2)]


def test_a_snapshot_that_fails_leaves_a_log_that_works() -> None:
    log = started()

    def fail() -> list[Added]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        log.start_over(fail)
    log.append(chunk_added(1))
    assert page_of(log) == Page(2, [chunk_added(1)], reset=False)


def test_appending_goes_on_while_a_snapshot_is_taken_under_the_catalogs_lock() -> None:
    """Whoever appends holds the catalog's lock, which the snapshot needs: neither may wait for the other."""
    log = ChangeLog(CAPACITY, 1 << 20)
    catalog = Catalog()
    catalog.append = log.append
    inside = threading.Event()

    def snapshot() -> list[Added]:
        inside.set()
        return catalog.snapshot()

    with catalog.lock:
        thread = threading.Thread(target=log.start_over, args=(snapshot,))
        thread.start()
        assert inside.wait(30)
        catalog.add(1)
        assert log.last == 1
    thread.join(30)
    assert not thread.is_alive()
    assert page_of(log).changes == [Cleared(STORE_OWNER), chunk_added(1)]


def test_runs_of_one_kind_travel_as_columns() -> None:
    changes: list[Change] = [chunk_added(1), chunk_added(4), chunk_added(2), chunk_added(2, L2)]
    changes += [chunk_removed(1), chunk_removed(2), chunk_removed(3, L2, seen=4), chunk_removed(3, L2, seen=5)]
    changes += [Cleared(L2), Cleared(L2)]
    kinds = [batch.WhichOneof("change") for batch in batches_of(changes)]
    assert kinds == ["added"] * 3 + ["removed"] * 3 + ["cleared"] * 2
    assert isinstance(changes[4], Removed)
    first = batches_of(changes)[0].added
    assert (first.document, first.tenant, first.chunk_tokens, first.matchable) == ("d1", "t", 16, True)
    assert len(first.chain_hashes) == len(first.previous_hashes) == 64
    assert first.tokens == chunk_added(1).info.tokens + chunk_added(4).info.tokens
