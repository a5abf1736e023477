"""Tells the log behind the matchers what the store holds: one gapless stream, one thread.

Pages are taken from the store's change log in order and sent to any matcher replica, which answers when the log
has them. A page without an answer is repeated; as no sequence is ever used twice, one that is carried out late is a
repeat, and ignored. Each answer says how far the log has the stream: if it lost its end it is sent again, if too much
it gets a checkpoint (change_log.py). While there is nothing to publish, an empty page asks every `probe_seconds`.

A name has one writer. If the log knows a newer epoch of this store's name, another process has taken it over: what
this one says counts no more, so it stops for good and says so. If another one publishes at the same epoch
(two arenas that were made apart), the stream moves by itself: that is noticed too, and answered by a checkpoint.
"""

import threading
from typing import Any

import grpc

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.channels import open_channel
from services.common.errors import reason_of
from services.common.failpoints import passage
from services.common.logs import get_logger
from services.common.metrics import counter, gauge
from services.store.publishing.change_log import ChangeLog, Page, Snapshot
from services.store.publishing.changes import Change, batches_of

RESETS = counter("kvblend_publisher_resets", "Times that the matchers' log had to be told everything.", ("why",))
FAILURES = counter("kvblend_publisher_failures", "Pages without an answer.", ("reason",))
LOSSES = counter("kvblend_publisher_log_losses", "Times that the matchers' log had lost what it had acknowledged.")
IN_STEP = gauge("kvblend_publisher_in_step", "1 while the matchers' log has what the store holds.")
SUPERSEDED = gauge("kvblend_publisher_superseded", "1 once another process has taken over the store's name.")

_PAGE_CHANGES = 512
_PAGE_BYTES = 1 << 20
_FIRST_BACKOFF = 0.05
_LAST_BACKOFF = 1.0
_JOIN_SECONDS = 5.0

_log = get_logger("publisher")


