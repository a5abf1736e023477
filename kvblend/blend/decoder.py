"""What blending needs of a model: a decoder-only transformer, one layer at a time."""

from typing import Protocol

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]


class Decoder(Protocol):
    """The steps of one forward pass over n tokens, without a batch dimension.

    Keys are post-RoPE everywhere, as a KV cache holds them.
    """

    @property
    def layers(self) -> int: ...

    @property
    def attention_scale(self) -> float: ...

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n] int64 to hidden states [n, hidden]."""

    def rotary(self, positions: torch.Tensor) -> Rotary:
        """Tables (cos, sin) for positions [n], made once and used by every layer."""

    def project(
        self, layer: int, hidden: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [n, heads, size], keys and values [n, kv_heads, size] of one layer."""

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer behind its attention [n, heads, size]: hidden states [n, hidden] of the next layer."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary], from the last layer's hidden states."""
