"""Engine to arena to another place of another engine, through every arrangement, against plain indexing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_memory import (
    DTYPES,
    FP8,
    EngineMemory,
    lengths,
    make_rope,
    model_space,
    rotate_slowly,
    rotated_elements,
    same_bits,
)
from fp8_reference import is_rounded
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblend.layouts import ARRANGEMENTS, KvShape
from kvblend.v1 import common_pb2 as common
from services.common.checksums import WORD_BYTES, checksum_of
from services.gpu_agent.devices import cpu
from services.gpu_agent.devices.base import Piece
from services.gpu_agent.engines.layouts import check_layout
from services.gpu_agent.engines.rope import RopeSpec, rope_spec

ROPES = {
    "neox": lambda size: make_rope(common.ROPE_STYLE_NEOX, size),
    "gptj": lambda size: make_rope(common.ROPE_STYLE_GPTJ, size),
    "neox partial": lambda size: make_rope(common.ROPE_STYLE_NEOX, size, rotary_size=size // 2),
    "gptj tail": lambda size: make_rope(common.ROPE_STYLE_GPTJ, size, rotary_size=size // 2, offset=size // 2),
    "none": lambda size: make_rope(common.ROPE_STYLE_NONE, size),
}
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# What fp32 arithmetic with fp32 tables may be off by, over the length of a pair.
UNSURE = 2.0**-22


@dataclass(frozen=True)
class Case:
    source: str = "paged_nhd"
    target: str = "vllm_cpu"
    dtype: common.Dtype = common.DTYPE_FLOAT32
    rope: str = "neox"
    layers: int = 2
    heads: int = 2
    head_size: int = 8
    block_tokens: int = 4
    tokens: int = 21
    # (first token, length, positions moved): pieces of the stored text.
    moves: tuple[tuple[int, int, int], ...] = ((0, 9, 0), (9, 12, 1000))
    first_slot: int = 3
    seed: int = 1
    chunk: int = field(default=16)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.integers(1, 40))
    moves, first = [], 0
    while first < tokens and len(moves) < 4:
        skip = draw(st.integers(0, min(3, tokens - first - 1)))
        length = draw(st.integers(1, tokens - first - skip))
        moves.append((first + skip, length, draw(st.integers(-5000, 5000) | st.just(0))))
        first += skip + length
    return Case(
        source=draw(st.sampled_from(sorted(ARRANGEMENTS))),
        target=draw(st.sampled_from(sorted(ARRANGEMENTS))),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        rope=draw(st.sampled_from(sorted(ROPES))),
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([4, 8, 16])),
        block_tokens=draw(st.sampled_from([1, 4, 16])),
        tokens=tokens,
        moves=tuple(moves),
        first_slot=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 2**31)),
    )


def make_engine(case: Case, arrangement: str, seed: int) -> tuple[EngineMemory, list[int]]:
    """Memory with room to spare, and a random slot for each token (in order for a contiguous buffer)."""
    needed = case.first_slot + case.tokens
    if arrangement == "contiguous":
        shape = KvShape.contiguous(case.layers, case.heads, case.head_size, needed + 3, case.dtype)
        slots = [case.first_slot + position for position in range(case.tokens)]
        return EngineMemory(arrangement, shape, seed), slots
    blocks = -(-needed // case.block_tokens)
    shape = KvShape(case.layers, case.heads, case.head_size, blocks + 2, case.block_tokens, case.dtype)
    table = np.random.default_rng(seed).permutation(blocks + 2)[:blocks].tolist()
    places = [case.first_slot + position for position in range(case.tokens)]
    slots = [table[place // case.block_tokens] * case.block_tokens + place % case.block_tokens for place in places]
    return EngineMemory(arrangement, shape, seed), slots


def check_round_trip(case: Case) -> None:
    device = cpu.CpuDevice(Path("/dev/shm"), 1)
    rope = ROPES[case.rope](case.head_size)
    source, source_slots = make_engine(case, case.source, case.seed)
    target, target_slots = make_engine(case, case.target, case.seed + 1)
    try:
        objects = gather(device, source, source_slots, rope, case)
        original = source.read(source_slots)
        stored = torch.cat([torch.from_numpy(item).view(-1) for item in objects]).numel()
        assert stored == original.numel() * original.element_size()
        before = target.snapshot()
        old = target.read(target_slots)
        scatter(device, target, target_slots, rope, objects, case)
        for first, length, delta in case.moves:
            wanted = original[:, :, first : first + length]
            found = target.read(target_slots[first : first + length])
            check_moved(found, wanted, rope, delta)
        # Put back what the moves wrote: everything else must be as it was.
        for first, length, _ in case.moves:
            target.write(target_slots[first : first + length], old[:, :, first : first + length])
        assert target.snapshot() == before, "a slot outside the request was written"
    finally:
        source.close()
        target.close()


def gather(
    device: cpu.CpuDevice, engine: EngineMemory, slots: list[int], rope: common.Rope, case: Case
) -> list[np.ndarray]:
    layout = check_layout(engine.layout, engine.handles, model_space(engine.shape, rope), common.Rank())
    memory = device.open(engine.handles, layout)
    pieces = []
    for first in range(0, case.tokens, case.chunk):
        part = np.array(slots[first : first + case.chunk], np.int64)
        block = np.zeros(len(part) * layout.groups[0].token_bytes, np.uint8)
        pieces.append(Piece(block, len(part), 0, part, checked=True))
    check_checksums(pieces, memory.gather(0, pieces, lambda: None), case)
    memory.close()
    return [piece.block for piece in pieces]


def scatter(
    device: cpu.CpuDevice,
    engine: EngineMemory,
    slots: list[int],
    rope: common.Rope,
    objects: list[np.ndarray],
    case: Case,
) -> None:
    layout = check_layout(engine.layout, engine.handles, model_space(engine.shape, rope), common.Rank())
    memory = device.open(engine.handles, layout)
    pieces = []
    for first, length, delta in case.moves:
        position = first
        while position < first + length:
            number, skip = divmod(position, case.chunk)
            end = min((number + 1) * case.chunk, first + length)
            tokens = min(case.chunk, case.tokens - number * case.chunk)
            pieces.append(Piece(objects[number], tokens, skip, np.array(slots[position:end], np.int64), delta, True))
            position = end
    check_checksums(pieces, memory.scatter(0, pieces, rope_spec(rope), lambda: None), case)
    memory.close()


def check_checksums(pieces: Sequence[Piece], found: Sequence[int | None], case: Case) -> None:
    """Every block that was copied whole has its checksum, if a token's plane is whole words."""
    words = case.heads * case.head_size * DTYPES[case.dtype].itemsize % WORD_BYTES == 0
    for piece, checksum in zip(pieces, found, strict=True):
        if piece.whole and (words or checksum is not None):
            assert checksum == checksum_of(piece.block.data)
        else:
            assert checksum is None


