"""Causal attention of scattered queries over one contiguous KV buffer."""

import torch
import torch.nn.functional as F

# Queries of one call to the attention kernel. Each block of queries sees only the keys up to its last
# position; smaller blocks waste fewer masked keys, larger ones keep the kernel busy.
BLOCK_QUERIES = 64


class CausalAttention:
    """Attention for ascending query positions [n] over keys of positions 0, 1, 2, ...

    The masks are made once and serve every layer.
    """

    def __init__(self, positions: torch.Tensor, scale: float) -> None:
        self._scale = scale
        self._blocks: list[tuple[slice, int, torch.Tensor | None]] = []
        for first in range(0, len(positions), BLOCK_QUERIES):
            block = positions[first : first + BLOCK_QUERIES]
            keys = int(block[-1]) + 1
            visible = torch.arange(keys, device=positions.device) <= block[:, None] if len(block) > 1 else None
            self._blocks.append((slice(first, first + len(block)), keys, visible))

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[n, heads, size] for queries [n, heads, size], keys and values [slots, kv_heads, size].

        Keys and values are read where they are: neither copied nor repeated for grouped heads.
        """
        attended = torch.empty_like(queries)
        for rows, seen, visible in self._blocks:
            attended[rows] = F.scaled_dot_product_attention(
                queries[rows].transpose(0, 1)[None],
                keys[:seen].transpose(0, 1)[None],
                values[:seen].transpose(0, 1)[None],
                attn_mask=visible,
                scale=self._scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return attended
