"""What is moved: the KV of an 8 B model, 32 MiB a chunk."""

import numpy as np

from kvblend.layouts import KvShape
from kvblend.v1 import common_pb2 as common

LAYERS, HEADS, SIZE = 32, 8, 128
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
# One for each layer.
SEMAPHORES = LAYERS
CHUNK_BYTES = LAYERS * 2 * CHUNK_TOKENS * HEADS * SIZE * 2
DTYPE = common.DTYPE_BFLOAT16
# Chunks of a transfer; by how many positions K is moved; bytes of a staging slot.
TRANSFERS = (1, 8, 32, 128)
SHIFT = 12_345
STAGING_BYTES = 32 << 20


def kv_shape(arrangement: str, chunks: int) -> KvShape:
    tokens = chunks * CHUNK_TOKENS
    if arrangement == "contiguous":
        return KvShape.contiguous(LAYERS, HEADS, SIZE, tokens, DTYPE)
    return KvShape(LAYERS, HEADS, SIZE, tokens // BLOCK_TOKENS, BLOCK_TOKENS, DTYPE)


def model_space() -> common.ModelSpace:
    inv_freq = 1.0 / 500_000.0 ** (np.arange(0, SIZE, 2, dtype=np.float64) / SIZE)
    rope = common.Rope(style=common.ROPE_STYLE_NEOX, inv_freq=inv_freq.astype("<f8").tobytes())
    group = common.LayerGroup(
        attention=common.ATTENTION_KIND_FULL, layers=LAYERS, kv_heads=HEADS, head_size=SIZE, rope=rope
    )
    return common.ModelSpace(weights_fingerprint=b"b" * 32, kv_dtype=DTYPE, groups=[group], chunk_tokens=CHUNK_TOKENS)


def block_table(chunks: int, seed: int = 1) -> list[int]:
    """Blocks in a random order, as an engine that has run for a while hands them out."""
    table: list[int] = np.random.default_rng(seed).permutation(chunks * CHUNK_TOKENS // BLOCK_TOKENS).tolist()
    return table
