"""The way to the lower tier: write-through behind a bounded queue, and fetching into the arena.

Nothing here raises for a tier that is down, slow or full: what is not there in time is a miss.
"""

import queue
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.common.errors import KvblendError
from services.common.failpoints import passage
from services.common.identity import OBJECT_FORMAT_VERSION
from services.common.logs import get_logger
from services.store.blocks import Writer
from services.store.catalog import Chunk, in_scope
from services.store.changes import Removed, cleared_of
from services.store.objects import ChunkKey, ObjectKey, info_of
from services.store.spaces import ResolvedSpace, SpaceShape
from services.store.state import StoreState
from services.store.tiers.base import Tier

_log = get_logger("l2")

# The store writes by itself: after a restart no such writer is alive.
_OWN_WRITER = Writer(bytes(16), 0)
_SMOOTHING = 0.2
# The writer looks this often whether it should end.
_STOP_SECONDS = 0.1

WritePolicy = Literal["all", "documents", "none"]


@dataclass(frozen=True)
class L2Chunk:
    """All objects of a chunk that the tier has, and how often the store had been cleared when it said so."""

    key: ChunkKey
    objects: dict[ObjectKey, object_pb2.ObjectMeta]
    clears: int

    @property
    def size(self) -> int:
        return sum(meta.payload_bytes for meta in self.objects.values())


