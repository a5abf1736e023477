"""Token ranges of a prompt, and their arithmetic: as sorted columns, or as one flag a token."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvblend.v1 import agent_pb2 as pb
from services.common.columns import Numbers
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


@dataclass(frozen=True)
class Ranges:
    """Tokens [firsts[i], ends[i]), [n] each: ascending, none empty, none touching the next."""

    firsts: Numbers
    ends: Numbers

    @classmethod
    def joined(cls, firsts: Numbers, ends: Numbers) -> "Ranges":
        """Of ranges in any order, which may overlap, touch or be empty."""
        some = firsts < ends
        order = np.argsort(firsts[some], kind="stable")
        firsts, reached = firsts[some][order], np.maximum.accumulate(ends[some][order])
        starts = np.flatnonzero(np.append(True, firsts[1:] > reached[:-1])[: len(firsts)])
        return cls(firsts[starts], reached[np.append(starts[1:], len(firsts))[: len(starts)] - 1])

    @property
    def tokens(self) -> int:
        return int((self.ends - self.firsts).sum())

    def without(self, firsts: Numbers, ends: Numbers) -> "Ranges":
        """What is left when these, which ascend, do not overlap and lie inside, are taken out."""
        return Ranges.joined(np.sort(np.append(self.firsts, ends)), np.sort(np.append(self.ends, firsts)))

    def messages(self) -> list[pb.TokenRange]:
        pairs = zip(self.firsts.tolist(), self.ends.tolist(), strict=True)
        return [pb.TokenRange(first=first, length=end - first) for first, end in pairs]


NO_RANGES = Ranges(np.empty(0, np.int64), np.empty(0, np.int64))


def mask_of(ranges: Iterable[Range], tokens: int) -> Mask:
    """Flags of a prompt of `tokens` tokens: set inside the ranges, which lie inside the prompt."""
    mask = np.zeros(tokens, np.bool_)
    for item in ranges:
        mask[item.first : item.end] = True
    return mask


def parse_ranges(ranges: Iterable[pb.TokenRange], tokens: int) -> list[Range]:
    """Raises KvblendError INVALID_ARGUMENT for a range that ends behind the prompt."""
    parsed = [Range(item.first, item.first + item.length) for item in ranges]
    for item in parsed:
        if item.end > tokens:
            raise KvblendError("INVALID_ARGUMENT", f"a range ends at token {item.end} of {tokens}")
    return parsed
