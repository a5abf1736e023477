"""Layout declarations for the arrangements of KV memory that engines use.

An arrangement is written as the order of its axes, outermost first: l layer, c K/V, b block, t token in
the block, h head, e element. Without `l` every layer has a buffer of its own, without `c` so have K and V.
"""

from dataclasses import dataclass
from math import prod

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common

# name -> (axes of K, axes of V)
ARRANGEMENTS: dict[str, tuple[str, str]] = {
    # One buffer [layers, 2, slots, heads, size]; a slot for each token, no paging.
    "contiguous": ("lcbthe", "lcbthe"),
    # K and V buffers of each layer, [blocks, block_tokens, heads, size].
    "paged_nhd": ("bthe", "bthe"),
    # A buffer for each layer, [2, blocks, block_tokens, heads, size].
    "paged_nhd_kv_outer": ("cbthe", "cbthe"),
    # A buffer for each layer, [blocks, 2, block_tokens, heads, size].
    "paged_nhd_kv_inner": ("bcthe", "bcthe"),
    # K and V buffers of each layer, [blocks, heads, block_tokens, size].
    "paged_hnd": ("bhte", "bhte"),
    # A buffer for each layer, [blocks, 2, heads, block_tokens, size].
    "paged_hnd_kv_inner": ("bchte", "bchte"),
    # A buffer for each layer, [blocks, block_tokens, heads, 2 * size]: K beside V in each head.
    "interleaved": ("bthce", "bthce"),
    # vLLM on CPU: for each (block, head) K transposed [size, block_tokens], then V [block_tokens, size].
    "vllm_cpu": ("bhcet", "bhcte"),
}

DTYPE_BYTES: dict[int, int] = {
    common.DTYPE_FLOAT32: 4,
    common.DTYPE_FLOAT16: 2,
    common.DTYPE_BFLOAT16: 2,
    common.DTYPE_FLOAT8_E4M3: 1,
    common.DTYPE_FLOAT8_E5M2: 1,
}

_KINDS = (pb.PLANE_KIND_KEY, pb.PLANE_KIND_VALUE)


@dataclass(frozen=True)
class KvShape:
    """KV memory of one layer group on one rank, in tokens, heads and elements."""

    layers: int
    heads: int
    head_size: int
    blocks: int
    block_tokens: int
    dtype: common.Dtype

    @classmethod
    def contiguous(cls, layers: int, heads: int, head_size: int, slots: int, dtype: common.Dtype) -> "KvShape":
        """One slot for each token."""
        return cls(layers, heads, head_size, 1, slots, dtype)

    def sizes(self) -> dict[str, int]:
        return {
            "l": self.layers,
            "c": 2,
            "b": self.blocks,
            "t": self.block_tokens,
            "h": self.heads,
            "e": self.head_size,
        }


def buffer_shapes(arrangement: str, shape: KvShape) -> list[tuple[int, ...]]:
    """Shape of each buffer in handle order, in elements, as K's axes are written."""
    axes, _ = ARRANGEMENTS[arrangement]
    sizes = shape.sizes()
    return [tuple(sizes[axis] for axis in axes)] * _buffers(axes, shape)


def buffer_bytes(arrangement: str, shape: KvShape) -> list[int]:
    """Bytes of each buffer, in handle order."""
    return [prod(dims) * DTYPE_BYTES[shape.dtype] for dims in buffer_shapes(arrangement, shape)]


def build_layout(arrangement: str, shape: KvShape, *, group: int = 0, first_handle: int = 0) -> pb.KvLayout:
    """The declaration of a named arrangement; its buffers are handles `first_handle` and following.

    Layers are outer and K/V inner in the order of the handles. Layouts of several groups with the same
    blocks are joined by extending the first one's `planes`.
    """
    layout = pb.KvLayout(block_tokens=shape.block_tokens, blocks=shape.blocks, dtype=shape.dtype)
    for layer in range(shape.layers):
        for index, axes in enumerate(ARRANGEMENTS[arrangement]):
            strides = _strides(axes, shape)
            layout.planes.add(
                group=group,
                layer=layer,
                kind=_KINDS[index],
                handle=first_handle + _buffer_index(axes, layer, index),
                byte_offset=(layer * strides["l"] + index * strides["c"]) * DTYPE_BYTES[shape.dtype],
                block_stride=strides["b"],
                token_stride=strides["t"],
                head_stride=strides["h"],
                element_stride=strides["e"],
                heads=shape.heads,
                head_size=shape.head_size,
            )
    return layout


def _strides(axes: str, shape: KvShape) -> dict[str, int]:
    """Elements from one index of an axis to the next; 0 for an axis that separate buffers carry."""
    strides = dict.fromkeys("lcbthe", 0)
    step = 1
    for axis in reversed(axes):
        strides[axis] = step
        step *= shape.sizes()[axis]
    return strides


def _buffers(axes: str, shape: KvShape) -> int:
    return prod(shape.sizes()[axis] for axis in "lc" if axis not in axes)


def _buffer_index(axes: str, layer: int, kind: int) -> int:
    index = 0 if "l" in axes else layer
    return index if "c" in axes else 2 * index + kind
