"""Blocks of the arena: an allocated place together with its header."""

from dataclasses import dataclass

import xxhash
from google.protobuf.message import DecodeError

from kvblend.v1 import object_pb2, store_pb2
from services.common.arena_format import BlockState, meta_offset
from services.common.failpoints import passage
from services.store import names
from services.store.allocator import Allocator, page_round
from services.store.arena import Arena
from services.store.headers import HeaderTable


@dataclass(frozen=True)
class Writer:
    """Who may be copying into a block."""

    session: bytes
    reservation: int


class BlockPool:
    """Allocates, commits and frees blocks; not thread-safe."""

    def __init__(self, arena: Arena, headers: HeaderTable, allocator: Allocator) -> None:
        self._arena = arena
        self.headers = headers
        self._allocator = allocator

    @property
    def used_bytes(self) -> int:
        return self._allocator.used_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity_bytes

    def fits_ever(self, payload_bytes: int, meta_bytes: int) -> bool:
        return block_bytes(payload_bytes, meta_bytes) <= self._arena.slab_bytes

    def reserve(self, payload_bytes: int, meta_bytes: int, writer: Writer) -> int | None:
        """Header of a new RESERVED block, or None if there is no room now."""
        if not self.headers.has_free:
            return None
        size = block_bytes(payload_bytes, meta_bytes)
        place = self._allocator.allocate(size)
        if place is None:
            return None
        return self.headers.take(*place, size, payload_bytes, writer.session, writer.reservation)

    def commit(self, header: int, meta: object_pb2.ObjectMeta, flags: int) -> None:
        """The block's payload is complete: meta behind it, then the header, its state last."""
        data = meta.SerializeToString()
        payload = self.headers.get(header, "payload_bytes")
        if block_bytes(payload, len(data)) > self.headers.get(header, "capacity_bytes"):
            raise ValueError("the meta has grown since the block was reserved")
        passage("meta.write")
        self._view(header, meta_offset(payload), len(data))[:] = data
        self.headers.set(header, "meta_bytes", len(data))
        names.erase(self._names(header))
        self.headers.set(header, "flags", flags)
        self.headers.set(header, "checksum", meta.checksum)
        self.headers.set(header, "meta_checksum", xxhash.xxh3_64_intdigest(data))
        self.headers.set(header, "expires_at", meta.expires_at)
        passage("commit.state")
        self.headers.set_state(header, BlockState.COMMITTED)

    def read_meta(self, header: int) -> object_pb2.ObjectMeta | None:
        """With the names that came later. None if what lies behind the payload is not the meta that was written."""
        payload = self.headers.get(header, "payload_bytes")
        size = self.headers.get(header, "meta_bytes")
        if meta_offset(payload) + size > self.headers.get(header, "capacity_bytes"):
            return None
        data = bytes(self._view(header, meta_offset(payload), size))
        if xxhash.xxh3_64_intdigest(data) != self.headers.get(header, "meta_checksum"):
            return None
        try:
            meta = object_pb2.ObjectMeta.FromString(data)
        except DecodeError:
            return None
        meta.documents.extend(names.read(self._names(header)))
        return meta

    def add_name(self, header: int, name: str) -> str:
        """Another document's name for a committed object: what it is known by now (services/store/names.py)."""
        return names.append(self._names(header), name)

    def _names(self, header: int) -> memoryview:
        start = meta_offset(self.headers.get(header, "payload_bytes")) + self.headers.get(header, "meta_bytes")
        return self._view(header, start, self.headers.get(header, "capacity_bytes") - start)

    def payload(self, header: int) -> memoryview:
        return self._view(header, 0, self.headers.get(header, "payload_bytes"))

    def _view(self, header: int, start: int, size: int) -> memoryview:
        return self._arena.view(self.headers.get(header, "slab"), self.headers.get(header, "offset") + start, size)

    def place(self, header: int, group: int) -> store_pb2.ObjectPlace:
        return store_pb2.ObjectPlace(
            header=header,
            generation=self.headers.generation(header),
            slab=self.headers.get(header, "slab"),
            offset=self.headers.get(header, "offset"),
            payload_bytes=self.headers.get(header, "payload_bytes"),
            group=group,
        )

    def free(self, header: int) -> None:
        """Nobody may be writing into it, and no lease protects it."""
        slab, offset = self.headers.get(header, "slab"), self.headers.get(header, "offset")
        self.headers.free(header)
        self._allocator.free(slab, offset)


def block_bytes(payload_bytes: int, meta_bytes: int) -> int:
    """What a block takes of the arena."""
    return page_round(meta_offset(payload_bytes) + meta_bytes + names.ROOM_BYTES)
