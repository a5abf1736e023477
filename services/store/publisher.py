"""Tells every matcher replica what the store holds: one gapless stream, one thread a replica.

Each replica is fed from the store's change log, page by page and in order; a page is repeated until it
is acknowledged. A replica that restarted, lost its place or fell too far behind gets a checkpoint
(change_log.py): its first page carries `reset`, and the stream goes on behind it without a gap. As no
sequence is ever used twice, a page that timed out and is carried out late is a repeat (ignored) or
moves the replica's position to where the next page does not follow; that is noticed at once, or,
with nothing to publish, by the empty page that asks for the position every `probe_seconds`.

Owners of kind L2 are not the store's alone, so a reset does not drop them: if a replica that did not
restart missed the removal of one, the first store that fails to fetch the chunk removes it.
"""

import threading
from typing import Any

import grpc

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.channels import open_channel
from services.common.errors import reason_of
from services.common.logs import get_logger
from services.common.metrics import counter, gauge
from services.store.change_log import Change, ChangeLog, Page, Snapshot

RESETS = counter("kvblend_publisher_resets", "Times that a matcher had to be told everything again.", ("target", "why"))
FAILURES = counter("kvblend_publisher_failures", "Pages without an answer.", ("target", "reason"))
IN_STEP = gauge("kvblend_publisher_in_step", "1 while a matcher knows what the store holds.", ("target",))

_PAGE_CHANGES = 512
_PAGE_BYTES = 4 << 20
_FIRST_BACKOFF = 0.05
_LAST_BACKOFF = 1.0
_JOIN_SECONDS = 5.0

_log = get_logger("publisher")


class _Restart(Exception):
    """The replica must be told everything again; says why."""


