"""One replica of the table: follows the log, appends to it, writes its snapshots and loads them."""

import itertools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError
from services.common.logs import get_logger
from services.common.metrics import counter, gauge
from services.matcher.fold import Fold
from services.matcher.log.base import Log, LogGap, Page, Position
from services.matcher.pages import decode_page
from services.matcher.snapshot import parts_of, restore

_log = get_logger("replica")

LAG = gauge("kvblend_matcher_lag_records", "Records in the log that this replica has not applied.")
AGE = gauge("kvblend_matcher_log_age_seconds", "Since this replica last heard from the log.")
APPLIED = counter("kvblend_matcher_records_applied", "Records of the log that this replica has applied.")
RELOADS = counter("kvblend_matcher_reloads", "Times that the table was loaded from a snapshot.", ("why",))
SNAPSHOTS = counter("kvblend_matcher_snapshots", "Snapshots written, by outcome.", ("outcome",))

CHUNKS = gauge("kvblend_matcher_chunks", "Entries in the table.")
BYTES = gauge("kvblend_matcher_table_bytes", "Bytes of the table.")
EVICTED = gauge("kvblend_matcher_evicted", "Entries that this replica dropped to stay below its memory limit.")

_READ_BYTES = 8 << 20
_WAIT_SECONDS = 0.5
_CALL_SECONDS = 5.0
_PART_SECONDS = 10.0
_FIRST_BACKOFF = 0.05
_LAST_BACKOFF = 1.0
# How often the log is asked where it ends, and whether a snapshot is due.
_LOOK_SECONDS = 1.0
_SNAPSHOT_LOOK_SECONDS = 5.0
_JOIN_SECONDS = 15.0


