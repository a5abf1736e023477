"""The file behind `SqliteLog`: its format, one process at a time, one writing connection, readers side by side."""

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from services.matcher.log.base import START
from services.matcher.log.rules import unavailable

# "kvbl": what `file` and sqlite3 tell of this file.
_APPLICATION = 0x6B76626C
_FORMAT = 1
# Records are hundreds of KiB: with small pages each would be a chain of hundreds of them.
_PAGE_BYTES = 16 << 10
# The writer who gets here copies the write-ahead log into the file and waits for the disk.
_CHECKPOINT_BYTES = 16 << 20

_SCHEMA = f"""
BEGIN;
CREATE TABLE records (
    number INTEGER PRIMARY KEY,
    chain BLOB NOT NULL,
    total INTEGER NOT NULL,  -- bytes of all records up to this one
    data BLOB NOT NULL
);
-- Positions in streams are 64 bits without a sign, which SQLite's integers are not.
CREATE TABLE heads (store TEXT PRIMARY KEY, epoch TEXT NOT NULL, sequence TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE log_end (number INTEGER NOT NULL, chain BLOB NOT NULL, total INTEGER NOT NULL);
INSERT INTO log_end VALUES (0, x'{START.chain.hex()}', 0);
-- At most one row: the complete snapshot. Parts of any other id are leftovers, or being written.
CREATE TABLE snapshot (
    id INTEGER NOT NULL, number INTEGER NOT NULL, chain BLOB NOT NULL, total INTEGER NOT NULL, parts INTEGER NOT NULL
);
CREATE TABLE parts (
    snapshot INTEGER NOT NULL, part INTEGER NOT NULL, checksum BLOB NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (snapshot, part)
);
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_FORMAT};
COMMIT;
"""


class SqliteFile:
    """Raises ValueError if the path cannot be used: another process has it, another format, not a file of ours."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        self._held = _hold(path)
        try:
            self._writer = self._open()
        except BaseException:
            self._held.close()
            raise

    def _open(self) -> sqlite3.Connection:
        try:
            # What is in it is people's text: for this user only. SQLite gives its other files the same mode.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            try:
                _prepare(connection, self._path)
                _tune(connection)
            except BaseException:
                connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"the log {self._path} cannot be opened: {error}") from None
        return connection

    @contextmanager
    def writing(self, timeout: float) -> Iterator[sqlite3.Connection]:
        """A transaction of the one writer: all of it, or after an exception nothing."""
        if not self._writing.acquire(timeout=max(0.0, timeout)):
            raise unavailable(f"the log {self._path} is busy")
        try:
            with self._lock:
                self._check_open()
            with self._transaction(self._writer, "BEGIN IMMEDIATE"):
                yield self._writer
        finally:
            self._writing.release()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One unchanging view of the log."""
        connection = self._reader()
        try:
            with self._transaction(connection, "BEGIN"):
                yield connection
        finally:
            with self._lock:
                if self._closed:
                    connection.close()
                else:
                    self._idle.append(connection)

    def _reader(self) -> sqlite3.Connection:
        with self._lock:
            self._check_open()
            if self._idle:
                return self._idle.pop()
        try:
            return sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise unavailable(f"the log {self._path} failed: {error}") from error

    @contextmanager
    def _transaction(self, connection: sqlite3.Connection, begin: str) -> Iterator[None]:
        try:
            connection.execute(begin)
            try:
                yield
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise unavailable(f"the log {self._path} failed: {error}") from error

    def close(self) -> None:
        with self._writing, self._lock:
            if self._closed:
                return
            self._closed = True
            for connection in (*self._idle, self._writer):
                connection.close()
            self._idle.clear()
            self._held.close()

    def _check_open(self) -> None:
        if self._closed:
            raise unavailable("the log is closed")


def _hold(path: Path) -> IO[bytes]:
    """A lock that the kernel drops when this process ends, however it does."""
    try:
        held = open(os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"the log {path} cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.close()
        raise ValueError(f"the log {path} is in use: a SQLite log is for one process, replicas need Redis") from None
    return held


def _tune(connection: sqlite3.Connection) -> None:
    # What it must survive is a killed process, and it does: commits are in the kernel's hands. After a power loss the
    # last ones may be missing (the file stays sound), but then the arenas in memory are gone as well, and a writer
    # that lives elsewhere sends again what the log lost.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_BYTES // _PAGE_BYTES}")
    connection.execute(f"PRAGMA journal_size_limit = {2 * _CHECKPOINT_BYTES}")


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not tables and not application and not version:
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_SCHEMA)
        return
    if application != _APPLICATION:
        raise ValueError(f"{path} is a SQLite file of something else, not a log of kvblend")
    if version != _FORMAT:
        raise ValueError(f"the log {path} has format {version}; this version of kvblend reads format {_FORMAT}")
    connection.execute("PRAGMA journal_mode = WAL")
