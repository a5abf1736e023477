"""The change log: gapless pages, exact checkpoints under races, bounded memory."""

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matcher_model import STORE, Catalog, Table, chunk_added, chunk_removed

from kvblend.v1 import matcher_pb2
from services.store.change_log import ChangeLog, Key, Reader, key_of
from services.store.publisher import _as_event

CAPACITY = 8
KEYS = 6
PAGE = 3

# (added or removed, key, version)
Changes = list[tuple[bool, int, int]]
some_changes = st.lists(st.tuples(st.booleans(), st.integers(0, KEYS - 1), st.integers(0, 3)), max_size=6)
which = st.integers(0, 1)
histories = st.lists(
    st.one_of(
        st.tuples(st.just("change"), some_changes),
        st.tuples(st.just("read"), which, st.booleans()),
        # What else happens before and after the catalog is read, while a snapshot is taken.
        st.tuples(st.just("lose"), which, some_changes, some_changes),
    ),
    max_size=30,
)


class Matcher:
    """A reader of the log that starts over when it must, and the table it has made of what it read."""

    def __init__(self, log: ChangeLog, catalog: Catalog) -> None:
        self._log = log
        self._catalog = catalog
        self._reset = False
        self.reader = log.new_reader()
        self.table = Table()

    def read(self, acknowledge: bool = True, before: Changes | None = None, after: Changes | None = None) -> None:
        if self.reader.next is None:
            self._log.start_over(self.reader, lambda: self._snapshot(before or [], after or []))
            self._reset = True
        page = self._log.page(self.reader, PAGE, 1 << 20, 0)
        assert page is not None
        events = [_as_event(change) for change in page.changes]
        response = self.table.publish(
            matcher_pb2.PublishRequest(store="s", epoch=1, first_sequence=page.first, events=events, reset=self._reset)
        )
        assert not response.needs_reset
        assert response.applied_sequence == page.last
        if acknowledge:
            self._reset = False
            self._log.acknowledge(self.reader, page.last)

    def _snapshot(self, before: Changes, after: Changes) -> list[matcher_pb2.ChunkAdded]:
        make(self._catalog, before)
        taken = self._catalog.snapshot()
        make(self._catalog, after)
        return taken

    def lose(self) -> None:
        self._log.drop(self.reader)
        self.table = Table()

    def has_more(self) -> bool:
        return self._reset or self.reader.next is None or self.reader.next <= self._log.last

    @property
    def held(self) -> dict[Key, matcher_pb2.ChunkAdded]:
        return {key: added for (_, key), (_, added) in self.table.entries.items()}


def make(catalog: Catalog, changes: Changes) -> None:
    for is_add, number, version in changes:
        if is_add:
            catalog.add(number, STORE, version)
        else:
            catalog.remove(number)


@settings(max_examples=300, deadline=None)
@given(histories)
def test_whatever_happens_every_reader_ends_with_what_the_catalog_holds(history: list[Any]) -> None:
    log = ChangeLog(CAPACITY)
    catalog = Catalog()
    catalog.added, catalog.removed = log.append, log.append
    matchers = [Matcher(log, catalog), Matcher(log, catalog)]
    for kind, *arguments in history:
        if kind == "change":
            make(catalog, *arguments)
        elif kind == "read":
            matchers[arguments[0]].read(acknowledge=arguments[1])
        else:
            matchers[arguments[0]].lose()
            matchers[arguments[0]].read(True, *arguments[1:])
        assert len(log) <= CAPACITY + KEYS, "at most the capacity and one checkpoint"
    for _ in range(20 * (CAPACITY + KEYS)):
        for matcher in matchers:
            if matcher.has_more():
                matcher.read()
    assert not any(matcher.has_more() for matcher in matchers), "reading comes to an end"
    assert [matcher.held for matcher in matchers] == [catalog.held, catalog.held]
    assert len(log) == 0, "what everybody has is forgotten"


def start_over(log: ChangeLog, reader: Reader, held: list[matcher_pb2.ChunkAdded]) -> int:
    return log.start_over(reader, lambda: held)


def test_the_first_sequence_is_one_and_none_is_used_twice() -> None:
    log = ChangeLog(CAPACITY)
    assert log.append(chunk_added(1)) == 1
    reader = log.new_reader()
    assert start_over(log, reader, [chunk_added(1), chunk_added(2)]) == 4
    assert log.append(chunk_added(3)) == 4
    page = log.page(reader, 10, 1 << 20, 0)
    assert page is not None
    assert (page.first, page.last) == (2, 4)