class Publisher:
    """The outbox of a store. `append` never blocks and may be called under the catalog's lock.

    Args:
        store: the store's stable name; two live stores must not share one.
        target: where the matcher replicas are, as a gRPC target.
        snapshot: all that the store holds. Called on the publisher's thread, without a lock of its own,
            so it may take the lock under which `append` is called.
        timeout: seconds for one page.
        probe_seconds: how soon a loss of the log is noticed while nothing is published.
        max_changes: changes kept for a log that is away or may lose its end; and their bytes.
    """

    def __init__(
        self,
        store: str,
        epoch: int,
        target: str,
        snapshot: Snapshot,
        *,
        timeout: float = 5.0,
        probe_seconds: float = 1.0,
        max_changes: int = 100_000,
        max_bytes: int = 64 << 20,
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._snapshot = snapshot
        self._timeout = timeout
        self._probe_seconds = probe_seconds
        self._changes = ChangeLog(max_changes, max_bytes)
        self._channel = open_channel(target, replicated=True)
        self._stub: Any = matcher_pb2_grpc.MatcherServiceStub(self._channel)  # type: ignore[no-untyped-call]
        # Why the log must be told everything, whatever it lacks.
        self._reset_why = "start"
        # Changes under the change log's lock.
        self._trouble = _being_told("start")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """What has not been sent stays unsent: the store's next epoch voids it anyway."""
        self._stopping.set()
        with self._changes.changed:
            self._changes.changed.notify_all()
        self._channel.close()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def append(self, change: Change) -> int:
        """The change's sequence. The order of calls is kept."""
        return self._changes.append(change)

    def tell_again(self, why: str) -> None:
        """The log is told everything that is held, as after a loss."""
        self._reset_why = why
        with self._changes.changed:
            self._trouble = self._trouble or _being_told(why)
            self._changes.changed.notify_all()

    def position(self) -> pb.StreamPosition:
        """Position of the last change."""
        return pb.StreamPosition(store=self._store, epoch=self._epoch, sequence=self._changes.last)

    def durable_position(self) -> pb.StreamPosition:
        """Position up to which the log has the stream; sequence 0: it has nothing."""
        return pb.StreamPosition(store=self._store, epoch=self._epoch, sequence=self._changes.durable)

    def wait_durable(self, sequence: int, timeout: float) -> bool:
        """Whether the log has the stream up to `sequence` within `timeout` seconds; False at once while out of step."""
        with self._changes.changed:
            self._changes.changed.wait_for(lambda: self._trouble or self._changes.durable >= sequence, timeout)
            return not self._trouble and self._changes.durable >= sequence

    def depth(self) -> int:
        """Changes that the log does not have yet."""
        with self._changes.changed:
            return max(0, self._changes.last - self._changes.durable)

    def trouble(self) -> str:
        """Why the log is not in step with the store; empty if it is."""
        return self._trouble

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF
        while not self._stopping.is_set():
            try:
                if self._publish_next():
                    backoff = _FIRST_BACKOFF
                    continue
            except grpc.RpcError as error:
                reason = reason_of(error)
                FAILURES.labels(reason).inc()
                if reason == "STALE_EPOCH":
                    self._superseded()
                    return
                self._out_of_step(f"{reason}: {error.details()}")
            except Exception as error:
                if self._stopping.is_set():
                    return
                _log.error("publishing failed", exc_info=error)
                self._out_of_step(f"{type(error).__name__}: {error}")
            self._stopping.wait(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF)

    def _publish_next(self) -> bool:
        """False: the page did not follow what the log has."""
        page = self._next_page()
        if self._stopping.is_set():
            return True
        if page is None or self._reset_why:
            self._start_over(self._reset_why or "not kept")
            return True
        durable = self._send(page)
        if durable > page.last:
            self._reset_why = "another writer"
            self._out_of_step(f"another process publishes under the name {self._store!r} at the same epoch")
            return False
        self._acknowledge(durable)
        return durable >= page.first or not page.changes

    def _next_page(self) -> Page | None:
        changes = self._changes
        with changes.changed:
            # Until it is in step nothing is waited for: whether the log answers is news, too.
            if not self._trouble:
                changes.changed.wait_for(
                    lambda: self._stopping.is_set() or changes.durable < changes.last, self._probe_seconds
                )
            return changes.page(_PAGE_CHANGES, _PAGE_BYTES)

    def _send(self, page: Page) -> int:
        request = matcher_pb2.PublishRequest(
            store=self._store,
            epoch=self._epoch,
            first_sequence=page.first,
            batches=batches_of(page.changes),
            reset=page.reset,
        )
        passage("publish.send")
        response: matcher_pb2.PublishResponse = self._stub.Publish(request, timeout=self._timeout)
        passage("publish.acknowledge")
        return response.durable_sequence

    def _start_over(self, why: str) -> None:
        # Only for a log that answers: a snapshot costs the catalog something.
        self._changes.acknowledge(self._send(Page(self._changes.durable + 1, [], reset=False)))
        # First: who asks for it from now on may know what the snapshot will not have.
        self._reset_why = ""
        try:
            self._changes.start_over(self._snapshot)
        except BaseException:
            self._reset_why = why
            raise
        RESETS.labels(why).inc()
        self._out_of_step(_being_told(why))

    def _acknowledge(self, durable: int) -> None:
        if durable < self._changes.durable:
            LOSSES.inc()
            _log.warning("the matchers' log lost its end", acknowledged=self._changes.durable, durable=durable)
        with self._changes.changed:
            self._changes.acknowledge(durable)
            if self._changes.complete:
                self._in_step()

    def _in_step(self) -> None:
        if self._trouble:
            _log.info("the matchers' log is in step", durable=self._changes.durable)
        self._trouble = ""
        IN_STEP.set(1)

    def _out_of_step(self, why: str, *, for_good: bool = False) -> None:
        if self._stopping.is_set():
            return
        if for_good:
            _log.error("publishing has ended", why=why)
        elif why != self._trouble:
            _log.warning("the matchers' log is out of step", why=why)
        with self._changes.changed:
            self._trouble = why
            self._changes.changed.notify_all()
        IN_STEP.set(0)

    def _superseded(self) -> None:
        SUPERSEDED.set(1)
        why = (
            f"another process has taken over the name {self._store!r} with a newer epoch than {self._epoch}: "
            "matchers do not know what this one holds; give one of them another name"
        )
        # Its entries are void.
        self._changes.acknowledge(0)
        self._out_of_step(why, for_good=True)


def _being_told(why: str) -> str:
    return f"the matchers' log is being told everything: {why}"


class NoMatchers:
    """The outbox of a store without matchers: numbers changes, keeps none."""

    def __init__(self, store: str, epoch: int) -> None:
        self._lock = threading.Lock()
        self._last = pb.StreamPosition(store=store, epoch=epoch)

    def append(self, change: Change) -> int:
        del change
        with self._lock:
            self._last.sequence += 1
            return self._last.sequence

    def position(self) -> pb.StreamPosition:
        with self._lock:
            position = pb.StreamPosition()
            position.CopyFrom(self._last)
            return position

    def durable_position(self) -> pb.StreamPosition:
        return pb.StreamPosition(store=self._last.store, epoch=self._last.epoch)

    def wait_durable(self, sequence: int, timeout: float) -> bool:
        del sequence, timeout
        return False

    def depth(self) -> int:
        return 0

    def trouble(self) -> str:
        return ""

    def tell_again(self, why: str) -> None:
        """There is nobody to tell."""
