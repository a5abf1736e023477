"""Slots for entries' ids and for their tokens, taken and given back in batches (kernels/slots.py)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from services.matcher.kernels.slots import give_slots, take_slots
from services.matcher.kernels.types import I64, NONE, Slots
from services.matcher.reservation import Reservation

# Empty slabs that keep their memory: a table whose size goes up and down need not fetch it each time.
_WARM_SLABS = 16


class Slabs:
    """`slabs` slabs of `slab_size` units, slots of at least `smallest` and at most `largest` units.

    release: called with the first and the last + 1 unit of a slab whose memory can go back.
    """

    def __init__(
        self, slabs: int, slab_size: int, smallest: int, largest: int, release: Callable[[int, int], None]
    ) -> None:
        self._slab_size = slab_size
        self._release = release
        self._stacks = Reservation((slabs, slab_size // smallest), np.uint16)
        self._links = Reservation((6, slabs), np.int32)
        stacks: Any = self._stacks.array
        sizes, used, free, next_slab, prior_slab, free_slabs = self._links.array
        self._slots = Slots(
            sizes=sizes,
            used=used,
            free=free,
            next_slab=next_slab,
            prior_slab=prior_slab,
            open_slabs=np.full(largest + 1, NONE, dtype=np.int32),
            stacks=stacks,
            free_slabs=free_slabs,
            totals=np.zeros(3, dtype=np.int64),
        )
        # Units in slots that are taken.
        self.used = 0

    @property
    def begun(self) -> int:
        """Units before this one have been in use at some time; none behind."""
        return int(self._slots.totals[0]) * self._slab_size

    @property
    def bytes(self) -> int:
        return int(self._slots.totals[0]) * (6 * 4 + 2 * int(self._stacks.array.shape[1]))

    def take(self, size: int, count: int) -> I64:
        """Offsets of slots of `size` units, [count] or fewer: that much room there was."""
        offsets = np.empty(count, dtype=np.int64)
        taken = take_slots(self._slots, size, self._slab_size, offsets)
        self.used += int(taken) * size
        return offsets[:taken]

    def units(self, offsets: I64) -> int:
        """How many units these slots have together."""
        return int(self._slots.sizes[offsets // self._slab_size].sum())

    def give(self, offsets: I64) -> None:
        """Frees slots, whatever their sizes."""
        if not len(offsets):
            return
        self.used -= self.units(offsets)
        emptied = np.empty(len(offsets), dtype=np.int64)
        count = give_slots(self._slots, self._slab_size, offsets, emptied)
        if self._slots.totals[1] > _WARM_SLABS:
            for slab in emptied[:count].tolist():
                self._release(slab * self._slab_size, (slab + 1) * self._slab_size)
