"""Which reused tokens to recompute.

KV computed behind other text differs from what this prompt would have given. A few tokens carry most of
that error: those whose K and V at an early layer already differ most, and the first ones of each segment.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Candidates:
    """The m reused tokens that a selector chooses from, in order of position.

    offsets: [m] int64, tokens since the start of the token's segment.
    deviation: [m] float32, how far the token's KV is from what this prompt gives at the probed layer;
    None for a selector that asked for no probe.
    """

    offsets: torch.Tensor
    deviation: torch.Tensor | None


class Selector(Protocol):
    """Another way to choose: say which layer to probe, then pick.

    `probe_layer`: fresh K and V of this layer are compared with the stored ones, for which all layers below
    it are computed for every candidate; 0 means that positions alone decide.
    """

    @property
    def probe_layer(self) -> int: ...

    def select(self, candidates: Candidates) -> torch.Tensor:
        """Indices into the candidates, ascending: [k] int64."""


def count_of(fraction: float, candidates: int) -> int:
    """Raises ValueError for a fraction outside 0 to 1."""
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"recompute is {fraction}; a fraction from 0 to 1 is needed")
    return int(fraction * candidates)


@dataclass(frozen=True)
class ByDeviation:
    fraction: float
    probe_layer: int = 1

    def select(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.deviation is not None
        count = count_of(self.fraction, len(candidates.offsets))
        return torch.sort(torch.topk(candidates.deviation, count).indices).values


@dataclass(frozen=True)
class SegmentStarts:
    fraction: float
    probe_layer: int = 0

    def select(self, candidates: Candidates) -> torch.Tensor:
        count = count_of(self.fraction, len(candidates.offsets))
        return torch.sort(torch.argsort(candidates.offsets, stable=True)[:count]).values
