"""Selective prefill: compute what is new, repair a chosen part of what is reused, keep the rest.

The KV buffer already holds retrieved KV, keys rotated to their place in this prompt. New and chosen tokens run
through all layers and write their KV; each attends to the KV of all tokens before it, fresh or reused.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from kvblend.blend.decoder import Decoder
from kvblend.blend.question import question_attention
from kvblend.blend.rows import Rows
from kvblend.blend.select import Candidates, Selector, choose

Sources = npt.NDArray[np.uint8]


class Source(IntEnum):
    """Where a token's KV comes from."""

    NEW = 0
    PREFIX = 1
    SEGMENT = 2
    RECOMPUTED = 3


@dataclass(frozen=True)
class Prefill:
    """logits: [query_tokens, vocabulary] of the prompt's last tokens. sources: [n] `Source` of every token."""

    logits: torch.Tensor
    sources: Sources


@torch.inference_mode()
def blended_prefill(
    decoder: Decoder, tokens: torch.Tensor, kv: torch.Tensor, sources: Sources, selector: Selector, query_tokens: int
) -> Prefill:
    """Computes NEW tokens and the chosen SEGMENT tokens; PREFIX tokens are never touched.

    tokens: [n] int64. kv: [layers, 2, n, kv_heads, size], filled where sources is PREFIX or SEGMENT; written in
    place. sources: [n], NEW, PREFIX or SEGMENT.

    Raises:
        ValueError: the last `query_tokens` tokens are not all NEW; their logits need all layers.
    """
    if not 0 < query_tokens <= len(sources) or (sources[-query_tokens:] != Source.NEW).any():
        raise ValueError(f"the last {query_tokens} of {len(sources)} tokens must be new")
    marks = torch.from_numpy(sources.astype(np.int64))
    needed, reused = marks == Source.NEW, marks == Source.SEGMENT
    chosen = torch.empty(0, dtype=torch.int64)
    first_layer = 0
    if selector.fraction * int(reused.sum()) >= 1:
        attention = question_attention(decoder, tokens, kv, ~needed) if selector.uses_attention else None
        everything = Rows.embed(decoder, tokens, torch.nonzero(needed | reused)[:, 0])
        deviation = _probe(everything, kv, reused, selector.probe_layer) if selector.probe_layer else None
        candidates = torch.nonzero(reused)[:, 0]
        paid = None if attention is None else attention[candidates]
        chosen = candidates[choose(selector, Candidates(run_offsets(candidates), paid, deviation))]
        needed[chosen] = True
        rows = everything.keep(torch.nonzero(needed[everything.positions])[:, 0])
        first_layer = selector.probe_layer
    else:
        rows = Rows.embed(decoder, tokens, torch.nonzero(needed)[:, 0])
    rows.run_all(kv, first_layer)
    result = sources.copy()
    result[chosen.numpy()] = Source.RECOMPUTED
    return Prefill(decoder.logits(rows.hidden[-query_tokens:]), result)


def _probe(rows: Rows, kv: torch.Tensor, reused: torch.Tensor, layer: int) -> torch.Tensor:
    """[m] float32: how far stored K and V of the reused tokens are from fresh ones at `layer`.

    Computes the layers below for all rows. K and V of `layer` itself are exact by then, so they stay for all.
    """
    for below in range(layer):
        rows.run(below, kv)
    candidates = torch.nonzero(reused)[:, 0]
    stored = kv[layer, :, candidates]
    rows.write(layer, kv)
    fresh = kv[layer, :, candidates]
    return _distance(fresh[0], stored[0]) + _distance(fresh[1], stored[1])


def _distance(fresh: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """[m]: squared distances of [m, kv_heads, size], in units of the mean squared norm."""
    squared = (fresh.float() - stored.float()).square().sum(dim=(1, 2))
    return squared / fresh.float().square().sum(dim=(1, 2)).mean()


def run_offsets(positions: torch.Tensor) -> torch.Tensor:
    """[m] int64: tokens since the last gap in ascending `positions`."""
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[1:] = positions[1:] != positions[:-1] + 1
    return positions - torch.cummax(torch.where(starts, positions, 0), dim=0).values
