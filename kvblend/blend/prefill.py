"""Selective prefill: compute what is new, repair a chosen part of what is reused, keep the rest.

The KV buffer already holds retrieved KV, keys rotated to their place in this prompt. New tokens run through
all layers; selected reused tokens run through all layers too and overwrite their KV; every computed token
attends to the KV of all tokens before it, fresh or reused.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from kvblend.blend.attention import CausalAttention
from kvblend.blend.decoder import Decoder
from kvblend.blend.select import Candidates, Selector

Sources = npt.NDArray[np.uint8]


class Source(IntEnum):
    """Where a token's KV comes from."""

    NEW = 0
    PREFIX = 1
    SEGMENT = 2
    RECOMPUTED = 3


@dataclass(frozen=True)
class Prefill:
    """logits: [query_tokens, vocabulary] of the prompt's last tokens. sources: [n], `Source` of every token."""

    logits: torch.Tensor
    sources: Sources


class _Rows:
    """The tokens that are being computed: positions [k] ascending, hidden states [k, hidden]."""

    def __init__(self, decoder: Decoder, positions: torch.Tensor, hidden: torch.Tensor) -> None:
        self._decoder = decoder
        self.positions = positions
        self.hidden = hidden
        self._rotary = decoder.rotary(positions)
        self._attention = CausalAttention(positions, decoder.attention_scale)

    def project(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._decoder.project(layer, self.hidden, self._rotary)

    def run(self, layer: int, kv: torch.Tensor) -> None:
        """One layer: fresh K and V go into kv [layers, 2, n, kv_heads, size], then attention and MLP."""
        queries, keys, values = self.project(layer)
        kv[layer, 0, self.positions] = keys
        kv[layer, 1, self.positions] = values
        attended = self._attention(queries, kv[layer, 0], kv[layer, 1])
        self.hidden = self._decoder.finish(layer, self.hidden, attended)

    def keep(self, rows: torch.Tensor) -> "_Rows":
        return _Rows(self._decoder, self.positions[rows], self.hidden[rows])


def deviation(fresh: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """[m] float32: squared difference over the mean squared norm of `fresh` [m, kv_heads, size]."""
    difference = (fresh - stored).float().square().sum(dim=(1, 2))
    return difference / fresh.float().square().sum(dim=(1, 2)).mean()


def segment_offsets(positions: torch.Tensor) -> torch.Tensor:
    """[m] int64: tokens since the last gap in ascending `positions`."""
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[1:] = positions[1:] != positions[:-1] + 1
    return positions - torch.cummax(torch.where(starts, positions, 0), dim=0).values


@torch.inference_mode()
def blended_prefill(
    decoder: Decoder, tokens: torch.Tensor, kv: torch.Tensor, sources: Sources, selector: Selector, query_tokens: int
) -> Prefill:
    """Computes NEW tokens and the selected SEGMENT tokens; PREFIX tokens are never touched.

    tokens: [n] int64. kv: [layers, 2, n, kv_heads, size], filled where sources is PREFIX or SEGMENT; written in
    place. sources: [n], NEW, PREFIX or SEGMENT; the last `query_tokens` must be NEW.
    """
    marks = torch.from_numpy(sources.astype(np.int64))
    reused = marks == Source.SEGMENT
    needed = marks == Source.NEW
    layer = 0
    probed: _Rows | None = None
    deviations = None
    if reused.any() and selector.probe_layer:
        positions = torch.nonzero(reused | needed)[:, 0]
        probed = _Rows(decoder, positions, decoder.embed(tokens[positions]))
        for layer in range(selector.probe_layer):
            probed.run(layer, kv)
        layer = selector.probe_layer
        rows = reused[positions]
        _, keys, values = probed.project(layer)
        at = positions[rows]
        deviations = deviation(keys[rows], kv[layer, 0, at]) + deviation(values[rows], kv[layer, 1, at])
    candidates = torch.nonzero(reused)[:, 0]
    chosen = candidates[selector.select(Candidates(segment_offsets(candidates), deviations))]
    needed[chosen] = True
    if probed is not None:
        active = probed.keep(torch.nonzero(needed[probed.positions])[:, 0])
    else:
        positions = torch.nonzero(needed)[:, 0]
        active = _Rows(decoder, positions, decoder.embed(tokens[positions]))
    for layer in range(layer, decoder.layers):
        active.run(layer, kv)
    result = sources.copy()
    result[chosen.numpy()] = Source.RECOMPUTED
    return Prefill(decoder.logits(active.hidden[-query_tokens:]), result)
