"""Logs that are each wrong in one way; the suite must notice every one of them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from services.common.errors import KvblendError
from services.matcher.log.base import START, Appended, LogGap, Page, Position, Record, SnapshotInfo
from services.matcher.log.memory import MemoryLog
from services.matcher.log.rules import Head


class TakesGaps(MemoryLog):
    def append(self, page: Page, timeout: float) -> Appended:
        return super().append(replace(page, reset=True), timeout)


class AppendsRepeats(MemoryLog):
    def append(self, page: Page, timeout: float) -> Appended:
        head = self._heads.get(page.store)
        if head is not None and head.epoch == page.epoch and page.last == head.sequence:
            self._heads[page.store] = Head(page.epoch, page.first - 1)
        return super().append(page, timeout)


class ForgetsEpochs(MemoryLog):
    def append(self, page: Page, timeout: float) -> Appended:
        head = self._heads.get(page.store)
        if head is not None and head.epoch > page.epoch:
            del self._heads[page.store]
        return super().append(page, timeout)


class RefusesResets(MemoryLog):
    def append(self, page: Page, timeout: float) -> Appended:
        return super().append(replace(page, reset=False), timeout)


class KeepsTheOldEpochsSequence(MemoryLog):
    def tail(self, store: str, epoch: int, timeout: float) -> Appended:
        appended = super().tail(store, epoch, timeout)
        head = self._heads.get(store)
        return replace(appended, durable=head.sequence if head else 0)


class LosesTheLast(MemoryLog):
    """Acknowledges every fifth record without keeping it."""

    def append(self, page: Page, timeout: float) -> Appended:
        appended = super().append(page, timeout)
        if appended.end.number % 5 == 4 and self._records and self._records[-1].data == page.data:
            self._records.pop()
        return appended


class BelievesEveryPosition(MemoryLog):
    def read(self, after: Position, max_bytes: int, wait: float, timeout: float) -> list[Record]:
        known = [self._trimmed, *(record.position for record in self._records)]
        same = [position for position in known if position.number == after.number]
        return super().read(same[0] if same else after, max_bytes, wait, timeout)


class SkipsWhatIsTrimmed(MemoryLog):
    def read(self, after: Position, max_bytes: int, wait: float, timeout: float) -> list[Record]:
        return super().read(max(after, self._trimmed), max_bytes, wait, timeout)


class TrimsOneMore(MemoryLog):
    def save_snapshot(self, position: Position, parts: Iterable[bytes], timeout: float) -> bool:
        saved = super().save_snapshot(position, parts, timeout)
        if saved and self._records:
            self._trimmed = self._records.pop(0).position
        return saved


class SavesSnapshotsOfOtherLogs(MemoryLog):
    def save_snapshot(self, position: Position, parts: Iterable[bytes], timeout: float) -> bool:
        try:
            return super().save_snapshot(position, parts, timeout)
        except LogGap:
            return False


class GoesBackToOlderSnapshots(MemoryLog):
    def save_snapshot(self, position: Position, parts: Iterable[bytes], timeout: float) -> bool:
        kept = list(parts)
        if super().save_snapshot(position, kept, timeout):
            return True
        self._snapshot = SnapshotInfo(position, len(kept)), kept
        return True


class MixesParts(MemoryLog):
    def read_snapshot(self, info: SnapshotInfo, timeout: float) -> Iterator[bytes]:
        return iter(sorted(super().read_snapshot(info, timeout)))


class CountsWhatIsTrimmed(MemoryLog):
    def __init__(self) -> None:
        super().__init__()
        self._size = 0

    def append(self, page: Page, timeout: float) -> Appended:
        before = self.end(timeout)
        appended = super().append(page, timeout)
        self._size += len(page.data) if appended.end != before else 0
        return appended

    def size_behind_snapshot(self, timeout: float) -> int:
        return self._size


class HidesStaleWriters(MemoryLog):
    def append(self, page: Page, timeout: float) -> Appended:
        try:
            return super().append(page, timeout)
        except KvblendError:
            return Appended(page.last, self.end(timeout))


class StartsAnew(MemoryLog):
    """Numbers from 1 again behind a snapshot of everything."""

    def save_snapshot(self, position: Position, parts: Iterable[bytes], timeout: float) -> bool:
        saved = super().save_snapshot(position, parts, timeout)
        if saved and not self._records:
            self._trimmed = START
        return saved


BROKEN = (
    TakesGaps,
    AppendsRepeats,
    ForgetsEpochs,
    RefusesResets,
    KeepsTheOldEpochsSequence,
    LosesTheLast,
    BelievesEveryPosition,
    SkipsWhatIsTrimmed,
    TrimsOneMore,
    SavesSnapshotsOfOtherLogs,
    GoesBackToOlderSnapshots,
    MixesParts,
    CountsWhatIsTrimmed,
    HidesStaleWriters,
    StartsAnew,
)