class Publisher:
    """The outbox of a store. `added` and `removed` never block and may be called under the catalog's lock.

    Args:
        store: the store's stable name; two live stores must not share one.
        targets: addresses, each of one replica (not a name that stands for several).
        snapshot: all that the store holds. Called on the publisher's threads, without a lock of its own,
            so it may take the lock under which `added` and `removed` are called.
        timeout: seconds for one page.
        probe_seconds: how soon a replica's restart is noticed while nothing is published.
        max_lag: changes kept for a replica that is away or slow.
    """

    def __init__(
        self,
        store: str,
        epoch: int,
        targets: list[str],
        snapshot: Snapshot,
        *,
        timeout: float = 5.0,
        probe_seconds: float = 1.0,
        max_lag: int = 100_000,
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._changes = ChangeLog(max_lag)
        self._replicas = [
            _Replica(store, epoch, target, self._changes, snapshot, timeout, probe_seconds) for target in targets
        ]

    def start(self) -> None:
        for replica in self._replicas:
            replica.start()

    def close(self) -> None:
        """What has not been sent stays unsent: the store's next epoch voids it anyway."""
        for replica in self._replicas:
            replica.stop()
        for replica in self._replicas:
            replica.join()

    def added(self, event: matcher_pb2.ChunkAdded) -> int:
        """The change's sequence. The event must not be modified any more; the order of calls is kept."""
        return self._changes.append(event)

    def removed(self, event: matcher_pb2.ChunkRemoved) -> int:
        """As `added`."""
        return self._changes.append(event)

    def position(self) -> pb.StreamPosition:
        """Position of the last change."""
        return pb.StreamPosition(store=self._store, epoch=self._epoch, sequence=self._changes.last)

    def wait_applied(self, sequence: int, timeout: float) -> bool:
        """Whether, within `timeout` seconds, every replica that is in step has applied it (true if none is)."""
        with self._changes.changed:
            return self._changes.changed.wait_for(
                lambda: all(replica.applied >= sequence for replica in self._replicas if replica.in_step), timeout
            )

    def depth(self) -> int:
        """Changes that the slowest replica has not acknowledged."""
        with self._changes.changed:
            last = self._changes.last
            return last - min((replica.applied for replica in self._replicas), default=last)


class _Replica:
    """One matcher replica and the thread that feeds it. `applied` and `in_step` change under the log's lock."""

    def __init__(
        self,
        store: str,
        epoch: int,
        target: str,
        changes: ChangeLog,
        snapshot: Snapshot,
        timeout: float,
        probe_seconds: float,
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._target = target
        self._changes = changes
        self._snapshot = snapshot
        self._timeout = timeout
        self._probe_seconds = probe_seconds
        self._channel = open_channel(target)
        self._stub: Any = matcher_pb2_grpc.MatcherServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._reader = changes.new_reader()
        self._boot_id = b""
        # The next page starts the stream; in step once it has everything before `_complete_at`.
        self._reset = False
        self._complete_at = 0
        # Why it is out of step, so that the log tells each reason once.
        self._why = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"publish-{target}", daemon=True)
        self.applied = 0
        self.in_step = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._channel.close()
        self._changes.drop(self._reader)

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF
        why = "start"
        while not self._stopping.is_set():
            try:
                if why:
                    self._start_over(why)
                    why = ""
                self._publish_next()
                if self.in_step:
                    backoff = _FIRST_BACKOFF
                continue
            except grpc.RpcError as error:
                FAILURES.labels(self._target, reason_of(error)).inc()
                self._out_of_step(f"{reason_of(error)}: {error.details()}")
            except _Restart as reason:
                why = str(reason)
                self._changes.drop(self._reader)
                self._out_of_step(why)
            except Exception as error:
                if self._stopping.is_set():
                    return
                why = "error"
                _log.error("publishing failed", target=self._target, exc_info=error)
                self._out_of_step(why)
            self._stopping.wait(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF)

    def _start_over(self, why: str) -> None:
        # Only for a matcher that answers: a snapshot costs the catalog something.
        self._stub.PingMatcher(matcher_pb2.PingMatcherRequest(), timeout=self._timeout)
        self._complete_at = self._changes.start_over(self._reader, self._snapshot)
        self._reset = True
        RESETS.labels(self._target, why).inc()

    def _publish_next(self) -> None:
        # Until it is in step nothing is waited for: an empty checkpoint is news, too.
        wait = self._probe_seconds if self.in_step else 0.0
        page = self._changes.page(self._reader, _PAGE_CHANGES, _PAGE_BYTES, wait)
        if page is None:
            raise _Restart("too far behind")
        if self._stopping.is_set():
            return
        response = self._stub.Publish(self._request(page), timeout=self._timeout)
        if response.needs_reset:
            raise _Restart("asked for it")
        if response.boot_id != self._boot_id and not self._reset:
            raise _Restart("restarted")
        if response.applied_sequence != page.last:
            raise _Restart("lost its place")
        self._boot_id = response.boot_id
        self._reset = False
        self._changes.acknowledge(self._reader, page.last)
        with self._changes.changed:
            self.applied = page.last
            self._set_in_step(page.last + 1 >= self._complete_at)
            self._changes.changed.notify_all()

    def _request(self, page: Page) -> matcher_pb2.PublishRequest:
        return matcher_pb2.PublishRequest(
            store=self._store,
            epoch=self._epoch,
            first_sequence=page.first,
            events=[_as_event(change) for change in page.changes],
            reset=self._reset,
        )

    def _out_of_step(self, why: str) -> None:
        if self._stopping.is_set():
            return
        if why != self._why:
            _log.warning("a matcher is out of step", target=self._target, why=why)
            self._why = why
        with self._changes.changed:
            self._set_in_step(False)
            self._changes.changed.notify_all()

    def _set_in_step(self, in_step: bool) -> None:
        if in_step and not self.in_step:
            _log.info("a matcher is in step", target=self._target)
            self._why = ""
        self.in_step = in_step
        IN_STEP.labels(self._target).set(in_step)


def _as_event(change: Change) -> matcher_pb2.ChangeEvent:
    if isinstance(change, matcher_pb2.ChunkAdded):
        return matcher_pb2.ChangeEvent(added=change)
    return matcher_pb2.ChangeEvent(removed=change)
