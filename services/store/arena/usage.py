"""What the arena's bytes are used for."""

from collections.abc import Iterable

from kvblend.v1 import store_pb2
from services.store.arena.blocks import BlockPool
from services.store.catalog import Chunk


class ArenaUsage:
    """Committed objects' blocks by kind. Needs the state's lock. Never negative, whatever a damaged header says."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._whole = 0
        self._partial = 0
        self._rounding = 0

    def count(self, chunk: Chunk, header: int, sign: int) -> None:
        """An object of the chunk enters (1) or leaves (-1) the catalog."""
        get = self._pool.headers.get
        taken = get(header, "capacity_bytes")
        if chunk.info.token_count < chunk.info.chunk_tokens:
            self._partial += sign * taken
        else:
            self._whole += sign * taken
        self._rounding += sign * (taken - get(header, "payload_bytes") - get(header, "meta_bytes"))

    def recount(self, chunks: Iterable[Chunk]) -> None:
        """After headers that were counted have been found damaged."""
        self._whole = self._partial = self._rounding = 0
        for chunk in chunks:
            for header in chunk.objects.values():
                self.count(chunk, header, 1)

    def message(self) -> store_pb2.ArenaUsage:
        allocator = self._pool.allocator
        return store_pb2.ArenaUsage(
            whole_bytes=max(0, self._whole),
            partial_bytes=max(0, self._partial),
            rounding_bytes=max(0, self._rounding),
            other_bytes=max(0, allocator.used_bytes - self._whole - self._partial),
            free_bytes=allocator.free_bytes,
            longest_free_bytes=allocator.longest_free_bytes,
        )
