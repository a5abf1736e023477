"""Arrays of their final size whose memory is taken page by page, when it is first written."""

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

# Linux's flag; Python names it from 3.13 on.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


# Arrays from this size on get large pages.
_LARGE = 1 << 20


def zeroed(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A zeroed array; a large one on large pages."""
    if int(np.prod(shape)) * np.dtype(dtype).itemsize < _LARGE:
        return np.zeros(shape, dtype=dtype)
    return Reservation(shape, dtype).array


class Reservation:
    """A zeroed array at one address for good: readers never see it move, growing copies nothing."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        size = max(1, int(np.prod(shape))) * self._dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._map = mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        # Entries are met in no order: with small pages each would cost a walk through the page tables, too.
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array: npt.NDArray[np.generic] = np.frombuffer(self._map, self._dtype, int(np.prod(shape))).reshape(shape)

    def give_back(self, first: int, last: int) -> None:
        """Rows [first, last) are zero again and take no memory, as far as they fill whole pages."""
        row = self._dtype.itemsize * int(np.prod(self.array.shape[1:]))
        start = -(-first * row // mmap.PAGESIZE) * mmap.PAGESIZE
        end = last * row // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
