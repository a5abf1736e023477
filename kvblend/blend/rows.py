"""Tokens that are being computed, all at the same layer."""

import torch

from kvblend.blend.attention import CausalAttention
from kvblend.blend.decoder import Decoder


class Rows:
    """positions: [k] int64 ascending. hidden: [k, hidden], input of the layer that comes next."""

    def __init__(self, decoder: Decoder, positions: torch.Tensor, hidden: torch.Tensor) -> None:
        self._decoder = decoder
        self.positions = positions
        self.hidden = hidden
        self._rotary = decoder.rotary(positions)
        self._attention = CausalAttention(positions, decoder.attention_scale)

    @classmethod
    def embed(cls, decoder: Decoder, tokens: torch.Tensor, positions: torch.Tensor) -> "Rows":
        """The tokens [n] of a prompt at `positions`, in front of layer 0."""
        return cls(decoder, positions, decoder.embed(tokens[positions]))

    def keep(self, rows: torch.Tensor) -> "Rows":
        """Only these rows go on: [j] int64 ascending."""
        return Rows(self._decoder, self.positions[rows], self.hidden[rows])

    def write(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        """Writes fresh K and V of a layer into kv [layers, 2, n, kv_heads, size]; returns the queries."""
        queries, keys, values = self._decoder.project(layer, self.hidden, self._rotary)
        kv[layer, 0, self.positions] = keys
        kv[layer, 1, self.positions] = values
        return queries

    def run(self, layer: int, kv: torch.Tensor) -> None:
        """One whole layer: K and V, attention over the KV of everything before each token, MLP."""
        queries = self.write(layer, kv)
        attended = self._attention(queries, kv[layer, 0], kv[layer, 1])
        self.hidden = self._decoder.finish(layer, self.hidden, attended)

    def run_all(self, kv: torch.Tensor, first_layer: int = 0) -> None:
        for layer in range(first_layer, self._decoder.layers):
            self.run(layer, kv)
