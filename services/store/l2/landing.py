"""Chunks' way from L2 into the arena. Nothing of a chunk can be seen before all of it is there."""

from collections.abc import Callable, Sequence
from typing import Literal

from kvblend.v1 import common_pb2 as pb
from services.common.failpoints import passage
from services.store.arena.blocks import Writer
from services.store.catalog import Chunk
from services.store.l2.batches import batches
from services.store.l2.found import L2Chunk
from services.store.l2.speed import Speed
from services.store.objects import ObjectKey, info_of
from services.store.state import StoreState
from services.store.tiers.base import Read, Tier

Fetched = Literal["kept", "temporary"]

# The store writes by itself: after a restart no such writer is alive.
_OWN_WRITER = Writer(bytes(16), 0)


class Landing:
    """Thread-safe."""

    def __init__(self, tier: Tier, state: StoreState, speed: Speed, fetched: Fetched, timeout: float) -> None:
        """`timeout`: seconds that one call to the tier may take."""
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

    def transfer(self, chunks: Sequence[L2Chunk], wanted: Callable[[L2Chunk], bool]) -> list[Chunk | None]:
        """Those chunks, usable in the arena and protected there until `release`; None: it is not. They are different
        ones."""
        taken: list[dict[ObjectKey, int]] = [{} for _ in chunks]
        landed = [False] * len(chunks)
        whole = False
        try:
            for chunk, blocks in zip(chunks, taken, strict=True):
                self._take_blocks(chunk, blocks)
            passage("l2.fetch")
            landed = self._read(chunks, taken, wanted)
            passage("l2.land")
            whole = True
        finally:
            with self._state.lock:
                usable = [self._settle(*item) for item in zip(chunks, taken, landed, strict=True)]
                # Not after an error: nobody would release it.
                for arrived in usable if whole else ():
                    if arrived is not None:
                        arrived.protectors += 1
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

    def _read(
        self, chunks: Sequence[L2Chunk], taken: Sequence[dict[ObjectKey, int]], wanted: Callable[[L2Chunk], bool]
    ) -> list[bool]:
        """Whether all is there that a chunk has blocks for."""
        landed = [len(blocks) > 0 for blocks in taken]
        reads = (
            (place, Read(key, chunk.objects[key], self._state.pool.payload(header)))
            for place, (chunk, blocks) in enumerate(zip(chunks, taken, strict=True))
            for key, header in blocks.items()
        )
        for batch in batches(reads, lambda item: item[1].meta.payload_bytes, lambda: self._speed.together):
            for place in {place for place, _ in batch}:
                landed[place] = landed[place] and wanted(chunks[place])
            asked = [(place, read) for place, read in batch if landed[place]]
            for (place, _), arrived in zip(asked, self._call([read for _, read in asked]), strict=True):
                landed[place] = landed[place] and arrived
        return landed

    def _call(self, reads: Sequence[Read]) -> list[bool]:
        outcomes: list[bool] = []

        def move() -> bool:
            outcomes.extend(self._tier.read_into(reads, self._timeout))
            return all(outcomes)

        if reads:
            self._speed.measure(sum(read.meta.payload_bytes for read in reads), move)
        return outcomes

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
