"""What an engine answers, and where each token's KV came from."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvblend.blend import Source, Sources
from kvblend.results import LookupResult

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Times are milliseconds.

    tokens: [m] u32, generated greedily, an end-of-text token included.
    logits: [question_tokens, vocabulary] of the prompt's last tokens; the last row chose tokens[0].
    sources: [n] u8, a `Source` for each token of the prompt. lookup: None where nothing was asked for.
    failed: (first, length, reason) of what was found but could not be retrieved, and was computed.
    """

    tokens: Tokens
    logits: torch.Tensor = field(repr=False)
    sources: Sources = field(repr=False)
    ttft_ms: float
    compute_ms: float
    lookup_ms: float = 0.0
    retrieve_ms: float = 0.0
    lookup: LookupResult | None = None
    failed: tuple[tuple[int, int, str], ...] = ()

    def count(self, source: Source) -> int:
        """Tokens of the prompt whose KV came from there; over all sources they add up to the prompt."""
        return int((self.sources == source).sum())


def runs_of(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(first, length) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return [(int(first), int(end - first)) for first, end in edges.reshape(-1, 2)]
