"""Checks a declared KV layout against its model space and the memory it claims to describe.

What passes can be copied through strided views without looking again: every element that a plane can
reach lies inside its handle, and the planes are exactly those of the model space.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.errors import KvblendError

ITEM_BYTES: dict[int, int] = {
    common.DTYPE_FLOAT32: 4,
    common.DTYPE_FLOAT16: 2,
    common.DTYPE_BFLOAT16: 2,
    common.DTYPE_FLOAT8_E4M3: 1,
    common.DTYPE_FLOAT8_E5M2: 1,
}

# Slots are indexed with int64 and listed one by one; more in one registration is a mistake.
_MAX_SLOTS = 1 << 28


@dataclass(frozen=True)
class GroupShape:
    """One layer group of one rank; an object of it is [layers, planes, tokens, heads, head_size]."""

    layers: int
    planes: int
    heads: int
    head_size: int
    item_bytes: int

    @property
    def token_bytes(self) -> int:
        return self.layers * self.planes * self.heads * self.head_size * self.item_bytes


@dataclass(frozen=True)
class Layout:
    """A checked layout. `planes[group][layer]` lists K then V (or the latent plane alone)."""

    dtype: common.Dtype
    blocks: int
    block_tokens: int
    groups: list[GroupShape]
    planes: list[list[list[pb.Plane]]]

    @property
    def slots(self) -> int:
        return self.blocks * self.block_tokens


def check_layout(
    layout: pb.KvLayout, handles: Sequence[pb.DeviceHandle], space: common.ModelSpace, rank: common.Rank
) -> Layout:
    """The checked layout.

    Raises:
        KvblendError: LAYOUT_UNKNOWN, HANDLE_OUT_OF_BOUNDS, INVALID_ARGUMENT for an impossible rank, or
            NOT_IMPLEMENTED for a model that this release cannot move.
    """
    item_bytes = _check_dtype(layout, space)
    _check_rank(space, rank)
    if not (layout.blocks and layout.block_tokens) or layout.blocks * layout.block_tokens > _MAX_SLOTS:
        raise _unknown(f"{layout.blocks} blocks of {layout.block_tokens} tokens; 1 to {_MAX_SLOTS} slots are allowed")
    groups = [_group_shape(group, space, item_bytes) for group in space.groups]
    planes = _arrange(layout.planes, space, groups)
    for by_layer in planes:
        for of_layer in by_layer:
            for plane in of_layer:
                _check_reach(plane, layout, handles, item_bytes)
    return Layout(layout.dtype, layout.blocks, layout.block_tokens, groups, planes)


def _unknown(text: str) -> KvblendError:
    return KvblendError("LAYOUT_UNKNOWN", text)


def _check_dtype(layout: pb.KvLayout, space: common.ModelSpace) -> int:
    if layout.dtype not in ITEM_BYTES:
        raise _unknown("the layout names no known dtype")
    if layout.dtype != space.kv_dtype:
        names = common.Dtype.Name(layout.dtype), common.Dtype.Name(space.kv_dtype)
        raise _unknown(f"the layout holds {names[0]}, the model space says {names[1]}")
    return ITEM_BYTES[layout.dtype]


def _check_rank(space: common.ModelSpace, rank: common.Rank) -> None:
    if (space.pipeline_parallel or 1) > 1 or (space.context_parallel or 1) > 1:
        raise KvblendError("NOT_IMPLEMENTED", "pipeline and context parallel models are not supported yet")
    ranks = space.tensor_parallel or 1
    if rank.tensor >= ranks or rank.pipeline or rank.context:
        raise KvblendError("INVALID_ARGUMENT", f"rank {rank.tensor} does not exist among {ranks}")


def _group_shape(group: common.LayerGroup, space: common.ModelSpace, item_bytes: int) -> GroupShape:
    if group.attention == common.ATTENTION_KIND_RECURRENT:
        raise KvblendError("NOT_IMPLEMENTED", "recurrent layer groups are not supported yet")
    if group.attention == common.ATTENTION_KIND_MLA:
        # Every rank holds the whole latent row.
        return GroupShape(group.layers, 1, group.kv_heads, group.head_size, item_bytes)
    return GroupShape(group.layers, 2, _rank_heads(group.kv_heads, space), group.head_size, item_bytes)


def _rank_heads(kv_heads: int, space: common.ModelSpace) -> int:
    """KV heads of one rank: a share, or one that several ranks repeat."""
    ranks = space.tensor_parallel or 1
    if max(kv_heads, ranks) % min(kv_heads, ranks):
        raise _unknown(f"{kv_heads} KV heads cannot be divided among {ranks} ranks")
    return max(1, kv_heads // ranks)


def _arrange(
    planes: Sequence[pb.Plane], space: common.ModelSpace, groups: list[GroupShape]
) -> list[list[list[pb.Plane]]]:
    """The planes by group, layer and kind; exactly those that the model space needs."""
    by_place: dict[tuple[int, int, int], pb.Plane] = {}
    starts: set[tuple[int, int]] = set()
    for plane in planes:
        place = (plane.group, plane.layer, plane.kind)
        start = (plane.handle, plane.byte_offset)
        if place in by_place:
            raise _unknown(f"{_name(*place)} is declared twice")
        if start in starts:
            raise _unknown(f"{_name(*place)} starts where another plane does")
        by_place[place] = plane
        starts.add(start)
    arranged = []
    for index, shape in enumerate(groups):
        latent = space.groups[index].attention == common.ATTENTION_KIND_MLA
        kinds = [pb.PLANE_KIND_LATENT] if latent else [pb.PLANE_KIND_KEY, pb.PLANE_KIND_VALUE]
        arranged.append(
            [[_take(by_place, (index, layer, kind), shape) for kind in kinds] for layer in range(shape.layers)]
        )
    if by_place:
        raise _unknown(f"{_name(*next(iter(by_place)))} is not part of the model space")
    return arranged


def _take(by_place: dict[tuple[int, int, int], pb.Plane], place: tuple[int, int, int], shape: GroupShape) -> pb.Plane:
    plane = by_place.pop(place, None)
    if plane is None:
        raise _unknown(f"{_name(*place)} is missing")
    if (plane.heads, plane.head_size) != (shape.heads, shape.head_size):
        raise _unknown(
            f"{_name(*place)} has {plane.heads} heads of {plane.head_size}; "
            f"the model space gives this rank {shape.heads} of {shape.head_size}"
        )
    return plane


def _name(group: int, layer: int, kind: int) -> str:
    name = pb.PlaneKind.Name(kind) if kind in pb.PlaneKind.values() else str(kind)
    return f"plane {name.removeprefix('PLANE_KIND_').lower()} of layer {layer} in group {group}"


def _check_reach(plane: pb.Plane, layout: pb.KvLayout, handles: Sequence[pb.DeviceHandle], item_bytes: int) -> None:
    name = _name(plane.group, plane.layer, plane.kind)
    if plane.handle >= len(handles):
        raise KvblendError("HANDLE_OUT_OF_BOUNDS", f"{name} names handle {plane.handle} of {len(handles)}")
    handle = handles[plane.handle]
    axes = sorted(
        (stride, extent)
        for stride, extent in (
            (plane.block_stride, layout.blocks),
            (plane.token_stride, layout.block_tokens),
            (plane.head_stride, plane.heads),
            (plane.element_stride, plane.head_size),
        )
        if extent > 1
    )
    last = 0
    for stride, extent in axes:
        if stride <= last:
            raise _unknown(f"{name} has strides that make elements overlap")
        last += stride * (extent - 1)
    if (handle.allocation_offset + plane.byte_offset) % item_bytes:
        raise _unknown(f"{name} does not start at a whole element")
    end = plane.byte_offset + (last + 1) * item_bytes
    if end > handle.bytes:
        raise KvblendError("HANDLE_OUT_OF_BOUNDS", f"{name} ends at byte {end} of a handle with {handle.bytes} bytes")
