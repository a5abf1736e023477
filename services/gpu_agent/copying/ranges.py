"""Token ranges of a prompt, and their arithmetic as one flag a token."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvblend.v1 import agent_pb2 as pb
from services.common.errors import KvblendError

# One flag for each token of the prompt.
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Range:
    """Tokens [first, end)."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def message(self) -> pb.TokenRange:
        return pb.TokenRange(first=self.first, length=len(self))


def mask_of(ranges: Iterable[Range], tokens: int) -> Mask:
    """Flags of a prompt of `tokens` tokens: set inside the ranges, which lie inside the prompt."""
    mask = np.zeros(tokens, np.bool_)
    for item in ranges:
        mask[item.first : item.end] = True
    return mask


def ranges_of(mask: Mask) -> list[Range]:
    """The maximal stretches of set flags, ascending."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [Range(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


def parse_ranges(ranges: Iterable[pb.TokenRange], tokens: int) -> list[Range]:
    """Raises KvblendError INVALID_ARGUMENT for a range that ends behind the prompt."""
    parsed = [Range(item.first, item.first + item.length) for item in ranges]
    for item in parsed:
        if item.end > tokens:
            raise KvblendError("INVALID_ARGUMENT", f"a range ends at token {item.end} of {tokens}")
    return parsed
