"""An engine's planes as the table that a kernel reads, and the constants that it is compiled for."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.gpu_agent.engines.layouts import Layout
from services.gpu_agent.engines.rope import RopeSpec

# Columns of a plane, in elements: where it begins (its address over the size of an element), its strides; 1 if
# it is rotated.
PLANE = ("begin", "block", "token", "head", "element", "is_key")

KEY_KINDS = (pb.PLANE_KIND_KEY, pb.PLANE_KIND_LATENT)

NO_ROPE, NEOX, GPTJ = 0, 1, 2
_STYLES = {common.ROPE_STYLE_NEOX: NEOX, common.ROPE_STYLE_GPTJ: GPTJ}

# What one program moves of a plane. Large enough to hide a load, small enough for many programs; and no more
# elements than of a 16-bit dtype, as those that are rotated are fp32 in its registers.
_TILE_BYTES = 32 << 10
_TILE_ELEMENTS = _TILE_BYTES // 2
_WIDEST_LOAD = 16


@dataclass(frozen=True)
class Constants:
    """What the kernel is compiled for; `vector` elements may be loaded at once, everywhere."""

    style: int
    heads: int
    size: int
    rotary_offset: int
    pairs: int
    block_tokens: int
    tile_rows: int
    unit: bool
    vector: int

    @property
    def tile_tokens(self) -> int:
        return self.tile_rows // self.heads


def plane_table(layout: Layout, group: int, starts: Sequence[int]) -> npt.NDArray[np.int64]:
    """[layers * planes of a layer, len(PLANE)]; `starts` are the addresses of the handles' usable parts."""
    item = layout.groups[group].item_bytes
    rows = [
        (
            (starts[plane.handle] + plane.byte_offset) // item,
            plane.block_stride,
            plane.token_stride,
            plane.head_stride,
            plane.element_stride,
            plane.kind in KEY_KINDS,
        )
        for of_layer in layout.planes[group]
        for plane in of_layer
    ]
    return np.array(rows, np.int64)


def constants(layout: Layout, group: int, rope: RopeSpec, table: npt.NDArray[np.int64]) -> Constants:
    shape = layout.groups[group]
    elements = min(_TILE_BYTES // shape.item_bytes, _TILE_ELEMENTS)
    rows = max(elements // _power(shape.head_size), _power(shape.heads), 1)
    return Constants(
        style=_STYLES[rope.style] if rope.rotates else NO_ROPE,
        heads=shape.heads,
        size=shape.head_size,
        rotary_offset=rope.offset if rope.rotates else 0,
        pairs=len(rope.inv_freq),
        block_tokens=layout.block_tokens,
        tile_rows=rows,
        unit=bool((table[:, 4] == 1).all()),
        vector=_vector(layout, group, table),
    )


def _vector(layout: Layout, group: int, table: npt.NDArray[np.int64]) -> int:
    """Elements that lie together and aligned wherever a head begins, in the slot and in the engine's memory."""
    shape = layout.groups[group]
    numbers = [shape.head_size, _WIDEST_LOAD // shape.item_bytes, *table[:, :4].ravel().tolist()]
    return int(np.gcd.reduce(np.array(numbers, np.int64)))


def _power(number: int) -> int:
    """The smallest power of two that is not below it."""
    return 1 << (number - 1).bit_length()
