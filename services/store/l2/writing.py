"""The write side of L2: what is written there, when, and what becomes of it when the tier is away.

`through`: a chunk is queued when it becomes usable. `back`: when it is about to be evicted; eviction does not wait,
it takes others first, and the chunk itself if there is no other. Chunks that a full queue dropped, whose write failed,
or that an earlier process left are found again in the catalog, as soon as the queue has room and the tier takes
writes.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvblend.v1 import common_pb2 as pb
from services.common.failpoints import passage
from services.common.logs import get_logger
from services.common.metrics import gauge
from services.store.catalog import Chunk
from services.store.l2.batches import MOST_BYTES, batches
from services.store.objects import ObjectKey
from services.store.state import StoreState
from services.store.tiers.base import Tier, Write

QUEUED = gauge("kvblend_l2_queued_writes", "Chunks that wait to be written to L2.")

WritePolicy = Literal["through", "back", "none"]

_log = get_logger("l2")
_FIRST_PAUSE = 0.2
_LAST_PAUSE = 5.0
# A write lets a lookup's fetches go first, but not for ever.
_GIVE_WAY_SECONDS = 0.5
# One call should be over after so long: a lookup's fetches may be waiting behind it.
_TOGETHER_SECONDS = 0.05
# One call takes at most this part of the arena.
_ARENA_PARTS = 64


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


@dataclass(frozen=True)
class _Copy:
    """A chunk that is being written: its headers, pinned, its objects, and how many names it had when it was read."""

    chunk: Chunk
    headers: Sequence[int]
    writes: Sequence[Write]
    names: int


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
        """`give_way(seconds)` returns when nothing more urgent uses the tier. `timeout`: seconds for one call to it."""
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
        # Bytes of one call, by how long the last one took; 0: one object is enough.
        self._together = 0
        # Seconds until the next try after a failure; 0: the last write was good.
        self._pause = 0.0
        # What is written cannot be evicted meanwhile.
        self._most_together = min(MOST_BYTES, state.pool.capacity_bytes // _ARENA_PARTS)
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
        while chunks := self._next():
            try:
                done = self._write(chunks)
            except Exception as error:
                _log.error("a write to L2 failed", exc_info=error)
                done = False
            with self._changed:
                self._writing.difference_update(chunks)
                self._pause = 0.0 if done else min(2 * self._pause or _FIRST_PAUSE, _LAST_PAUSE)
                self._behind = self._behind or not done
                self._changed.notify_all()

    def _next(self) -> list[Chunk]:
        """The chunks to write now; none when it is time to end."""
        while not self._stopping.wait(self._pause):
            self._catch_up()
            with self._changed:
                chunks: list[Chunk] = []
                size = 0
                while (chunk := self._first()) is not None and (not chunks or size + chunk.size <= self._together):
                    del self._queue[chunk]
                    self._writing.add(chunk)
                    chunks.append(chunk)
                    size += chunk.size
                if chunks:
                    QUEUED.set(len(self._queue))
                    return chunks
                self._changed.wait_for(
                    lambda: self._stopping.is_set() or self._first() is not None or (self._behind and not self._queue)
                )
        return []

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

    def _write(self, chunks: Sequence[Chunk]) -> bool:
        """False: the tier did not take everything, and should be left alone for a while."""
        copies: list[_Copy] = []
        done: Collection[Chunk] = ()
        try:
            for chunk in chunks:
                self._copy(chunk, copies)
            done = self._send(copies)
            passage("l2.mark")
        finally:
            gone = [copy for copy in copies if not self._settle(copy, copy.chunk in done)]
        if gone:
            # Cleared while it was being written.
            self._tier.delete([write.key for copy in gone for write in copy.writes], self._timeout)
        return len(done) == len(copies)

    def _copy(self, chunk: Chunk, copies: list[_Copy]) -> None:
        """Pins what is to be written of it, if it is to be written."""
        state = self._state
        with state.lock:
            if not chunk.resident:
                state.stats.add("l2_writes_lost")
            if not chunk.complete or chunk.in_l2 or not self._will_last(chunk):
                return
            writes = [
                Write(ObjectKey(chunk.key, *place), meta, state.pool.payload(header))
                for place, header in chunk.objects.items()
                if (meta := state.pool.read_meta(header)) is not None
            ]
            copies.append(_Copy(chunk, list(chunk.objects.values()), writes, len(chunk.documents)))
            for header in chunk.objects.values():
                state.leases.pin(chunk, header)

    def _send(self, copies: Sequence[_Copy]) -> set[Chunk]:
        """Those that are there in full."""
        done = {copy.chunk for copy in copies if len(copy.writes) == len(copy.headers)}
        writes = ((copy.chunk, write) for copy in copies for write in copy.writes)
        for batch in batches(writes, lambda item: item[1].meta.payload_bytes, lambda: self._together):
            some = [(chunk, write) for chunk, write in batch if chunk in done]
            for (chunk, _), written in zip(some, self._call([write for _, write in some]), strict=True):
                if not written:
                    done.discard(chunk)
        return done

    def _call(self, writes: Sequence[Write]) -> list[bool]:
        if not writes:
            return []
        self._give_way(_GIVE_WAY_SECONDS)
        passage("l2.write")
        begun = time.monotonic()
        outcomes = self._tier.write(writes, self._timeout)
        seconds = max(time.monotonic() - begun, 1e-6)
        size = sum(write.meta.payload_bytes for write in writes)
        self._together = min(int(_TOGETHER_SECONDS / seconds * size), self._most_together) if all(outcomes) else 0
        return outcomes

    def _settle(self, copy: _Copy, done: bool) -> bool:
        """Whether the chunk is still here."""
        state, chunk = self._state, copy.chunk
        state.stats.add("l2_written_chunks" if done else "l2_write_failures")
        with state.lock:
            for header in copy.headers:
                state.leases.unpin(chunk, header)
            if done and chunk.resident:
                state.mark_in_l2(chunk)
                with self._changed:
                    if copy.names != len(chunk.documents) or chunk in self._queue:
                        # It has changed meanwhile: L2 does not have what it is now, nor may a restart believe so.
                        state.left_l2([chunk.key])
                        self._put(chunk)
            return chunk.resident
