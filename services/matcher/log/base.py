"""The log of all stores' changes: one order, kept where every replica can read it.

A record is a page that one store published, as it came. Records are numbered from 1 without gaps and chained: each
chain value is a digest of the one before and of the record's own bytes. So a replica notices that a log lost its end
and grew another one (a failover), although numbers and keys look right.

The log checks, atomically with every append, that a page follows its store's last one; so each store's stream
is gapless in it, whichever replica took the page. A log holds **snapshots** too: what the fold over all records up to
a number is, in parts. Behind a verified snapshot records may be trimmed.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

CHAIN_BYTES = 20
START_CHAIN = bytes(CHAIN_BYTES)
# Of a snapshot: what every backend takes as one value.
PART_BYTES = 4 << 20


class Position(NamedTuple):
    """A record: its number, and the chain value behind it. (0, START_CHAIN): before all records."""

    number: int
    chain: bytes


START = Position(0, START_CHAIN)


@dataclass(frozen=True)
class Page:
    """What one store appends: changes [first, first + count) of its stream at `epoch`; `data` is the page as published.

    A page without changes (count 0) is never appended.
    """

    store: str
    epoch: int
    first: int
    count: int
    reset: bool
    data: bytes

    @property
    def last(self) -> int:
        return self.first + self.count - 1


@dataclass(frozen=True)
class Record:
    """A page in the log: `position.chain` is the value behind it."""

    position: Position
    data: bytes


@dataclass(frozen=True)
class Appended:
    """`durable`: last sequence that the log now holds of this store at this epoch (0: none).

    `end`: the log's last record.
    """

    durable: int
    end: Position


@dataclass(frozen=True)
class SnapshotInfo:
    """A complete snapshot: of the fold up to `position`, as `parts` parts."""

    position: Position
    parts: int


class LogGap(Exception):
    """What a reader asks for is not in this log (trimmed, or it is another log by now): it must load a snapshot, or
    where there is none start anew from `START`."""


def digest_of(data: bytes) -> bytes:
    return hashlib.sha1(data, usedforsecurity=False).digest()


def chain_behind(previous: bytes, digest: bytes) -> bytes:
    """Chain value behind a record with this digest: SHA-1 (what Redis scripts have) over the value before and it.

    Against accidents, not against people: whoever can write to the log can write whatever they like.
    """
    return hashlib.sha1(previous + digest, usedforsecurity=False).digest()


def chain_of(previous: bytes, data: bytes) -> bytes:
    return chain_behind(previous, digest_of(data))


class Log(Protocol):
    """Thread-safe. Every call ends within `timeout` seconds.

    Raises KvblendError LOG_UNAVAILABLE when the log cannot be reached or refuses (with the reason in words).
    """

    kind: str

    def check(self, timeout: float) -> None:
        """For the start of a service: may this log be used at all?

        Raises:
            ValueError: never, as it is set up; one line says why (a server that may evict records, is too old, ...).
            KvblendError: LOG_UNAVAILABLE, it cannot be told now.
        """
        ...

    def append(self, page: Page, timeout: float) -> Appended:
        """Appends the page if it follows; durable when this returns.

        It follows if it is the store's next page at the log's epoch of that store, or the first (sequence 1) of a newer
        epoch, or a `reset` whose first sequence lies behind what the log holds. A repeat changes nothing and is
        answered like the page that it repeats. A page that does not follow is not appended: `durable` tells where
        the stream stands. A page that only overlaps what is there is not appended either.

        Raises:
            KvblendError: STALE_EPOCH if the log has a newer epoch of this store.
        """
        ...

    def tail(self, store: str, epoch: int, timeout: float) -> Appended:
        """As an append without a page."""
        ...

    def read(self, after: Position, max_bytes: int, wait: float, timeout: float) -> list[Record]:
        """Records behind `after`, at least one if there is one, else none after waiting `wait` seconds for it (a little
        less where `timeout` is shorter). More than one only as far as `max_bytes` hold them.

        What it returns has been checked: numbers follow and chain values agree with the bytes.

        Raises:
            LogGap: the record at `after` is not this log's, or the next one has been trimmed (or damaged).
        """
        ...

    def end(self, timeout: float) -> Position:
        """The last record."""
        ...

    def save_snapshot(self, position: Position, parts: Iterable[bytes], timeout: float) -> bool:
        """Writes a snapshot (each part at most 4 MiB; `timeout` for each part), reads it back and compares, then makes
        it the log's one snapshot and trims the records up to it. Whatever fails on the way leaves the one before.

        Returns False, having changed nothing, if another replica is writing one or a later one is there.

        Raises:
            LogGap: the record at `position` is not this log's.
            ValueError: a part is too large.
        """
        ...

    def snapshot(self, timeout: float) -> SnapshotInfo | None:
        """The latest complete snapshot."""
        ...

    def read_snapshot(self, info: SnapshotInfo, timeout: float) -> Iterator[bytes]:
        """Its parts in order, each checked against its checksum; `timeout` is for each.

        Raises:
            LogGap: a part is missing or damaged, or the snapshot has been replaced meanwhile.
        """
        ...

    def size_behind_snapshot(self, timeout: float) -> int:
        """Bytes of the records behind the latest snapshot: when that is much, another one is due."""
        ...

    def close(self) -> None: ...
