"""Which reused tokens to recompute.

KV computed behind other text differs from what this prompt would have given, by a little on most tokens. What
counts is the error that reaches the question: a token's part in it grows with how much the question attends to the
token and with how far off its KV is. Mean KL to full prefill over the question's tokens (over 24 tokens of the
answer), SmolLM2-135M in float32, ten prompts of six documents (Python sources, prose) behind a shared prefix, 1,900
to 2,100 tokens; with nothing recomputed it is 0.103 (0.083):

    share recomputed      5 %             10 %            15 %
    ByDeviation           0.089 (0.073)   0.080 (-)       0.072 (0.061)
    ByAttention           0.044 (0.060)   0.025 (0.045)   0.018 (0.037)
    ByInfluence           0.042 (0.056)   0.024 (0.044)   0.015 (0.037)
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Candidates:
    """The m reused tokens that a selector chooses from, in order of position.

    offsets: [m] int64, tokens since the start of the token's run of reused tokens.
    attention: [m] float32, what the question's tokens pay to it, over all layers and heads.
    deviation: [m] float32, squared distance of its K and V from what this prompt gives at the probed layer.
    Measures that the selector did not ask for are None.
    """

    offsets: torch.Tensor
    attention: torch.Tensor | None = None
    deviation: torch.Tensor | None = None


class Selector(Protocol):
    """A way to choose, and what it wants measured first.

    `fraction`: of the candidates, at most that many are chosen; 0 measures nothing.
    `probe_layer`: the layer whose fresh K and V are compared with the stored ones; all layers below it are then
    computed for every candidate. 0: no comparison.
    `uses_attention`: the question's tokens run through all layers once more, over the KV as it was reused.
    """

    @property
    def fraction(self) -> float: ...

    @property
    def probe_layer(self) -> int: ...

    @property
    def uses_attention(self) -> bool: ...

    def scores(self, candidates: Candidates) -> torch.Tensor:
        """[m] float: the highest are recomputed."""


@dataclass(frozen=True)
class _Fraction:
    """Raises ValueError for a fraction outside 0 to 1."""

    fraction: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0:
            raise ValueError(f"recompute is {self.fraction}; a fraction from 0 to 1 is needed")


@dataclass(frozen=True)
class ByInfluence(_Fraction):
    """Attention that the question pays, times the distance of K and V."""

    probe_layer: int = 1
    uses_attention: bool = True

    def scores(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.attention is not None
        assert candidates.deviation is not None
        return candidates.attention * candidates.deviation.sqrt()


@dataclass(frozen=True)
class ByAttention(_Fraction):
    """Attention alone: no layer is computed for tokens that are then kept."""

    probe_layer: int = 0
    uses_attention: bool = True

    def scores(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.attention is not None
        return candidates.attention


@dataclass(frozen=True)
class ByDeviation(_Fraction):
    """Distance of K and V alone: the choice does not depend on the question."""

    probe_layer: int = 1
    uses_attention: bool = False

    def scores(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.deviation is not None
        return candidates.deviation


@dataclass(frozen=True)
class SegmentStarts(_Fraction):
    """The first tokens of each segment, which lost the most context."""

    probe_layer: int = 0
    uses_attention: bool = False

    def scores(self, candidates: Candidates) -> torch.Tensor:
        return -candidates.offsets.float()


def choose(selector: Selector, candidates: Candidates) -> torch.Tensor:
    """Indices of the chosen candidates, ascending: [floor(fraction * m)] int64. Of equals, the earlier ones."""
    count = int(selector.fraction * len(candidates.offsets))
    best = torch.argsort(selector.scores(candidates), descending=True, stable=True)[:count]
    return torch.sort(best).values