class Replica:
    """Thread-safe. `fold` is replaced as a whole when a snapshot is loaded; readers take it once."""

    def __init__(
        self, log: Log, make_fold: Callable[[], Fold], snapshot_bytes: int, on_ready: Callable[[], None]
    ) -> None:
        """`snapshot_bytes`: records behind the last snapshot that make another one due.

        `on_ready`: called once, when everything that the log held at the start has been applied.
        """
        self.log = log
        self.fold = make_fold()
        self._make_fold = make_fold
        self._snapshot_bytes = snapshot_bytes
        self._on_ready = on_ready
        self._applied = threading.Condition()
        self._stopping = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="follow-log", daemon=True)
        self._writer: threading.Thread | None = None
        self.ready = False
        self.error = "not heard from yet"
        self.end = 0
        self.snapshot_position = 0
        self._heard_at = float("-inf")
        self._looked_at = self._snapshot_looked_at = float("-inf")

    def start(self) -> None:
        self._follower.start()

    def close(self) -> None:
        self._stopping.set()
        for thread in (self._follower, self._writer):
            if thread is not None and thread.ident is not None:
                thread.join(_JOIN_SECONDS)
        self.log.close()

    # Publishing and waiting.

    def publish(self, request: matcher_pb2.PublishRequest, timeout: float) -> matcher_pb2.PublishResponse:
        """Appends a page to the log; it is durable when this returns, and applied soon.

        Raises KvblendError INVALID_ARGUMENT, STALE_EPOCH, LOG_UNAVAILABLE.
        """
        count = sum(map(len, decode_page(request)))
        if count:
            data = request.SerializeToString()
            page = Page(request.store, request.epoch, request.first_sequence, count, request.reset, data)
            appended = self.log.append(page, timeout)
        else:
            appended = self.log.tail(request.store, request.epoch, timeout)
        return matcher_pb2.PublishResponse(durable_sequence=appended.durable, log_position=appended.end.number)

    def wait_applied(self, positions: Sequence[pb.StreamPosition], timeout: float) -> None:
        """Raises KvblendError NOT_CAUGHT_UP if a position has not been applied in time."""
        if all(map(self.fold.has_applied, positions)):
            return
        with self._applied:
            if not self._applied.wait_for(lambda: all(map(self.fold.has_applied, positions)), timeout):
                raise KvblendError("NOT_CAUGHT_UP", "this matcher has not yet applied the position asked for")

    @property
    def age(self) -> float:
        """Seconds since the log was last heard from; at most a day if it never was."""
        return min(86_400.0, time.monotonic() - self._heard_at)

    def state(self) -> matcher_pb2.LogState:
        return matcher_pb2.LogState(
            kind=self.log.kind,
            applied_position=self.fold.position.number,
            end_position=max(self.end, self.fold.position.number),
            age_ms=int(1000 * self.age),
            snapshot_position=self.snapshot_position,
            error=self.error,
        )

    # Following.

    def _follow(self) -> None:
        backoff = _FIRST_BACKOFF
        while not self._stopping.is_set():
            try:
                self._step()
                backoff = _FIRST_BACKOFF
                continue
            except LogGap as gap:
                _log.warning("the log goes on elsewhere, loading a snapshot", why=str(gap))
                self._attempt(self._reload, str(gap))
            except KvblendError as error:
                self._failed(error)
            except Exception as error:
                self._failed(error)
                _log.error("following the log failed", exc_info=error)
            AGE.set(self.age)
            self._stopping.wait(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF)

    def _attempt(self, reload: Callable[[str], None], why: str) -> None:
        try:
            reload(why)
        except (KvblendError, LogGap) as error:
            self._failed(error)
        except Exception as error:
            # A snapshot that says nonsense, no memory: the old table goes on answering.
            self._failed(error)
            _log.error("loading a snapshot failed", exc_info=error)

    def _failed(self, error: Exception) -> None:
        if str(error) != self.error:
            _log.warning("the log cannot be read", why=str(error))
        self.error = str(error)

    def _step(self) -> None:
        """Applies what is new, or waits for it a while."""
        busy = self.fold.table.sweep() or not self.ready
        records = self.log.read(self.fold.position, _READ_BYTES, 0.0 if busy else _WAIT_SECONDS, _CALL_SECONDS)
        for record in records:
            self.fold.apply(record.data, record.position)
            APPLIED.inc()
            with self._applied:
                self._applied.notify_all()
        # Not before: what cannot be applied does not make the table any younger.
        self._heard()
        self._look(behind=bool(records))

    def _heard(self) -> None:
        if self.error:
            _log.info("following the log", position=self.fold.position.number)
        self.error = ""
        self._heard_at = time.monotonic()
        AGE.set(0)

    def _look(self, behind: bool) -> None:
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS or not (behind or self.ready):
            self._looked_at = now
            self.end = self.log.end(_CALL_SECONDS).number
            CHUNKS.set(self.fold.table.chunks)
            BYTES.set(self.fold.table.size)
            EVICTED.set(self.fold.table.evicted)
        LAG.set(max(0, self.end - self.fold.position.number))
        if not self.ready and self.fold.position.number >= self.end:
            self.ready = True
            self._on_ready()
        if now - self._snapshot_looked_at >= _SNAPSHOT_LOOK_SECONDS and self.ready:
            self._snapshot_looked_at = now
            self._snapshot_if_due()

    # Snapshots.

    def _reload(self, why: str) -> None:
        """A new fold from the latest snapshot, or from the log's beginning; the old one answers until it is there."""
        info = self.log.snapshot(_CALL_SECONDS)
        fold = self._make_fold()
        if info is not None:
            fold = restore(self.log.read_snapshot(info, _PART_SECONDS), info.position, fold.table)
        self.snapshot_position = info.position.number if info else 0
        RELOADS.labels("start" if not self.ready else "gap").inc()
        _log.info("loaded", position=fold.position.number, chunks=fold.table.chunks, why=why)
        self._catch_up(fold)
        with self._applied:
            self.fold = fold
            self._applied.notify_all()

    def _catch_up(self, fold: Fold) -> None:
        """So that what is known already is not forgotten for a moment."""
        end = self.log.end(_CALL_SECONDS).number
        while fold.position.number < end and not self._stopping.is_set():
            records = self.log.read(fold.position, _READ_BYTES, 0.0, _CALL_SECONDS)
            if not records:
                # The log has lost its end meanwhile.
                return
            for record in records:
                fold.apply(record.data, record.position)

    def _snapshot_if_due(self) -> None:
        if self._writer is not None and self._writer.is_alive():
            return
        # What is behind it may not be applied here yet.
        if self.fold.position.number <= self.snapshot_position:
            return
        if self.log.size_behind_snapshot(_CALL_SECONDS) < self._due_at():
            return
        # Taken here, between two records, by the thread that applies them.
        position = self.fold.position
        parts = parts_of(self.fold, self.fold.applied())
        first = next(parts)
        self._writer = threading.Thread(
            target=self._write_snapshot, args=(self.fold, position, first, parts), name="snapshot", daemon=True
        )
        self._writer.start()

    def _due_at(self) -> int:
        """Half of the table's size at least: so what is written for snapshots stays within a few times what is new."""
        return max(self._snapshot_bytes, self.fold.table.size // 2)

    def _write_snapshot(
        self, fold: Fold, position: Position, first: bytes, parts: Generator[bytes, None, None]
    ) -> None:
        try:
            with closing(parts):
                written = self.log.save_snapshot(position, itertools.chain([first], parts), _PART_SECONDS)
        except Exception as error:
            SNAPSHOTS.labels("failed").inc()
            _log.warning("no snapshot was written", why=str(error))
            return
        SNAPSHOTS.labels("written" if written else "left to another replica").inc()
        if written:
            self.snapshot_position = position.number
            _log.info("wrote a snapshot", position=position.number, chunks=fold.table.chunks)
