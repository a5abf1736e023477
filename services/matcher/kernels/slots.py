"""A slab allocator: slots of a few sizes, cut from slabs of one size. All steps take constant time.

A slab serves one slot size while anything is in it; empty, it may serve any. So memory that one size gave up
is another's: no pattern of sizes strands it, and an empty slab can go back to the system.
"""

import numpy as np
from numba import njit

from services.matcher.kernels.types import I64, NONE, Slots

_BEGUN, _FREE, _IN_USE = 0, 1, 2


@njit(nogil=True, cache=True)
def _open_slab(slots: Slots, size: int, slab_size: int) -> int:
    """A slab without anything in it, now for slots of `size`; NONE if there is no room."""
    if slots.totals[_FREE] > 0:
        slots.totals[_FREE] -= 1
        slab = slots.free_slabs[slots.totals[_FREE]]
    elif slots.totals[_BEGUN] < len(slots.sizes):
        slab = np.int32(slots.totals[_BEGUN])
        slots.totals[_BEGUN] += 1
    else:
        return NONE
    slots.totals[_IN_USE] += 1
    slots.sizes[slab] = size
    slots.used[slab] = 0
    count = slab_size // size
    slots.free[slab] = count
    for index in range(count):
        slots.stacks[slab, index] = count - 1 - index
    _enlist(slots, slab)
    return int(slab)


@njit(nogil=True, cache=True)
def _enlist(slots: Slots, slab: int) -> None:
    size = slots.sizes[slab]
    head = slots.open_slabs[size]
    slots.next_slab[slab] = head
    slots.prior_slab[slab] = NONE
    if head != NONE:
        slots.prior_slab[head] = slab
    slots.open_slabs[size] = slab


@njit(nogil=True, cache=True)
def _delist(slots: Slots, slab: int) -> None:
    following = slots.next_slab[slab]
    preceding = slots.prior_slab[slab]
    if following != NONE:
        slots.prior_slab[following] = preceding
    if preceding != NONE:
        slots.next_slab[preceding] = following
    else:
        slots.open_slabs[slots.sizes[slab]] = following


@njit(nogil=True, cache=True)
def take_slots(slots: Slots, size: int, slab_size: int, out: I64) -> int:
    """Fills `out` with offsets of free slots; returns how many there was room for."""
    for index in range(len(out)):
        slab = slots.open_slabs[size]
        if slab == NONE:
            slab = _open_slab(slots, size, slab_size)
            if slab == NONE:
                return index
        slots.free[slab] -= 1
        slots.used[slab] += 1
        slot = np.int64(slots.stacks[slab, slots.free[slab]])
        if slots.free[slab] == 0:
            _delist(slots, slab)
        out[index] = np.int64(slab) * slab_size + slot * size
    return len(out)


@njit(nogil=True, cache=True)
def give_slots(slots: Slots, slab_size: int, offsets: I64, emptied: I64) -> int:
    """Frees slots. Slabs without anything in them are put into `emptied`; returns how many."""
    count = 0
    for offset in offsets:
        slab = offset // slab_size
        slot = (offset - slab * slab_size) // slots.sizes[slab]
        if slots.free[slab] == 0:
            _enlist(slots, slab)
        slots.stacks[slab, slots.free[slab]] = slot
        slots.free[slab] += 1
        slots.used[slab] -= 1
        if slots.used[slab] == 0:
            _delist(slots, slab)
            slots.free_slabs[slots.totals[_FREE]] = slab
            slots.totals[_FREE] += 1
            slots.totals[_IN_USE] -= 1
            emptied[count] = slab
            count += 1
    return count
