"""What the tests of the matcher's log share: pages, drained logs, and the obvious model of a log."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import KvblendError
from services.matcher.log.base import START, Appended, Log, LogGap, Page, Position, Record, SnapshotInfo, chain_of

# Of one call: generous, as machines are slow at times; nothing here should need it.
SECONDS = 20.0
MANY_BYTES = 64 << 20
EPOCH = 1_790_000_000_000

OpenLog = Callable[[str, str], Log]


def page(
    store: str = "a", first: int = 1, count: int = 1, epoch: int = EPOCH, reset: bool = False, data: bytes | None = None
) -> Page:
    """One whose bytes tell which it is."""
    if data is None:
        data = f"{store}/{epoch}/{first}+{count}/{reset}".encode()
    return Page(store, epoch, first, count, reset, data)


def append_all(log: Log, *pages: Page) -> Position:
    """Every page must follow."""
    end = START
    for item in pages:
        appended = log.append(item, SECONDS)
        assert appended.durable == item.last
        end = appended.end
    return end


def drain(log: Log, after: Position = START, max_bytes: int = MANY_BYTES) -> list[Record]:
    records: list[Record] = []
    while found := log.read(after, max_bytes, 0, SECONDS):
        records += found
        after = found[-1].position
    return records


def reason_of(call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except KvblendError as error:
        return error.reason
    return ""


@dataclass
class LogModel:
    """A log as a list of every page ever appended; whatever is asked is found by looking through it."""

    pages: list[Page] = field(default_factory=list)
    snapshot_position: Position = START
    snapshot_parts: list[bytes] | None = None

    def epoch_of(self, store: str) -> int:
        return max((old.epoch for old in self.pages if old.store == store), default=0)

    def durable(self, store: str, epoch: int) -> int:
        return max((old.last for old in self.pages if (old.store, old.epoch) == (store, epoch)), default=0)

    def position(self, number: int) -> Position:
        chain = START.chain
        for old in self.pages[:number]:
            chain = chain_of(chain, old.data)
        return Position(number, chain)

    def end(self) -> Position:
        return self.position(len(self.pages))

    def append(self, new: Page) -> Appended | None:
        """None for a stale epoch."""
        if new.epoch < self.epoch_of(new.store):
            return None
        durable = self.durable(new.store, new.epoch)
        if new.count and (new.first == durable + 1 or (new.reset and new.first > durable)):
            self.pages.append(new)
            durable = new.last
        return Appended(durable, self.end())

    def read(self, after: Position) -> list[Record] | None:
        """None for a gap."""
        if after.number > len(self.pages) or after != self.position(after.number):
            return None
        if after.number < self.snapshot_position.number:
            return None
        return [
            Record(self.position(number), self.pages[number - 1].data)
            for number in range(after.number + 1, len(self.pages) + 1)
        ]

    def save_snapshot(self, position: Position, parts: list[bytes]) -> bool | None:
        """None for a gap."""
        if position.number < self.snapshot_position.number:
            return False
        if position.number > len(self.pages) or position != self.position(position.number):
            return None
        self.snapshot_position, self.snapshot_parts = position, parts
        return True

    def snapshot(self) -> SnapshotInfo | None:
        if self.snapshot_parts is None:
            return None
        return SnapshotInfo(self.snapshot_position, len(self.snapshot_parts))

    def size_behind_snapshot(self) -> int:
        return sum(len(old.data) for old in self.pages[self.snapshot_position.number :])


def foreign(position: Position) -> Position:
    """The same number in another log."""
    return position._replace(chain=bytes(255 - byte for byte in position.chain))


def is_gap(call: Any, *arguments: Any) -> bool:
    try:
        call(*arguments)
    except LogGap:
        return True
    return False