def check_moved(found: torch.Tensor, wanted: torch.Tensor, rope: common.Rope, delta: int) -> None:
    """fp8 must be rounded as well as fp32 arithmetic allows; other dtypes keep their tolerance."""
    assert same_bits(found[:, 1], wanted[:, 1]), "V was changed"
    if delta == 0 or not rope.inv_freq:
        assert same_bits(found[:, 0], wanted[:, 0]), "K that stays was changed"
        return
    inside = rotated_elements(rope)
    still = torch.ones(found.shape[-1], dtype=torch.bool)
    still[inside] = False
    assert same_bits(found[:, 0][..., still], wanted[:, 0][..., still]), "elements that do not rotate were changed"
    expected = rotate_slowly(wanted[:, 0], rope, delta)
    if found.dtype.itemsize == 1:
        assert is_rounded(found[:, 0], expected, UNSURE * lengths(wanted[:, 0], rope)), "K is off"
        return
    error = (found[:, 0].to(torch.float64) - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[found.dtype], f"K is off by {error}"


@given(cases())
@settings(max_examples=60, deadline=None)
def test_any_text_arrives_anywhere_in_any_arrangement(case: Case) -> None:
    check_round_trip(case)


@pytest.mark.parametrize("arrangement", sorted(ARRANGEMENTS))
@pytest.mark.parametrize("rope", sorted(ROPES))
def test_every_arrangement_with_every_rope(arrangement: str, rope: str) -> None:
    check_round_trip(Case(source=arrangement, target=arrangement, rope=rope))


@pytest.mark.parametrize("arrangement", sorted(ARRANGEMENTS))
@pytest.mark.parametrize("dtype", FP8, ids=common.Dtype.Name)
def test_every_arrangement_in_fp8(arrangement: str, dtype: common.Dtype) -> None:
    """One head of 4 elements is no whole word of the checksum."""
    for rope in ROPES:
        check_round_trip(Case(source=arrangement, target=arrangement, rope=rope, dtype=dtype))
    check_round_trip(Case(source=arrangement, dtype=dtype, heads=1, head_size=4))


@pytest.mark.parametrize("dtype", [common.DTYPE_BFLOAT16, *FP8], ids=common.Dtype.Name)
def test_bits_that_stay_may_be_anything(dtype: common.Dtype) -> None:
    """NaN payloads, infinities, negative zeros: what is not rotated is moved, not computed."""
    case = Case(dtype=dtype, moves=((0, 21, 0),))
    rope = ROPES[case.rope](case.head_size)
    device = cpu.CpuDevice(Path("/dev/shm"), 1)
    source, source_slots = make_engine(case, "paged_nhd", 3)
    target, target_slots = make_engine(case, "interleaved", 4)
    for buffer in source.buffers:
        buffer.array[:] = np.random.default_rng(5).integers(0, 256, buffer.nbytes, np.uint8)
    scatter(device, target, target_slots, rope, gather(device, source, source_slots, rope, case), case)
    assert same_bits(target.read(target_slots), source.read(source_slots))
    source.close()
    target.close()


def _wrong_sign(self: cpu._Rotation, keys: torch.Tensor) -> None:
    if self._active:
        self._sin = -self._sin
        _rotate(self, keys)
        self._sin = -self._sin


_rotate = cpu._Rotation.apply


def test_a_wrong_sign_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu._Rotation, "apply", _wrong_sign)
    with pytest.raises(AssertionError, match="K is off"):
        check_round_trip(Case())


def test_a_forgotten_rotation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu._Rotation, "apply", lambda self, keys: None)
    with pytest.raises(AssertionError, match="K is off"):
        check_round_trip(Case())


def test_a_rotated_v_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_KEY_KINDS", (1, 2, 3))
    with pytest.raises(AssertionError, match="V was changed"):
        check_round_trip(Case())


def test_a_wrong_style_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RopeSpec, "pairs", lambda self: (slice(0, 8, 2), slice(1, 8, 2)))
    with pytest.raises(AssertionError, match="K is off"):
        check_round_trip(Case())
