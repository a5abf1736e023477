"""One chunk's way from L2 into the arena. Nothing of it can be seen before all of it is there."""

from collections.abc import Callable
from typing import Literal

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.common.failpoints import passage
from services.store.blocks import Writer
from services.store.catalog import Chunk
from services.store.l2.found import L2Chunk
from services.store.l2.speed import Speed
from services.store.objects import ObjectKey, info_of
from services.store.state import StoreState
from services.store.tiers.base import Tier

Fetched = Literal["kept", "temporary"]

# The store writes by itself: after a restart no such writer is alive.
_OWN_WRITER = Writer(bytes(16), 0)


class Landing:
    """Thread-safe."""

    def __init__(self, tier: Tier, state: StoreState, speed: Speed, fetched: Fetched, timeout: float) -> None:
        """`timeout`: seconds that one object's transfer may take."""
        self._tier = tier
        self._state = state
        self._speed = speed
        self._fetched = fetched
        self._timeout = timeout
        self._clears = 0
        # Chunks that leave when no lease protects them any more.
        self._temporary: set[Chunk] = set()

    @property
    def clears(self) -> int:
        """How often the store has been cleared."""
        return self._clears

    def clear(self) -> None:
        """What is on its way comes to nothing."""
        with self._state.lock:
            self._clears += 1

    def transfer(self, chunk: L2Chunk, wanted: Callable[[], bool]) -> Chunk | None:
        """The chunk, usable in the arena and protected there until `release`; None: it is not."""
        blocks: dict[ObjectKey, int] = {}
        landed = whole = False
        try:
            self._take_blocks(chunk, blocks)
            passage("l2.fetch")
            landed = len(blocks) > 0 and all(
                wanted() and self._read(key, chunk.objects[key], header) for key, header in blocks.items()
            )
            passage("l2.land")
            whole = True
        finally:
            with self._state.lock:
                usable = self._settle(chunk, blocks, landed)
                # Not after an error: nobody would release it.
                if whole and usable is not None:
                    usable.protectors += 1
        return usable

    def release(self, chunk: Chunk) -> None:
        """It has been leased by those who wanted it, or nobody wants it any more."""
        with self._state.lock:
            chunk.protectors -= 1
        self.sweep()

    def sweep(self) -> None:
        """Temporary chunks leave, but those that somebody still uses."""
        if not self._temporary:
            return
        with self._state.lock:
            for chunk in list(self._temporary):
                if not chunk.resident or not chunk.protectors:
                    self._temporary.discard(chunk)
                    if chunk.resident:
                        self._state.remove(chunk, pb.REASON_EVICTED)

    def _take_blocks(self, chunk: L2Chunk, blocks: dict[ObjectKey, int]) -> None:
        """A block for each object that the arena lacks; none if there is no room for all."""
        state = self._state
        with state.lock:
            for key, meta in chunk.objects.items():
                if not state.catalog.accepts(key.chunk, info_of(meta), key.group, key.rank):
                    continue
                header = state.make_block(meta.payload_bytes, meta.ByteSize(), _OWN_WRITER, meta.tenant)
                if header is None:
                    for other in blocks.values():
                        state.pool.free(other)
                    blocks.clear()
                    return
                blocks[key] = header

    def _read(self, key: ObjectKey, meta: object_pb2.ObjectMeta, header: int) -> bool:
        payload = self._state.pool.payload(header)
        return self._speed.measure(meta.payload_bytes, lambda: self._tier.read_into(key, meta, payload, self._timeout))

    def _settle(self, chunk: L2Chunk, blocks: dict[ObjectKey, int], landed: bool) -> Chunk | None:
        """What was read becomes visible, unless the store has been cleared since the tier was asked."""
        state = self._state
        keep = landed and chunk.clears == self._clears
        size = 0
        for key, header in blocks.items():
            meta = chunk.objects[key]
            meta.ClearField("write_id")
            meta.ClearField("parts")
            meta.pinned = meta.pinned and state.usage.may_pin(meta.tenant, meta.payload_bytes)
            if keep and state.catalog.accepts(key.chunk, info_of(meta), key.group, key.rank):
                state.commit_object(key, header, meta, in_l2=True)
                size += meta.payload_bytes
            else:
                state.pool.free(header)
        usable = state.usable(chunk.key)
        if size:
            state.stats.add("l2_fetched_chunks")
            state.stats.add("l2_fetched_bytes", size)
            if usable is not None and self._fetched == "temporary":
                self._temporary.add(usable)
        return usable
