"""How much the question attends to each token that is already there."""

import torch

from kvblend.blend.decoder import Decoder

# Of a long question, the last tokens speak for all: they see the rest of it through their own context.
MAX_QUESTION_TOKENS = 64


def question_attention(decoder: Decoder, tokens: torch.Tensor, kv: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """[n] float32: attention of the prompt's last unknown tokens, summed over layers, heads and those tokens.

    tokens: [n] int64. kv: [layers, 2, n, kv_heads, size]; read where known [n] bool, and written at the question's
    own positions, which must be computed again afterwards. Other unknown tokens have no KV yet and are left out.
    """
    first = max(_trailing(~known), len(tokens) - MAX_QUESTION_TOKENS)
    rows = torch.arange(first, len(tokens), device=tokens.device)
    keys_at = torch.cat([torch.nonzero(known[:first])[:, 0], rows])
    visible = keys_at <= rows[:, None]
    hidden, rotary = decoder.embed(tokens[rows]), decoder.rotary(rows)
    paid = torch.zeros(len(keys_at), dtype=torch.float32, device=kv.device)
    for layer in range(decoder.layers):
        queries, keys, values = decoder.project(layer, hidden, rotary)
        kv[layer, 0, rows], kv[layer, 1, rows] = keys, values
        weights = _weights(queries * decoder.attention_scale, kv[layer, 0, keys_at], visible)
        paid += weights.sum(dim=(0, 1, 2), dtype=torch.float32)
        attended = torch.einsum("hgqk,khd->qhgd", weights, kv[layer, 1, keys_at])
        hidden = decoder.finish(layer, hidden, attended.reshape(queries.shape))
    attention = torch.zeros(len(tokens), dtype=torch.float32, device=kv.device)
    attention[keys_at] = paid
    return attention


def _trailing(flags: torch.Tensor) -> int:
    """Where the run of True at the end of `flags` begins."""
    unset = torch.nonzero(~flags)[:, 0]
    return int(unset[-1]) + 1 if len(unset) else 0


def _weights(queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Softmax weights [kv_heads, group, q, k] of queries [q, heads, size] over keys [k, kv_heads, size]."""
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys)
    return scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