class L2:
    """Thread-safe. `close` stops its threads."""

    def __init__(
        self, tier: Tier, state: StoreState, *, write: WritePolicy, queue_chunks: int, threads: int, timeout: float
    ) -> None:
        """`timeout`: seconds that one object's transfer may take."""
        self.tier = tier
        self._state = state
        self._write_policy = write
        self._timeout = timeout
        self._queue: queue.Queue[Chunk] = queue.Queue(queue_chunks)
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="l2-read")
        self._fetching: dict[ChunkKey, Future[bool]] = {}
        self._clears = 0
        # Bytes a second of one transfer; 0: not measured yet.
        self._rate = 0.0
        self._stopping = threading.Event()
        self._writer = threading.Thread(target=self._write_all, name="l2-write", daemon=True)

    def start(self) -> None:
        self._writer.start()

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._stopping.set()
        self._writer.join(self._timeout)
        self.tier.close()

    # Writing through.

    def offer(self, chunk: Chunk) -> None:
        """Queues a chunk that became usable; never blocks. Called under the state's lock."""
        document_only = self._write_policy == "documents" and chunk.key.domain != pb.DOMAIN_SEGMENT
        if self._write_policy == "none" or document_only or chunk.in_l2:
            return
        try:
            self._queue.put_nowait(chunk)
        except queue.Full:
            self._state.stats.add("l2_writes_dropped")

    def _write_all(self) -> None:
        while not self._stopping.is_set():
            try:
                self._write_through(self._queue.get(timeout=_STOP_SECONDS))
            except queue.Empty:
                continue
            except Exception as error:
                _log.error("write-through failed", exc_info=error)

    def _write_through(self, chunk: Chunk) -> None:
        state = self._state
        with state.lock:
            if not chunk.resident or not chunk.complete or chunk.in_l2:
                return
            objects = {ObjectKey(chunk.key, *place): header for place, header in chunk.objects.items()}
            metas = {key: state.pool.read_meta(header) for key, header in objects.items()}
            names = len(chunk.documents)
            for header in objects.values():
                state.leases.pin(chunk, header)
        done = False
        try:
            done = all(self._write_object(key, metas[key], header) for key, header in objects.items())
            passage("l2.mark")
        finally:
            with state.lock:
                for header in objects.values():
                    state.leases.unpin(chunk, header)
                wanted = chunk.resident
                if done and wanted:
                    state.mark_in_l2(chunk)
                    if names != len(chunk.documents):
                        # It got another name meanwhile.
                        chunk.in_l2 = False
                        self.offer(chunk)
        state.stats.add("l2_written_chunks" if done else "l2_write_failures")
        if not wanted:
            # Cleared while it was being written.
            self.tier.delete(list(objects), self._timeout)

    def _write_object(self, key: ObjectKey, meta: object_pb2.ObjectMeta | None, header: int) -> bool:
        if meta is None:
            return False
        payload = self._state.pool.payload(header)
        passage("l2.write")
        return self.tier.write(key, meta, payload, self._timeout)

    # Fetching.

    def find(self, space: ResolvedSpace, keys: Sequence[ChunkKey], timeout: float) -> dict[ChunkKey, L2Chunk]:
        """Chunks that the tier has in full, of those asked for."""
        shape, clears = space.shape, self._clears
        wanted = [
            ObjectKey(key, group, rank) for key in keys for group in range(shape.groups) for rank in range(shape.ranks)
        ]
        metas = self.tier.find(wanted, timeout) if wanted and timeout > 0 else []
        found: dict[ChunkKey, L2Chunk] = {}
        for key, meta in zip(wanted, metas, strict=False):
            if meta is not None and _is_sound(key, meta, space.model_space_id, shape):
                found.setdefault(key.chunk, L2Chunk(key.chunk, {}, clears)).objects[key] = meta
        return {key: chunk for key, chunk in found.items() if _is_whole(chunk, shape)}

    def seconds_for(self, size: int) -> float:
        """Estimated time to fetch so many bytes; 0 until something has been measured."""
        return size / self._rate if self._rate else 0.0

    def fetch(self, chunk: L2Chunk) -> "Future[bool]":
        """Starts or joins the fetch of a chunk into the arena; true when it is usable there."""
        with self._state.lock:
            running = self._fetching.get(chunk.key)
            if running is None:
                running = self._fetching[chunk.key] = self._readers.submit(self._fetch, chunk)
            return running

    def _fetch(self, chunk: L2Chunk) -> bool:
        blocks: dict[ObjectKey, int] = {}
        landed = False
        try:
            blocks = self._take_blocks(chunk)
            passage("l2.fetch")
            landed = len(blocks) > 0 and all(
                self._read(key, chunk.objects[key], header) for key, header in blocks.items()
            )
            passage("l2.land")
        finally:
            with self._state.lock:
                del self._fetching[chunk.key]
                usable = self._settle(chunk, blocks, landed)
        return usable

    def _take_blocks(self, chunk: L2Chunk) -> dict[ObjectKey, int]:
        """A block for each object that the arena lacks; none if there is no room for all."""
        state = self._state
        blocks: dict[ObjectKey, int] = {}
        with state.lock:
            for key, meta in chunk.objects.items():
                if not state.catalog.accepts(key.chunk, info_of(meta), key.group, key.rank):
                    continue
                header = state.make_block(meta.payload_bytes, meta.ByteSize(), _OWN_WRITER, meta.tenant)
                if header is None:
                    for other in blocks.values():
                        state.pool.free(other)
                    return {}
                blocks[key] = header
        return blocks

    def _read(self, key: ObjectKey, meta: object_pb2.ObjectMeta, header: int) -> bool:
        start = time.perf_counter()
        ok = self.tier.read_into(key, meta, self._state.pool.payload(header), self._timeout)
        if ok:
            rate = meta.payload_bytes / max(time.perf_counter() - start, 1e-6)
            self._rate = rate if not self._rate else (1 - _SMOOTHING) * self._rate + _SMOOTHING * rate
        return ok

    def _settle(self, chunk: L2Chunk, blocks: dict[ObjectKey, int], landed: bool) -> bool:
        """What was read becomes visible, unless the store has been cleared since the tier was asked."""
        state = self._state
        keep = landed and chunk.clears == self._clears
        for key, header in blocks.items():
            meta = chunk.objects[key]
            meta.ClearField("write_id")
            meta.ClearField("parts")
            meta.pinned = meta.pinned and state.usage.may_pin(meta.tenant, meta.payload_bytes)
            if keep and state.catalog.accepts(key.chunk, info_of(meta), key.group, key.rank):
                state.commit_object(key, header, meta, in_l2=True)
            else:
                state.pool.free(header)
        return state.usable(chunk.key) is not None

    def disown(self, space: ResolvedSpace, keys: Sequence[ChunkKey], seen_position: int) -> None:
        """Looks again, off the caller's path, and tells the matchers what L2 surely does not have.

        `seen_position`: of the matcher's answer that claimed it; what another store has put there since stays.
        """

        def check() -> None:
            start = time.monotonic()
            found = self.find(space, keys, self._timeout)
            # A tier that is down or slow answers misses too.
            if time.monotonic() - start > self._timeout / 2 or not self.tier.health().ready:
                return
            with self._state.lock:
                for key in keys:
                    if key not in found:
                        self._state.outbox.append(Removed(key, self._state.l2_id, seen_position))

        with suppress(RuntimeError):
            self._readers.submit(check)

    # Clearing.

    def clear(self, scope: pb.ClearScope, known: Collection[ChunkKey], timeout: float) -> int:
        """Deletes what the scope names and these chunks; running fetches come to nothing. How many chunks.

        `known`: what the arena had in the scope. L2 may not have learned yet that they belong to it.

        Raises:
            KvblendError: L2_UNAVAILABLE if the tier cannot promise that it is all gone.
        """
        with self._state.lock:
            self._clears += 1
        gone: set[ChunkKey] = set()

        def matches(meta: object_pb2.ObjectMeta) -> bool:
            key = ChunkKey(meta.space_id, meta.domain, meta.chain_hash)
            found = key in known or in_scope(scope, meta.space_id, meta.tenant, meta.documents)
            if found:
                gone.add(key)
            return found

        self.tier.delete_where(matches, timeout)
        health = self.tier.health()
        if not health.ready:
            raise KvblendError("L2_UNAVAILABLE", f"L2 may still hold what was to be cleared: {health.detail}")
        self._tell_cleared(scope, gone)
        return len(gone)

    def _tell_cleared(self, scope: pb.ClearScope, gone: set[ChunkKey]) -> None:
        state = self._state
        with state.lock:
            state.left_l2(gone)
            # Also claims of what the tier had lost before.
            state.outbox.append(cleared_of(scope, state.l2_id))
            if scope.WhichOneof("scope") == "document":
                # Matchers may know the same text by another document's name.
                for key in gone:
                    state.outbox.append(Removed(key, state.l2_id))


def _is_sound(key: ObjectKey, meta: object_pb2.ObjectMeta, model_space_id: bytes, shape: SpaceShape) -> bool:
    """The meta describes the object that this space would have under this key."""
    info = info_of(meta)
    return (
        meta.format_version == OBJECT_FORMAT_VERSION
        and (meta.space_id, meta.domain, meta.chain_hash)
        == (key.chunk.space_id, key.chunk.domain, key.chunk.chain_hash)
        and (meta.model_space_id, meta.groups, meta.ranks) == (model_space_id, shape.groups, shape.ranks)
        and (meta.group, shape.rank_number(meta.rank)) == (key.group, key.rank)
        and meta.payload_bytes == shape.payload_bytes(key.group, info.token_count)
    )


def _is_whole(chunk: L2Chunk, shape: SpaceShape) -> bool:
    """Every object is there, and all were computed at the same place."""
    infos = [info_of(meta) for meta in chunk.objects.values()]
    return len(infos) == shape.groups * shape.ranks and all(info.fits(infos[0]) for info in infos)
