"""K that is moved against K that a real rotary module makes at the new place, and proofs of both."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_memory import EngineMemory, make_rope, model_space
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvblend.layouts import KvShape
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.errors import KvblendError
from services.gpu_agent.devices.base import Piece
from services.gpu_agent.devices.cpu import CpuDevice
from services.gpu_agent.engines.layouts import GroupShape, check_layout
from services.gpu_agent.engines.prove import prove_rope
from services.gpu_agent.engines.rope import check_ropes, prove, rope_spec

HEADS, SIZE = 3, 64
SHAPE = GroupShape(1, 2, HEADS, SIZE, 4)
SCALINGS = {
    "plain": {"rope_type": "default", "rope_theta": 1e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048},
}
DTYPES = {
    torch.float32: common.DTYPE_FLOAT32,
    torch.float16: common.DTYPE_FLOAT16,
    torch.bfloat16: common.DTYPE_BFLOAT16,
}
# What K is quantised to afterwards is not what it is made in.
CACHES = {**DTYPES, torch.float8_e4m3fn: common.DTYPE_FLOAT8_E4M3, torch.float8_e5m2: common.DTYPE_FLOAT8_E5M2}


class Engine:
    """A rotary module as Transformers' Llama uses it."""

    def __init__(self, scaling: str = "plain", dtype: torch.dtype = torch.float32) -> None:
        config = LlamaConfig(
            hidden_size=HEADS * SIZE,
            max_position_embeddings=1 << 17,
            num_attention_heads=HEADS,
            rope_parameters=SCALINGS[scaling],
        )
        self.module = LlamaRotaryEmbedding(config)
        self.dtype = dtype
        self.rope = common.Rope(
            style=common.ROPE_STYLE_NEOX,
            inv_freq=self.module.inv_freq.numpy().astype("<f8").tobytes(),
            magnitude=self.module.attention_scaling,
        )

    def keys(self, position: int, seed: int = 0) -> torch.Tensor:
        """K of one token, [heads, size], from the same input at any position."""
        raw = torch.randn((1, HEADS, 1, SIZE), generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        cos, sin = self.module(raw, torch.tensor([[position]]))
        return apply_rotary_pos_emb(raw, raw, cos, sin)[1][0, :, 0]

    def proof(self, a: int, b: int, seed: int = 0) -> pb.RopeProof:
        def data(position: int) -> bytes:
            return self.keys(position, seed).float().numpy().astype("<f4").tobytes()

        return pb.RopeProof(position_a=a, key_a=data(a), position_b=b, key_b=data(b))


def move(keys: torch.Tensor, rope: common.Rope, delta: int) -> torch.Tensor:
    """Through the device, as a retrieve does it."""
    shape = KvShape.contiguous(1, HEADS, SIZE, 1, CACHES[keys.dtype])
    memory = EngineMemory("contiguous", shape)
    layout = check_layout(memory.layout, memory.handles, model_space(shape, rope), common.Rank())
    opened = CpuDevice(Path("/dev/shm"), 1).open(memory.handles, layout)
    block = torch.stack([keys, keys]).contiguous().view(torch.uint8).numpy().reshape(-1)
    opened.scatter(0, [Piece(block, 1, 0, np.zeros(1, np.int64), delta)], rope_spec(rope), lambda: None)
    found = memory.read([0])[0, 0, 0]
    opened.close()
    memory.close()
    return found


@pytest.mark.parametrize("scaling", sorted(SCALINGS))
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize(("stored", "wanted"), [(0, 37), (0, 4096), (3000, 7000), (7000, 12)])
def test_case_36_moved_k_is_k_made_there(
    scaling: str, dtype: torch.dtype, limit: float, stored: int, wanted: int
) -> None:
    engine = Engine(scaling, dtype)
    moved = move(engine.keys(stored), engine.rope, wanted - stored).float()
    there = engine.keys(wanted).float()
    assert (moved - there).abs().max() / there.abs().max() < limit


@pytest.mark.parametrize("scaling", sorted(SCALINGS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("positions", [(0, 64), (11, 4099), (7000, 3000), (100_000, 131_000)], ids=str)
def test_an_honest_proof_holds(scaling: str, dtype: torch.dtype, positions: tuple[int, int]) -> None:
    engine = Engine(scaling, dtype)
    for seed in range(5):
        error = prove(engine.proof(*positions, seed), rope_spec(engine.rope), SHAPE, DTYPES[dtype])
        assert error < 0.05


def wrong_theta(_: common.Rope) -> common.Rope:
    return make_rope(common.ROPE_STYLE_NEOX, SIZE, theta=1e4)


def wrong_style(rope: common.Rope) -> common.Rope:
    return changed(rope, style=common.ROPE_STYLE_GPTJ)


def wrong_width(_: common.Rope) -> common.Rope:
    return make_rope(common.ROPE_STYLE_NEOX, SIZE, rotary_size=SIZE // 2, theta=1e5)


def one_wrong_frequency(rope: common.Rope) -> common.Rope:
    frequencies = np.frombuffer(rope.inv_freq, "<f8").copy()
    frequencies[10] *= 1.05
    return changed(rope, inv_freq=frequencies.tobytes())


def no_rotation(_: common.Rope) -> common.Rope:
    return common.Rope(style=common.ROPE_STYLE_NONE)


def changed(rope: common.Rope, **fields: object) -> common.Rope:
    other = common.Rope(**fields)
    result = common.Rope()
    result.CopyFrom(rope)
    result.MergeFrom(other)
    return result


@pytest.mark.parametrize("fault", [wrong_theta, wrong_style, wrong_width, one_wrong_frequency, no_rotation])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_36_a_misdeclared_rope_is_refused(fault: Callable[[common.Rope], common.Rope], dtype: torch.dtype) -> None:
    engine = Engine(dtype=dtype)
    with pytest.raises(KvblendError, match="ROPE_MISMATCH"):
        prove(engine.proof(3, 2048), rope_spec(fault(engine.rope)), SHAPE, DTYPES[dtype])


def test_k_that_is_not_rotated_may_be_even() -> None:
    """Its dtype decides nothing, as it is moved bit for bit: ones, which bf16 has as well, are no misdeclared f16."""
    rope = no_rotation(common.Rope())
    space = model_space(KvShape.contiguous(1, HEADS, SIZE, 8, common.DTYPE_FLOAT16), rope)
    layout: Any = SimpleNamespace(dtype=common.DTYPE_FLOAT16, groups=[SHAPE])
    instance: Any = SimpleNamespace(space=space, ropes=[rope_spec(rope)], layout=layout, rope_proven=False)
    key = np.ones(HEADS * SIZE, "<f4").tobytes()
    proof = pb.RopeProof(position_a=0, key_a=key, position_b=100, key_b=key)
    assert prove_rope(instance, pb.RegisterRopeRequest(ropes=[rope], proofs=[proof])) == 0.0
    assert instance.rope_proven


def zeros(proof: pb.RopeProof) -> None:
    proof.key_a = proof.key_b = bytes(len(proof.key_a))


def infinite(proof: pb.RopeProof) -> None:
    proof.key_a = np.full(HEADS * SIZE, np.inf, "<f4").tobytes()


def a_silent_pair(proof: pb.RopeProof) -> None:
    for name in ("key_a", "key_b"):
        key = np.frombuffer(getattr(proof, name), "<f4").reshape(HEADS, SIZE).copy()
        key[:, [5, 5 + SIZE // 2]] = 0
        setattr(proof, name, key.tobytes())


def too_near(proof: pb.RopeProof) -> None:
    proof.position_b = proof.position_a + 1


def too_short(proof: pb.RopeProof) -> None:
    proof.key_a = proof.key_a[:-4]


@pytest.mark.parametrize("fault", [zeros, infinite, a_silent_pair, too_near, too_short])
def test_a_proof_that_proves_nothing_is_refused(fault: Callable[[pb.RopeProof], None]) -> None:
    engine = Engine()
    proof = engine.proof(3, 2048)
    fault(proof)
    with pytest.raises(KvblendError, match="INVALID_ARGUMENT"):
        prove(proof, rope_spec(engine.rope), SHAPE, common.DTYPE_FLOAT32)


def test_declared_ropes_must_be_those_of_the_model_space() -> None:
    rope = Engine().rope
    space = model_space(KvShape.contiguous(1, HEADS, SIZE, 8, common.DTYPE_FLOAT32), rope)
    check_ropes([changed(rope, rotary_size=SIZE, magnitude=1.0)], space)
    for other in (wrong_style(rope), one_wrong_frequency(rope), no_rotation(rope)):
        with pytest.raises(KvblendError, match="ROPE_MISMATCH"):
            check_ropes([other], space)
    with pytest.raises(KvblendError, match="ROPE_MISMATCH"):
        check_ropes([], space)
