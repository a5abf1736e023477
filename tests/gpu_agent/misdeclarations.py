"""An engine that says something wrong of its memory or its K, one kind of fault at a time: a probe must refuse it."""

from collections.abc import Callable

import pytest
import torch
from agent_rig import INSTANCE, CallFailed, Rig, blocks, rope_proof, slots_of
from engine_memory import make_rope

from kvblend.layouts import KvShape, build_layout
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.checksums import checksum_of

# What is true.
ARRANGEMENT = "paged_hnd"
SIZE, WIDTH, OFFSET = 16, 8, 4
ROPE = make_rope(common.ROPE_STYLE_NEOX, SIZE, rotary_size=WIDTH, offset=OFFSET)
DTYPES = [common.DTYPE_FLOAT32, common.DTYPE_FLOAT16, common.DTYPE_BFLOAT16]

Request = pb.RegisterKvCacheRequest
TABLE = blocks(3, 1, 6, 0)
TOKENS = 13


def shape_of(dtype: common.Dtype) -> KvShape:
    return KvShape(layers=2, heads=2, head_size=SIZE, blocks=8, block_tokens=4, dtype=dtype)


def _rope(request: Request, rope: common.Rope) -> None:
    request.model_space.groups[0].rope.CopyFrom(rope)


def theta(request: Request) -> None:
    _rope(request, make_rope(common.ROPE_STYLE_NEOX, SIZE, rotary_size=WIDTH, offset=OFFSET, theta=5e4))


def style(request: Request) -> None:
    _rope(request, make_rope(common.ROPE_STYLE_GPTJ, SIZE, rotary_size=WIDTH, offset=OFFSET))


def width(request: Request) -> None:
    _rope(request, make_rope(common.ROPE_STYLE_NEOX, SIZE, rotary_size=WIDTH // 2, offset=OFFSET))


def offset(request: Request) -> None:
    _rope(request, make_rope(common.ROPE_STYLE_NEOX, SIZE, rotary_size=WIDTH))


def layout(request: Request) -> None:
    request.layout.CopyFrom(build_layout("paged_nhd", shape_of(request.layout.dtype)))


def order(request: Request) -> None:
    for plane in request.layout.planes:
        plane.kind = pb.PLANE_KIND_VALUE if plane.kind == pb.PLANE_KIND_KEY else pb.PLANE_KIND_KEY


def dtype(request: Request) -> None:
    """Another one: of the same size, if there is one."""
    others = {common.DTYPE_FLOAT16: common.DTYPE_BFLOAT16}
    request.layout.dtype = request.model_space.kv_dtype = others.get(request.layout.dtype, common.DTYPE_FLOAT16)


# How each is found out.
FAULTS: dict[Callable[[Request], None], str] = {
    theta: "rope",
    style: "rope",
    width: "rope",
    offset: "rope",
    layout: "layout",
    order: "layout",
    dtype: "rope",
}


def probe(rig: Rig, request: Request) -> str:
    """Which probe refuses the engine of `rig` with this registration; nothing if none does."""
    rig.call("RegisterKvCache", request)
    pattern = rig.engine.read(slots_of(TABLE, range(TOKENS))).contiguous()
    checksum = checksum_of(pattern.view(torch.uint8).numpy().tobytes()).to_bytes(8, "little")
    proof = pb.ProveLayoutRequest(instance_id=INSTANCE, slots=TABLE, tokens=TOKENS, expected_checksums=checksum)
    if not rig.call("ProveLayout", proof).proven:
        return "layout"
    ropes = [request.model_space.groups[0].rope]
    proofs = [rope_proof(rig.engine, ROPE)]
    try:
        rig.call("RegisterRope", pb.RegisterRopeRequest(instance_id=INSTANCE, ropes=ropes, proofs=proofs))
    except CallFailed as refused:
        return "rope" if "ROPE_MISMATCH" in str(refused) else str(refused)
    return ""


def check_refused(rig: Rig, fault: Callable[[Request], None]) -> None:
    honest, wrong = rig.registration(), rig.registration()
    fault(wrong)
    assert probe(rig, honest) == ""
    expected = FAULTS[fault]
    if fault is dtype and honest.layout.dtype == common.DTYPE_FLOAT32:
        # Half the bytes are another pattern.
        expected = "layout"
    assert probe(rig, wrong) == expected
    assert probe(rig, honest) == ""


of_each_kind = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
of_each_dtype = pytest.mark.parametrize("true_dtype", DTYPES, ids=common.Dtype.Name)
