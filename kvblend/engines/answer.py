"""What an engine answers, and where each token's KV came from."""

from dataclasses import dataclass, field

import torch

from kvblend.blend import Source, Sources
from kvblend.engines.reuse import Reuse
from kvblend.engines.tokens import Tokens
from kvblend.results import LookupResult


@dataclass(frozen=True)
class Answer:
    """tokens: [m] u32, generated greedily, an end-of-text token included.
    logits: [question_tokens, vocabulary] of the prompt's last tokens; the last row chose tokens[0].
    sources: [n] u8, a `Source` for each token of the prompt. ttft_ms: from the call to the first token.
    reuse: what the cache gave.
    """

    tokens: Tokens
    logits: torch.Tensor = field(repr=False)
    sources: Sources = field(repr=False)
    ttft_ms: float
    reuse: Reuse = field(repr=False)

    @property
    def lookup(self) -> LookupResult | None:
        """What was found, and why no more; None where nothing was asked for."""
        return self.reuse.lookup

    @property
    def failed(self) -> tuple[tuple[int, int, str], ...]:
        """(first, length, reason) of what was found but could not be retrieved, and was computed."""
        return self.reuse.failed

    @property
    def lookup_ms(self) -> float:
        return self.reuse.lookup_ms

    @property
    def retrieve_ms(self) -> float:
        return self.reuse.retrieve_ms

    @property
    def compute_ms(self) -> float:
        return self.ttft_ms - self.lookup_ms - self.retrieve_ms

    def count(self, source: Source) -> int:
        """Tokens of the prompt whose KV came from there; over all sources they add up to the prompt."""
        return int((self.sources == source).sum())
