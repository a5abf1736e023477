"""The memory of all entries: columns by id, and the pool of tokens, reserved once for as much as the limit allows."""

from functools import partial
from typing import Any

import numpy as np

from services.matcher.kernels.types import ROW, ROW_PLANES, SLOT_TOKENS, Columns
from services.matcher.owners import PLANES
from services.matcher.reservation import Reservation
from services.matcher.slabs import Slabs

# Column -> (dtype, items of an entry).
_LAYOUT: dict[str, tuple[Any, int]] = {
    "rows": (np.int32, ROW),
    "windows": (np.uint16, 1),
    "claimed": (np.int64, 1),
    "names": (np.uint64, 4),
    "previous": (np.uint64, 4),
    "name_next": (np.int32, 1),
    "cohort_next": (np.int32, 1),
    "prior_sibling": (np.int32, 1),
    "prior_same": (np.int32, 1),
    "nodes": (np.int32, 1),
}
_ENTRY_BYTES = sum(int(np.dtype(dtype).itemsize) * items for dtype, items in _LAYOUT.values())

# 256 KiB of tokens; ids of a slab fill whole pages of every column.
_POOL_SLAB = 1 << 16
_ID_SLAB = 1 << 12
_LARGEST_TEXT = 1024
# Room above the limit: evicting waits for readers, and slabs are never quite full.
_SLACK = 1.5


def bytes_per_entry(planes: int) -> int:
    """Without its tokens and its place in the indexes."""
    return _ENTRY_BYTES + 4 * max(0, planes - ROW_PLANES)


class EntryColumns:
    """Arrays and allocators; memory is taken as it is used and goes back by whole slabs."""

    def __init__(self, memory_limit_bytes: int) -> None:
        room = int(_SLACK * memory_limit_bytes)
        id_slabs = 1 + room // (_ID_SLAB * _ENTRY_BYTES)
        pool_slabs = 2 + room // (4 * _POOL_SLAB)
        entries = id_slabs * _ID_SLAB
        self._columns = {
            name: Reservation((entries, items) if items > 1 else (entries,), dtype)
            for name, (dtype, items) in _LAYOUT.items()
        }
        self._owners = Reservation((PLANES - ROW_PLANES, entries), np.uint32)
        self._pool = Reservation((pool_slabs * _POOL_SLAB,), np.uint32)
        # Not a method of this object: a cycle would keep a replaced table's memory until a garbage collection.
        self.ids = Slabs(id_slabs, _ID_SLAB, 1, 1, partial(_give_back, list(self._columns.values())))
        self.pool = Slabs(pool_slabs, _POOL_SLAB, SLOT_TOKENS, _LARGEST_TEXT, self._pool.give_back)

    def columns(self, planes: int) -> Columns:
        """All columns, with so many planes of owners."""
        arrays: dict[str, Any] = {name: column.array for name, column in self._columns.items()}
        owners: Any = self._owners.array[: max(0, planes - ROW_PLANES)]
        pool: Any = self._pool.array
        return Columns(**arrays, owners=owners, pool=pool)


def _give_back(columns: list[Reservation], first: int, last: int) -> None:
    for column in columns:
        column.give_back(first, last)
