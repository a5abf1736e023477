"""Token arrays as they travel: `bytes` of little-endian u32."""

import sys
from array import array

import numpy as np
import numpy.typing as npt

from services.common.errors import KvblendError

TokenArray = npt.NDArray[np.uint32]

TOKEN_BYTES = 4


def decode_tokens(data: bytes, *, field: str = "tokens", allow_empty: bool = False) -> TokenArray:
    """Tokens of a message field, [n] u32, without a copy.

    Raises:
        KvblendError: INVALID_TOKENS if the bytes are not whole tokens, EMPTY_PROMPT if there are none.
    """
    if len(data) % TOKEN_BYTES:
        raise KvblendError(
            "INVALID_TOKENS", f"{field} has {len(data)} bytes; tokens are little-endian u32, 4 bytes each"
        )
    if not data and not allow_empty:
        raise KvblendError("EMPTY_PROMPT", f"{field} is empty; at least one token is needed")
    return np.frombuffer(data, dtype="<u4")


def encode_u32(values: npt.ArrayLike) -> bytes:
    """Little-endian u32 bytes of any integer sequence (tokens, block ids, lengths)."""
    if isinstance(values, list | tuple):
        # A third of numpy's time, and a lookup's answer has a dozen of these.
        return _little_endian(array("I", values))
    return np.ascontiguousarray(values, dtype="<u4").tobytes()


def _little_endian(numbers: "array[int]") -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
