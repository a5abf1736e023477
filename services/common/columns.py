"""Columns of messages: `bytes` of little-endian numbers, one for each of N items. Also of names of 32 bytes."""

import numpy as np
import numpy.typing as npt

from services.common.errors import KvblendError
from services.common.identity import HASH_BYTES

Numbers = npt.NDArray[np.int64]


def u32s(column: bytes) -> Numbers:
    """[n]; raises KvblendError INVALID_ARGUMENT if the bytes are no whole numbers."""
    return _numbers(column, "<u4")


def u64s(column: bytes) -> Numbers:
    """[n], of numbers below 2**63; raises as `u32s`."""
    return _numbers(column, "<u8")


def _numbers(column: bytes, kind: str) -> Numbers:
    if len(column) % np.dtype(kind).itemsize:
        raise KvblendError("INVALID_ARGUMENT", f"a column of {kind} has {len(column)} bytes")
    return np.frombuffer(column, kind).astype(np.int64)


def hashes(column: bytes) -> list[bytes]:
    """The whole names in the column."""
    return [
        column[first : first + HASH_BYTES] for first in range(0, len(column) // HASH_BYTES * HASH_BYTES, HASH_BYTES)
    ]


def encode_u64(values: npt.ArrayLike) -> bytes:
    """Little-endian u64 bytes of any integer sequence."""
    return np.ascontiguousarray(values, dtype="<u8").tobytes()
