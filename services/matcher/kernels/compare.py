"""Comparing tokens: what decides, always."""

import numpy as np
from numba import njit

from services.matcher.kernels.types import U32

# Compared at a time, without a branch: vectorised.
_STEP = 64


@njit(nogil=True, cache=True)
def agreeing(pool: U32, offset: int, query: U32, at: int, limit: int) -> int:
    """How many tokens from pool[offset] on stand in the query from `at` on; at most `limit`."""
    stored = pool[offset : offset + limit]
    asked = query[at : at + limit]
    size = stored.shape[0]
    index = 0
    while index + _STEP <= size:
        difference = np.uint32(0)
        for step in range(_STEP):
            difference |= stored[index + step] ^ asked[index + step]
        if difference:
            break
        index += _STEP
    while index < size and stored[index] == asked[index]:
        index += 1
    return index
