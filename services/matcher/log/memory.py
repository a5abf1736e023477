"""A log in this process's memory: for tests, and for a matcher whose table may be gone when it is."""

# The contract's signatures; not everything in them matters to every kind.
# ruff: noqa: ARG002

import threading
from collections.abc import Iterable, Iterator

from services.matcher.log.base import START, Appended, LogGap, Page, Position, Record, SnapshotInfo, chain_of
from services.matcher.log.rules import Head, chained, check_part_size, check_position, durable_at, follows, unavailable


class MemoryLog:
    kind = "memory"

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saving = threading.Lock()
        self._heads: dict[str, Head] = {}
        # Those behind the snapshot; `_records[0]` has number `_trimmed + 1`.
        self._records: list[Record] = []
        self._trimmed = START
        self._snapshot: tuple[SnapshotInfo, list[bytes]] | None = None
        self._closed = False

    def check(self, timeout: float) -> None:
        """Always fit for use."""

    def append(self, page: Page, timeout: float) -> Appended:
        with self._changed:
            durable = self._durable(page.store, page.epoch)
            if follows(page, durable):
                end = self._end()
                position = Position(end.number + 1, chain_of(end.chain, page.data))
                self._records.append(Record(position, page.data))
                self._heads[page.store] = Head(page.epoch, page.last)
                durable = page.last
                self._changed.notify_all()
            return Appended(durable, self._end())

    def tail(self, store: str, epoch: int, timeout: float) -> Appended:
        with self._changed:
            return Appended(self._durable(store, epoch), self._end())

    def read(self, after: Position, max_bytes: int, wait: float, timeout: float) -> list[Record]:
        with self._changed:
            self._check_open()
            check_position(after, self._end(), self._trimmed.number)
            self._changed.wait_for(lambda: self._end() != after or self._closed, min(wait, timeout))
            # A snapshot may have been made meanwhile.
            check_position(after, self._end(), self._trimmed.number)
            found = self._records[after.number - self._trimmed.number :]
        return chained(after, ((*record.position, record.data) for record in found), max_bytes)

    def end(self, timeout: float) -> Position:
        with self._changed:
            self._check_open()
            return self._end()

    def save_snapshot(self, position: Position, parts: Iterable[bytes], timeout: float) -> bool:
        if not self._saving.acquire(blocking=False):
            return False
        try:
            kept = []
            for part in parts:
                check_part_size(part)
                kept.append(part)
            return self._switch(position, kept)
        finally:
            self._saving.release()

    def _switch(self, position: Position, parts: list[bytes]) -> bool:
        with self._changed:
            self._check_open()
            if position.number < self._trimmed.number:
                return False
            held = position.number - self._trimmed.number
            if position not in (self._trimmed, *(record.position for record in self._records[held - 1 : held])):
                raise LogGap(f"record {position.number} is not this log's")
            self._records = self._records[held:]
            self._trimmed = position
            self._snapshot = SnapshotInfo(position, len(parts)), parts
            return True

    def snapshot(self, timeout: float) -> SnapshotInfo | None:
        with self._changed:
            self._check_open()
            return self._snapshot[0] if self._snapshot else None

    def read_snapshot(self, info: SnapshotInfo, timeout: float) -> Iterator[bytes]:
        with self._changed:
            self._check_open()
            current = self._snapshot
        if current is None or current[0] != info:
            raise LogGap("that snapshot has been replaced")
        return iter(current[1])

    def size_behind_snapshot(self, timeout: float) -> int:
        with self._changed:
            self._check_open()
            return sum(len(record.data) for record in self._records)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _durable(self, store: str, epoch: int) -> int:
        self._check_open()
        return durable_at(self._heads.get(store), store, epoch)

    def _end(self) -> Position:
        return self._records[-1].position if self._records else self._trimmed

    def _check_open(self) -> None:
        if self._closed:
            raise unavailable("the log is closed")
