"""Blocks of the arena: an allocated place together with its header."""

from collections.abc import Callable
from dataclasses import dataclass

import xxhash
from google.protobuf.message import DecodeError

from kvblend.v1 import object_pb2, store_pb2
from services.common.arena_format import BlockState, meta_offset
from services.common.failpoints import passage
from services.common.logs import get_logger
from services.store import names
from services.store.arena.allocator import Allocator, Place, page_round
from services.store.arena.arena import Arena
from services.store.arena.headers import HeaderTable

_log = get_logger("blocks")

# Free space in pieces that is put up with: until there is so much of it, room is made in the policy's order.
_SCATTERED_SHARE = 0.025


@dataclass(frozen=True)
class Writer:
    """Who may be copying into a block."""

    session: bytes
    reservation: int


class BlockPool:
    """Allocates, commits and frees blocks; not thread-safe."""

    def __init__(self, arena: Arena, headers: HeaderTable, in_use: list[int]) -> None:
        """`in_use`: headers of the blocks that exist already, apart from each other."""
        self._arena = arena
        self.headers = headers
        # Where a block lies is also kept here: a damaged header must not free another's block.
        self._header_at = {self._place_of(header): header for header in in_use}
        claimed = [(*place, headers.get(header, "capacity_bytes")) for place, header in self._header_at.items()]
        self.allocator = Allocator(arena.slabs, arena.slab_bytes, claimed)

    @property
    def used_bytes(self) -> int:
        return self.allocator.used_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.allocator.capacity_bytes

    def fits_ever(self, payload_bytes: int, meta_bytes: int) -> bool:
        return block_bytes(payload_bytes, meta_bytes) <= self._arena.slab_bytes

    def reserve(self, payload_bytes: int, meta_bytes: int, writer: Writer) -> int | None:
        """Header of a new RESERVED block, or None if there is no room now."""
        if not self.headers.has_free:
            return None
        size = block_bytes(payload_bytes, meta_bytes)
        place = self.allocator.allocate(size)
        if place is None:
            return None
        header = self.headers.take(*place, size, payload_bytes, writer.session, writer.reservation)
        self._header_at[place] = header
        return header

    def in_the_way(self, payload_bytes: int, meta_bytes: int, cost: Callable[[int, int], float | None]) -> list[int]:
        """Headers of blocks that should go for a new one because free space is in pieces; empty: it is not, or they
        have to stay. `cost(header, bytes)` as for the allocator."""
        size = block_bytes(payload_bytes, meta_bytes)
        free = self.allocator.free_bytes - size
        if not self.headers.has_free or free < _SCATTERED_SHARE * self.capacity_bytes:
            return []
        places = self.allocator.in_the_way(size, lambda place, taken: cost(self._header_at[place], taken))
        return [self._header_at[place] for place in places]

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

    def is_sound(self, header: int) -> bool:
        """A header in use: its block is where it says, as large as it says."""
        place, capacity = self._place_of(header), self.headers.get(header, "capacity_bytes")
        mine = self._header_at.get(place) == header and self.allocator.size_of(*place) == capacity
        return mine and self.headers.get(header, "payload_bytes") <= capacity

    def is_ownerless(self, place: Place) -> bool:
        """No header answers for the block at this place."""
        header = self._header_at.get(place)
        if header is None or self.headers.state_word(header) == BlockState.FREE:
            return True
        # Or that header has been freed and taken again since, for another place.
        now = self._place_of(header)
        return now != place and self._header_at.get(now) == header

    def reclaim(self, place: Place) -> None:
        """Frees a block that is ownerless."""
        self._header_at.pop(place, None)
        self.allocator.free(*place)

    def _place_of(self, header: int) -> Place:
        return self.headers.get(header, "slab"), self.headers.get(header, "offset")

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
        place = self._place_of(header)
        self.headers.free(header)
        if self._header_at.get(place) == header:
            del self._header_at[place]
            self.allocator.free(*place)
        else:
            _log.error("a header named a place that is not its own; kvblend check --fix frees its block", header=header)


def block_bytes(payload_bytes: int, meta_bytes: int) -> int:
    """What a block takes of the arena."""
    return page_round(meta_offset(payload_bytes) + meta_bytes + names.ROOM_BYTES)
