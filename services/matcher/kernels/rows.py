"""What rows say that needs a little arithmetic.

Arrays are passed, not tuples of arrays: each array taken out of a tuple costs the compiled code a counted reference.
So does each array given to a function that is not inlined; what is asked for every occurrence is, and returns once.
"""

import numpy as np
from numba import njit

from services.matcher.kernels.types import (
    ALLOWED,
    CLASS,
    HOLDERS,
    I32,
    LENGTH,
    OFFSET,
    OTHERS,
    OWNERS,
    ROW_PLANES,
    SLOT_TOKENS,
    U32,
    Reader,
)


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


@njit(nogil=True, cache=True, inline="always")
def reaches(rows: I32, owners: U32, entry: int, reader: Reader) -> bool:
    """Whether one of the reader's owners has the entry."""
    held = np.uint32(rows[entry, OWNERS]) & reader[HOLDERS]
    held |= np.uint32(rows[entry, OWNERS + 1]) & reader[HOLDERS + 1]
    for pair in range(OTHERS, len(reader), 2):
        held |= owners[np.int64(reader[pair]) - ROW_PLANES, entry] & reader[pair + 1]
    return held != np.uint32(0)


@njit(nogil=True, cache=True, inline="always")
def serves(rows: I32, owners: U32, entry: int, reader: Reader) -> bool:
    """Whether it reaches the reader and its context class may serve."""
    allowed = (reader[ALLOWED] >> np.uint32(rows[entry, CLASS])) & np.uint32(1)
    return allowed & np.uint32(reaches(rows, owners, entry, reader)) != np.uint32(0)
