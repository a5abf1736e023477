"""A Hypothesis state machine that drives any log and the obvious model of one side by side."""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from log_kit import EPOCH, SECONDS, LogModel, drain, foreign, page, reason_of

from services.matcher.log.base import START, Appended, Log, LogGap, Page, Position, SnapshotInfo

_STORES = st.sampled_from("abc")
_COUNTS = st.integers(1, 4)
_PARTS = st.lists(st.binary(max_size=20), max_size=3)


class LogMachine(RuleBasedStateMachine):
    """A subclass says how to make an empty log."""

    make_log: Callable[[], Log]

    def __init__(self) -> None:
        super().__init__()
        self.log = type(self).make_log()
        self.model = LogModel()
        self.seen_snapshots: list[SnapshotInfo] = []

    def teardown(self) -> None:
        self.log.close()

    def append(self, new: Page) -> None:
        expected = self.model.append(new)
        if expected is None:
            assert reason_of(self.log.append, new, SECONDS) == "STALE_EPOCH"
        else:
            assert self.log.append(new, SECONDS) == expected

    @rule(store=_STORES, count=_COUNTS)
    def append_the_next(self, store: str, count: int) -> None:
        epoch = self.model.epoch_of(store) or EPOCH
        self.append(page(store, self.model.durable(store, epoch) + 1, count, epoch))

    @rule(data=st.data())
    @precondition(lambda self: self.model.pages)
    def append_again(self, data: st.DataObject) -> None:
        self.append(data.draw(st.sampled_from(self.model.pages)))

    @rule(store=_STORES, count=st.integers(0, 4), off=st.integers(-4, 4), reset=st.booleans())
    def append_near_the_end(self, store: str, count: int, off: int, reset: bool) -> None:
        epoch = self.model.epoch_of(store) or EPOCH
        first = max(1, self.model.durable(store, epoch) + 1 + off)
        self.append(page(store, first, count, epoch, reset))

    @rule(store=_STORES, step=st.sampled_from([-1, 1, 2]), first=st.integers(1, 2), reset=st.booleans())
    def append_at_another_epoch(self, store: str, step: int, first: int, reset: bool) -> None:
        self.append(page(store, first, 2, (self.model.epoch_of(store) or EPOCH) + step, reset))

    @rule(store=_STORES, step=st.integers(-1, 1))
    def ask_where_a_stream_stands(self, store: str, step: int) -> None:
        epoch = (self.model.epoch_of(store) or EPOCH) + step
        if epoch < self.model.epoch_of(store):
            assert reason_of(self.log.tail, store, epoch, SECONDS) == "STALE_EPOCH"
        else:
            expected = Appended(self.model.durable(store, epoch), self.model.end())
            assert self.log.tail(store, epoch, SECONDS) == expected

    def any_position(self, data: st.DataObject) -> Position:
        number = data.draw(st.integers(0, len(self.model.pages) + 1))
        position = self.model.position(number)
        return foreign(position) if data.draw(st.integers(0, 3)) == 0 else position

    @rule(data=st.data(), max_bytes=st.sampled_from([1, 60, 1 << 20]))
    def read_from_anywhere(self, data: st.DataObject, max_bytes: int) -> None:
        after = self.any_position(data)
        expected = self.model.read(after)
        try:
            found = self.log.read(after, max_bytes, 0, SECONDS)
        except LogGap:
            assert expected is None
            return
        assert expected is not None
        assert found == expected[: len(found)]
        assert len(found) > 0 or not expected
        assert len(found) <= 1 or sum(len(record.data) for record in found) <= max_bytes

    @rule(data=st.data(), parts=_PARTS)
    def save_a_snapshot(self, data: st.DataObject, parts: list[bytes]) -> None:
        position = self.any_position(data)
        before = self.model.snapshot()
        expected = self.model.save_snapshot(position, parts)
        try:
            assert self.log.save_snapshot(position, parts, SECONDS) == expected
        except LogGap:
            assert expected is None
        if expected and before is not None and before != self.model.snapshot():
            self.seen_snapshots.append(before)

    @rule()
    @precondition(lambda self: self.seen_snapshots)
    def read_a_replaced_snapshot(self) -> None:
        for info in self.seen_snapshots:
            if info == self.model.snapshot():
                continue
            try:
                list(self.log.read_snapshot(info, SECONDS))
            except LogGap:
                continue
            raise AssertionError("a snapshot that has been replaced was read")

    @invariant()
    def everything_agrees(self) -> None:
        assert self.log.end(SECONDS) == self.model.end()
        assert self.log.size_behind_snapshot(SECONDS) == self.model.size_behind_snapshot()
        start = self.model.snapshot_position
        assert drain(self.log, start) == self.model.read(start)
        info = self.model.snapshot()
        assert self.log.snapshot(SECONDS) == info
        if info is not None:
            assert list(self.log.read_snapshot(info, SECONDS)) == self.model.snapshot_parts
        assert start != START or info is None or info.position == START