def test_without_readers_nothing_is_kept() -> None:
    log = ChangeLog(CAPACITY)
    for number in range(100):
        log.append(chunk_added(number))
    assert len(log) == 0
    assert log.last == 100


def test_a_checkpoint_larger_than_the_capacity_is_read_to_its_end_while_changes_go_on() -> None:
    log = ChangeLog(CAPACITY)
    reader = log.new_reader()
    held = [chunk_added(number) for number in range(100)]
    behind = start_over(log, reader, held)
    for _ in range(5):
        page = log.page(reader, 20, 1 << 20, 0)
        assert page is not None, "never thrown out"
        log.acknowledge(reader, page.last)
        log.append(chunk_added(1000))
    assert reader.next == behind


def test_a_slow_reader_must_start_over_and_the_fast_one_need_not() -> None:
    log = ChangeLog(CAPACITY)
    slow, fast = log.new_reader(), log.new_reader()
    for reader in (slow, fast):
        start_over(log, reader, [])
    for number in range(CAPACITY + 1):
        log.append(chunk_added(number))
        page = log.page(fast, 10, 1 << 20, 0)
        assert page is not None
        log.acknowledge(fast, page.last)
    assert log.page(slow, 10, 1 << 20, 0) is None
    assert fast.next == log.last + 1


def test_readers_that_start_over_together_share_one_checkpoint() -> None:
    log = ChangeLog(CAPACITY)
    taken = []

    def snapshot() -> list[matcher_pb2.ChunkAdded]:
        taken.append(1)
        return [chunk_added(1), chunk_added(2)]

    readers = [log.new_reader() for _ in range(3)]
    for reader in readers:
        log.start_over(reader, snapshot)
    assert len(taken) == 1
    assert len({reader.next for reader in readers}) == 1


def test_a_late_report_does_not_remove_what_was_added_again_during_the_snapshot() -> None:
    log = ChangeLog(CAPACITY)
    seen = log.append(chunk_added(1))
    reader = log.new_reader()

    def snapshot() -> list[matcher_pb2.ChunkAdded]:
        log.append(chunk_added(1, version=2))
        log.append(chunk_removed(1, seen=seen))
        return []

    log.start_over(reader, snapshot)
    page = log.page(reader, 10, 1 << 20, 0)
    assert page is not None
    assert [key_of(change) for change in page.changes] == [key_of(chunk_added(1))]


def test_pages_are_bounded_in_bytes_but_never_empty_while_there_is_something() -> None:
    log = ChangeLog(CAPACITY)
    reader = log.new_reader()
    start_over(log, reader, [chunk_added(number) for number in range(5)])
    size = chunk_added(0).ByteSize()
    for limit, expected in ((1, 1), (2 * size, 2), (3 * size - 1, 2), (100 * size, 5)):
        page = log.page(reader, 512, limit, 0)
        assert page is not None
        assert len(page.changes) == expected


def test_a_snapshot_that_fails_leaves_a_log_that_works() -> None:
    log = ChangeLog(CAPACITY)
    reader = log.new_reader()

    def fail() -> list[matcher_pb2.ChunkAdded]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        log.start_over(reader, fail)
    log.append(chunk_added(1))
    start_over(log, reader, [chunk_added(1)])
    page = log.page(reader, 10, 1 << 20, 0)
    assert page is not None
    assert len(page.changes) == 1


def test_appending_goes_on_while_a_snapshot_is_taken_under_the_catalogs_lock() -> None:
    """Whoever appends holds the catalog's lock, which the snapshot needs: neither may wait for the other."""
    log = ChangeLog(CAPACITY)
    catalog = Catalog()
    catalog.added = catalog.removed = log.append  # type: ignore[assignment]
    reader = log.new_reader()
    inside = threading.Event()

    def snapshot() -> list[matcher_pb2.ChunkAdded]:
        inside.set()
        return catalog.snapshot()

    with catalog.lock:
        thread = threading.Thread(target=log.start_over, args=(reader, snapshot))
        thread.start()
        assert inside.wait(30)
        catalog.add(1)
        assert log.last == 1
    thread.join(30)
    assert not thread.is_alive()
    page = log.page(reader, 10, 1 << 20, 0)
    assert page is not None
    assert len(page.changes) == 1
