"""The write side of L2: what is written there, when, and what becomes of it when the tier is away.

`through`: a chunk is queued when it becomes usable. `back`: when it is about to be evicted; eviction does not wait,
it takes others first, and the chunk itself if there is no other. Chunks that a full queue dropped, whose write failed,
or that an earlier process left are found again in the catalog, as soon as the queue has room and the tier takes
writes.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.common.failpoints import passage
from services.common.logs import get_logger
from services.common.metrics import gauge
from services.store.catalog import Chunk
from services.store.objects import ObjectKey
from services.store.state import StoreState
from services.store.tiers.base import Tier

QUEUED = gauge("kvblend_l2_queued_writes", "Chunks that wait to be written to L2.")

WritePolicy = Literal["through", "back", "none"]

_log = get_logger("l2")
_FIRST_PAUSE = 0.2
_LAST_PAUSE = 5.0
# A write lets a lookup's fetches go first, but not for ever.
_GIVE_WAY_SECONDS = 0.5


@dataclass(frozen=True)
class WritePolicies:
    """By class: documents held as such, exact prompts, and what depends on reused segments."""

    documents: WritePolicy = "through"
    prompts: WritePolicy = "through"
    blended: WritePolicy = "none"

    def of(self, chunk: Chunk) -> WritePolicy:
        domain = chunk.key.domain
        if domain == pb.DOMAIN_SEGMENT:
            return self.documents
        return self.blended if domain == pb.DOMAIN_BLENDED else self.prompts


class Writing:
    """Thread-safe. Its lock is taken under the state's, never the other way round."""

    def __init__(
        self,
        tier: Tier,
        state: StoreState,
        policies: WritePolicies,
        give_way: Callable[[float], None],
        *,
        queue_chunks: int,
        threads: int,
        timeout: float,
    ) -> None:
        """`give_way(seconds)` returns when nothing more urgent uses the tier. `timeout`: seconds for one object."""
        self._tier = tier
        self._state = state
        self._policies = policies
        self._give_way = give_way
        self._queue_chunks = queue_chunks
        self._timeout = timeout
        self._changed = threading.Condition()
        self._queue: OrderedDict[Chunk, None] = OrderedDict()
        self._writing: set[Chunk] = set()
        # There may be chunks in the catalog that should be written and are not queued.
        self._behind = True
        # Seconds until the next try after a failure; 0: the last write was good.
        self._pause = 0.0
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, name=f"l2-write-{n}", daemon=True) for n in range(threads)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(self._timeout)

    @property
    def unwritten(self) -> int:
        """Chunks that wait, or are being written."""
        return len(self._queue) + len(self._writing)

    # Called under the state's lock; never block.

    def offer(self, chunk: Chunk) -> None:
        """A chunk became usable."""
        if chunk.in_l2 or self._policies.of(chunk) != "through":
            return
        with self._changed:
            if not self._put(chunk):
                self._behind = True
                self._state.stats.add("l2_writes_dropped")

    def spare(self, chunk: Chunk) -> bool:
        """A chunk is about to be evicted. True: it is written first, so others should go before it."""
        if chunk.in_l2 or not chunk.complete or self._policies.of(chunk) == "none":
            return False
        with self._changed:
            spared = not self._pause and (chunk in self._writing or self._put(chunk))
        if not spared:
            self._state.stats.add("l2_writes_lost")
        return spared

    def _put(self, chunk: Chunk) -> bool:
        """It is queued. Needs the lock."""
        if chunk not in self._queue:
            if len(self._queue) >= self._queue_chunks or self._stopping.is_set():
                return False
            self._queue[chunk] = None
            QUEUED.set(len(self._queue))
            self._changed.notify()
        return True

    # The writers.

    def _run(self) -> None:
        while (chunk := self._next()) is not None:
            try:
                done = self._write(chunk)
            except Exception as error:
                _log.error("a write to L2 failed", exc_info=error)
                done = False
            with self._changed:
                self._writing.discard(chunk)
                self._pause = 0.0 if done else min(2 * self._pause or _FIRST_PAUSE, _LAST_PAUSE)
                self._behind = self._behind or not done
                self._changed.notify_all()

    def _next(self) -> Chunk | None:
        """The chunk to write now; None when it is time to end."""
        while not self._stopping.wait(self._pause):
            self._catch_up()
            with self._changed:
                chunk = self._first()
                if chunk is not None:
                    del self._queue[chunk]
                    QUEUED.set(len(self._queue))
                    self._writing.add(chunk)
                    return chunk
                self._changed.wait_for(
                    lambda: self._stopping.is_set() or self._first() is not None or (self._behind and not self._queue)
                )
        return None

    def _first(self) -> Chunk | None:
        """A chunk that was offered again waits until the write that runs has ended."""
        return next((chunk for chunk in self._queue if chunk not in self._writing), None)

    def _catch_up(self) -> None:
        """Queues what the catalog has and L2 lacks, if the queue has run empty."""
        with self._changed:
            if not self._behind or self._queue:
                return
            self._behind = False
        with self._state.lock:
            chunks = list(self._state.catalog)
        owed = (
            chunk
            for chunk in chunks
            if chunk.complete and not chunk.in_l2 and self._policies.of(chunk) == "through" and self._will_last(chunk)
        )
        found = list(islice(owed, self._queue_chunks + 1))
        with self._changed:
            for chunk in found:
                if not self._put(chunk):
                    self._behind = True

    def _will_last(self, chunk: Chunk) -> bool:
        """L2 counts whole seconds of life."""
        return chunk.resident and not 0 < chunk.expires_at <= self._state.clock.wall() + 1

    def _write(self, chunk: Chunk) -> bool:
        """False: the tier did not take it, and should be left alone for a while."""
        state = self._state
        with state.lock:
            if not chunk.resident:
                state.stats.add("l2_writes_lost")
            if not chunk.complete or chunk.in_l2 or not self._will_last(chunk):
                return True
            objects = {ObjectKey(chunk.key, *place): header for place, header in chunk.objects.items()}
            metas = {key: meta for key, header in objects.items() if (meta := state.pool.read_meta(header)) is not None}
            names = len(chunk.documents)
            for header in objects.values():
                state.leases.pin(chunk, header)
        done = False
        try:
            done = len(metas) == len(objects) and all(
                self._write_object(key, metas[key], header) for key, header in objects.items()
            )
            passage("l2.mark")
        finally:
            wanted = self._settle(chunk, objects.values(), names, done)
        if not wanted:
            # Cleared while it was being written.
            self._tier.delete(list(objects), self._timeout)
        return done

    def _write_object(self, key: ObjectKey, meta: object_pb2.ObjectMeta, header: int) -> bool:
        self._give_way(_GIVE_WAY_SECONDS)
        passage("l2.write")
        return self._tier.write(key, meta, self._state.pool.payload(header), self._timeout)

    def _settle(self, chunk: Chunk, headers: Iterable[int], names: int, done: bool) -> bool:
        """Whether the chunk is still here. It had so many names when its meta was read."""
        state = self._state
        state.stats.add("l2_written_chunks" if done else "l2_write_failures")
        with state.lock:
            for header in headers:
                state.leases.unpin(chunk, header)
            if done and chunk.resident:
                state.mark_in_l2(chunk)
                with self._changed:
                    if names != len(chunk.documents) or chunk in self._queue:
                        # It has changed meanwhile: L2 does not have what it is now, nor may a restart believe so.
                        state.left_l2([chunk.key])
                        self._put(chunk)
            return chunk.resident
