"""Snapshots in the SQLite file: parts under an id of their own, and one row that makes them the log's snapshot.

The switch is one transaction. Everything else (parts, old parts, trimmed records) goes in slices, each a short
transaction of its own, so that appends get in between; a process killed on the way leaves rows that no snapshot
speaks of, which the next one removes.
"""

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator

from services.matcher.log.base import START, LogGap, Position, SnapshotInfo
from services.matcher.log.rules import check_part_size, checksum_of, unavailable
from services.matcher.log.sqlite_file import SqliteFile

_SLICE_BYTES = 8 << 20
_SLICE_RECORDS = 1024
_SLICE_PARTS = 2
# A lock is not fair: without a pause between slices appends would hardly get it.
_PAUSE = 0.001

_NEXT_SLICE = """
SELECT max(number) FROM (SELECT number, total FROM records WHERE number <= ? ORDER BY number LIMIT ?)
WHERE total <= (SELECT total FROM records ORDER BY number LIMIT 1) + ?
"""


class SqliteSnapshots:
    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._saving = threading.Lock()

    def trimmed(self, db: sqlite3.Connection) -> int:
        """Records up to this number are gone, or about to go."""
        row = db.execute("SELECT number FROM snapshot").fetchone()
        return int(row[0]) if row else 0

    def latest(self) -> SnapshotInfo | None:
        with self._file.reading() as db:
            row = db.execute("SELECT number, chain, parts FROM snapshot").fetchone()
        return SnapshotInfo(Position(row[0], row[1]), row[2]) if row else None

    def read(self, info: SnapshotInfo) -> Iterator[bytes]:
        with self._file.reading() as db:
            row = db.execute(
                "SELECT id FROM snapshot WHERE number = ? AND chain = ? AND parts = ?", (*info.position, info.parts)
            ).fetchone()
        if row is None:
            raise LogGap("that snapshot has been replaced")
        return (self._part(row[0], part) for part in range(info.parts))

    def _part(self, identity: int, part: int) -> bytes:
        with self._file.reading() as db:
            row = db.execute(
                "SELECT checksum, data FROM parts WHERE snapshot = ? AND part = ?", (identity, part)
            ).fetchone()
        if row is None:
            raise LogGap(f"part {part} of the snapshot is missing")
        checksum, data = row
        if checksum_of(data) != checksum:
            raise LogGap(f"part {part} of the snapshot is damaged")
        return bytes(data)

    def save(self, position: Position, parts: Iterable[bytes], timeout: float) -> bool:
        if not self._saving.acquire(blocking=False):
            return False
        try:
            latest = self.latest()
            if latest is not None and latest.position.number > position.number:
                return False
            self._remove_leftovers(timeout)
            try:
                with self._file.reading() as db:
                    (identity,) = db.execute("SELECT coalesce(max(id), 0) + 1 FROM snapshot").fetchone()
                count = self._write(identity, parts, timeout)
                self._switch(identity, position, count, timeout)
            finally:
                self._remove_leftovers(timeout)
            self._trim(position.number, timeout)
            return True
        finally:
            self._saving.release()

    def _write(self, identity: int, parts: Iterable[bytes], timeout: float) -> int:
        count = 0
        for part in parts:
            check_part_size(part)
            with self._file.writing(timeout) as db:
                db.execute("INSERT INTO parts VALUES (?, ?, ?, ?)", (identity, count, checksum_of(part), part))
            if self._part(identity, count) != part:
                raise unavailable(f"part {count} of the snapshot reads back differently")
            count += 1
        return count

    def _switch(self, identity: int, position: Position, parts: int, timeout: float) -> None:
        with self._file.writing(timeout) as db:
            row = db.execute(
                "SELECT chain, total FROM records WHERE number = ?1"
                " UNION SELECT chain, total FROM log_end WHERE number = ?1"
                " UNION SELECT chain, total FROM snapshot WHERE number = ?1",
                (position.number,),
            ).fetchone()
            chain, total = row or (None, 0)
            if chain != position.chain and position != START:
                raise LogGap(f"record {position.number} is not this log's")
            db.execute("DELETE FROM snapshot")
            db.execute("INSERT INTO snapshot VALUES (?, ?, ?, ?, ?)", (identity, *position, total, parts))

    def _remove_leftovers(self, timeout: float) -> None:
        """Parts of no snapshot: of the one before, or of one that was never finished."""
        while True:
            with self._file.writing(timeout) as db:
                gone = db.execute(
                    "DELETE FROM parts WHERE rowid IN (SELECT rowid FROM parts"
                    " WHERE snapshot NOT IN (SELECT id FROM snapshot) LIMIT ?)",
                    (_SLICE_PARTS,),
                ).rowcount
            if not gone:
                return
            time.sleep(_PAUSE)

    def _trim(self, number: int, timeout: float) -> None:
        while True:
            with self._file.writing(timeout) as db:
                (last,) = db.execute(_NEXT_SLICE, (number, _SLICE_RECORDS, _SLICE_BYTES)).fetchone()
                if last is None:
                    return
                db.execute("DELETE FROM records WHERE number <= ?", (last,))
            time.sleep(_PAUSE)
