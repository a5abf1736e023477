"""Proofs of a registration: its layout by a pattern, its rotary embedding by K at two positions."""

from contextlib import ExitStack

import numpy as np

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.checksums import checksum_of
from services.common.errors import KvblendError
from services.gpu_agent.call import Call
from services.gpu_agent.devices.base import Bytes, Device, Hung, Piece, Stopped
from services.gpu_agent.engines.instances import Instance
from services.gpu_agent.engines.layouts import GroupShape
from services.gpu_agent.engines.order import wait_for_engine
from services.gpu_agent.engines.rope import RopeSpec, check_ropes, prove
from services.gpu_agent.engines.slots import SlotTable

_CHECKSUM_BYTES = 8


def prove_layout(
    device: Device, instance: Instance, request: pb.ProveLayoutRequest, call: Call
) -> pb.ProveLayoutResponse:
    """Whether the canonical bytes read through the declared layout are what the engine wrote.

    Raises:
        KvblendError: for a request that cannot be meant.
    """
    groups = instance.layout.groups
    if not request.tokens:
        raise KvblendError("EMPTY_PROMPT", "tokens is 0; a pattern of at least one token is needed")
    if len(request.expected_checksums) != len(groups) * _CHECKSUM_BYTES:
        raise KvblendError("INVALID_ARGUMENT", f"expected_checksums must be {len(groups)} little-endian u64")
    table = SlotTable(request.slots, instance.layout)
    table.require(request.tokens)
    slots = table.of(np.arange(request.tokens))
    expected = np.frombuffer(request.expected_checksums, "<u8").tolist()
    wait_for_engine(device, instance, request.event, call)
    with ExitStack() as held:
        memory = held.enter_context(instance.copying())
        for group, shape in enumerate(groups):
            block: Bytes = np.empty(shape.token_bytes * request.tokens, np.uint8)
            try:
                (found,) = memory.gather(group, [Piece(block, request.tokens, 0, slots, checked=True)], call.watch)
            except Stopped as stopped:
                raise KvblendError("DEADLINE_EXCEEDED", f"the proof was stopped: {stopped}") from stopped
            except Hung as hung:
                hung.keep(held)
                raise KvblendError("DEADLINE_EXCEEDED", str(hung)) from hung
            if (checksum_of(block.data) if found is None else found) != expected[group]:
                return pb.ProveLayoutResponse(
                    detail=f"layer group {group}: what lies in these slots is not what the engine wrote"
                )
    return pb.ProveLayoutResponse(proven=True)


def prove_rope(instance: Instance, request: pb.RegisterRopeRequest) -> float:
    """Marks the instance's rope as proven; the largest relative error of all proofs.

    There is one proof for each layer group, in order; that of a group which cannot be moved is not looked at.

    Raises:
        KvblendError: ROPE_MISMATCH, INVALID_ARGUMENT.
    """
    check_ropes(request.ropes, instance.space)
    if len(request.proofs) != len(instance.ropes):
        raise KvblendError("INVALID_ARGUMENT", f"{len(request.proofs)} proofs for {len(instance.ropes)} layer groups")
    dtype: common.Dtype = instance.layout.dtype
    errors = [
        _prove_group(proof, rope, shape, dtype)
        for proof, rope, shape in zip(request.proofs, instance.ropes, instance.layout.groups, strict=True)
        if rope.relative
    ]
    instance.rope_proven = True
    return max(errors, default=0.0)


def _prove_group(proof: pb.RopeProof, rope: RopeSpec, shape: GroupShape, dtype: common.Dtype) -> float:
    error = prove(proof, rope, shape, dtype)
    # What is not rotated is moved bit for bit, whatever its dtype.
    if rope.rotates and not _may_be(proof.key_a + proof.key_b, dtype):
        raise KvblendError("ROPE_MISMATCH", f"the proof's K is not of {common.Dtype.Name(dtype)}, as was declared")
    return error


def _may_be(keys: bytes, dtype: common.Dtype) -> bool:
    """Whether f32 values come from this dtype. Two of them have the same size: no layout tells them apart."""
    in_bfloat16 = not (np.frombuffer(keys, "<u4") & 0xFFFF).any()
    if dtype == common.DTYPE_BFLOAT16:
        return in_bfloat16
    if dtype == common.DTYPE_FLOAT16:
        values = np.frombuffer(keys, "<f4")
        with np.errstate(over="ignore"):
            return not in_bfloat16 and bool((values.astype(np.float16) == values).all())
    return True
