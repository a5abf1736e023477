"""The log in one SQLite file, for one replica."""

# The contract's signatures; not everything in them matters to every kind.
# ruff: noqa: ARG002

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from services.matcher.log.base import Appended, Page, Position, Record, SnapshotInfo, chain_behind, digest_of
from services.matcher.log.rules import Head, chained, check_position, durable_at, follows, unavailable
from services.matcher.log.sqlite_file import SqliteFile
from services.matcher.log.sqlite_snapshots import SqliteSnapshots


class SqliteLog:
    """See `Log`. Space of trimmed records is used again; the file keeps the size that it once had.

    Raises ValueError for a path that cannot be used, with one line that says why.
    """

    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path)
        self._snapshots = SqliteSnapshots(self._file)
        self._changed = threading.Condition()
        with self._file.reading() as db:
            self._last = _end(db).number
        self._closed = False

    def check(self, timeout: float) -> None:
        """Always fit for use: what is wrong with a file shows when it is opened."""

    def append(self, page: Page, timeout: float) -> Appended:
        digest = digest_of(page.data)
        with self._file.writing(timeout) as db:
            durable, end = durable_at(_head(db, page.store), page.store, page.epoch), _end(db)
            if not follows(page, durable):
                return Appended(durable, end)
            end = Position(end.number + 1, chain_behind(end.chain, digest))
            db.execute(
                "UPDATE log_end SET number = ?, chain = ?, total = total + ?", (end.number, end.chain, len(page.data))
            )
            db.execute("INSERT INTO records SELECT number, chain, total, ? FROM log_end", (page.data,))
            db.execute("REPLACE INTO heads VALUES (?, ?, ?)", (page.store, str(page.epoch), str(page.last)))
        with self._changed:
            self._last = max(self._last, end.number)
            self._changed.notify_all()
        return Appended(page.last, end)

    def tail(self, store: str, epoch: int, timeout: float) -> Appended:
        with self._file.reading() as db:
            return Appended(durable_at(_head(db, store), store, epoch), _end(db))

    def read(self, after: Position, max_bytes: int, wait: float, timeout: float) -> list[Record]:
        give_up_at = time.monotonic() + min(wait, timeout)
        found = self._records_behind(after, max_bytes)
        if found:
            return found
        with self._changed:
            left = give_up_at - time.monotonic()
            if not self._changed.wait_for(lambda: self._last > after.number or self._closed, max(0.0, left)):
                return []
            if self._closed:
                raise unavailable("the log is closed")
        return self._records_behind(after, max_bytes)

    def _records_behind(self, after: Position, max_bytes: int) -> list[Record]:
        with self._file.reading() as db:
            check_position(after, _end(db), self._snapshots.trimmed(db))
            rows = db.execute(
                "SELECT number, chain, data FROM records WHERE number > ? ORDER BY number", (after.number,)
            )
            return chained(after, rows, max_bytes)

    def end(self, timeout: float) -> Position:
        with self._file.reading() as db:
            return _end(db)

    def save_snapshot(self, position: Position, parts: Iterable[bytes], timeout: float) -> bool:
        return self._snapshots.save(position, parts, timeout)

    def snapshot(self, timeout: float) -> SnapshotInfo | None:
        return self._snapshots.latest()

    def read_snapshot(self, info: SnapshotInfo, timeout: float) -> Iterator[bytes]:
        return self._snapshots.read(info)

    def size_behind_snapshot(self, timeout: float) -> int:
        with self._file.reading() as db:
            (size,) = db.execute("SELECT total - coalesce((SELECT total FROM snapshot), 0) FROM log_end").fetchone()
        return int(size)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._file.close()


def _head(db: sqlite3.Connection, store: str) -> Head | None:
    row = db.execute("SELECT epoch, sequence FROM heads WHERE store = ?", (store,)).fetchone()
    return Head(int(row[0]), int(row[1])) if row else None


def _end(db: sqlite3.Connection) -> Position:
    return Position(*db.execute("SELECT number, chain FROM log_end").fetchone())
