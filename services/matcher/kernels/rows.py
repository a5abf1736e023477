"""What rows say that needs a little arithmetic.

Arrays are passed, not tuples of arrays: each array taken out of a tuple costs the compiled code a counted reference.
"""

import numpy as np
from numba import njit

from services.matcher.kernels.types import CLASS, I32, LENGTH, OFFSET, OWNERS, ROW_PLANES, SLOT_TOKENS, U32, Reader


@njit(nogil=True, cache=True)
def start_of(rows: I32, entry: int) -> int:
    """Where its tokens begin in the pool; only for an entry whose tokens are kept."""
    return np.int64(rows[entry, OFFSET]) * SLOT_TOKENS


@njit(nogil=True, cache=True)
def length_of(rows: I32, entry: int) -> int:
    return np.int64(rows[entry, LENGTH])


@njit(nogil=True, cache=True)
def owners_of(rows: I32, owners: U32, plane: int, entry: int) -> np.uint32:
    """One word of the bits of those who have the entry."""
    if plane < ROW_PLANES:
        return np.uint32(rows[entry, OWNERS + plane])
    return owners[plane - ROW_PLANES, entry]


@njit(nogil=True, cache=True)
def set_owners(rows: I32, owners: U32, plane: int, entry: int, word: np.uint32) -> None:
    if plane < ROW_PLANES:
        rows[entry, OWNERS + plane] = np.int32(word)
    else:
        owners[plane - ROW_PLANES, entry] = word


@njit(nogil=True, cache=True)
def reaches(rows: I32, owners: U32, entry: int, reader: Reader) -> bool:
    """Whether one of the reader's owners has the entry."""
    in_row = (np.uint32(rows[entry, OWNERS]) & reader.first) | (np.uint32(rows[entry, OWNERS + 1]) & reader.second)
    if in_row:
        return True
    for index in range(reader.others):  # noqa: SIM110 -- compiled: a generator would be slower
        if owners[reader.planes[index] - ROW_PLANES, entry] & reader.masks[index]:
            return True
    return False


@njit(nogil=True, cache=True)
def serves(rows: I32, owners: U32, entry: int, reader: Reader) -> bool:
    """Whether it reaches the reader and its context class may serve."""
    return bool((reader.classes >> np.int64(rows[entry, CLASS])) & 1) and reaches(rows, owners, entry, reader)
