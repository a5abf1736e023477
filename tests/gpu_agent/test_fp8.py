"""fp8 KV: dequantised, rotated and quantised again with one rounding, from one engine to another."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fake_gpu
import numpy as np
import pytest
import test_round_trip as round_trip
import torch
from agent_rig import INSTANCE, blocks, outcomes, ranges, slots_of
from engine_memory import DTYPES, FP8, make_rope, same_bits
from fp8_reference import decode, magnitudes, nearest
from hypothesis import given
from hypothesis import strategies as st
from processes import Stack
from test_cuda_lane import fake_devices, row_bytes
from test_rope import SCALINGS, SHAPE, Engine, move, one_wrong_frequency, wrong_style, wrong_theta
from test_round_trip import Case, check_moved

from kvblend.layouts import KvShape
from kvblend.results import Segments
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.checksums import checksum_of
from services.common.errors import KvblendError
from services.gpu_agent.devices import cpu
from services.gpu_agent.devices.cuda.memory import check_dtype
from services.gpu_agent.engines.rope import prove, rope_spec

TYPES = [DTYPES[dtype] for dtype in FP8]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_code_means_what_its_format_says(dtype: torch.dtype) -> None:
    found = torch.arange(256, dtype=torch.uint8).view(dtype).float().tolist()
    assert all(
        a == b or (math.isnan(a) and math.isnan(b))
        for a, b in zip(found, [decode(code, dtype) for code in range(256)], strict=True)
    )


def of_interest(dtype: torch.dtype) -> torch.Tensor:
    """Every value, every middle between two, those beyond the largest, and the f32 on both sides of each."""
    values = torch.tensor(magnitudes(dtype))
    middles = (values[1:] + values[:-1]) / 2
    beyond = values[-1] * torch.tensor([1.0, 1.01, 1.0625, 1.125, 2**0.5, 2.0, 1e20])
    exact = torch.cat([values, middles, beyond])
    sides = [torch.nextafter(exact, torch.full_like(exact, to)) for to in (math.inf, 0.0)]
    positive = torch.cat([exact, *sides])
    return torch.cat([positive, -positive])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_rotated_is_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    values = of_interest(dtype)
    expected = torch.tensor([nearest(value, dtype) for value in values.tolist()]).to(dtype)
    assert same_bits(cpu.rounded(values, dtype), expected)
    finite = values.abs() <= torch.finfo(dtype).max
    assert same_bits(cpu.rounded(values, dtype)[finite], values[finite].to(dtype))


@given(st.floats(width=32, allow_nan=False), st.sampled_from(TYPES))
def test_any_number_is_rounded_to_the_nearest(value: float, dtype: torch.dtype) -> None:
    found = cpu.rounded(torch.tensor(value), dtype).item()
    assert (found, math.copysign(1, found)) == (nearest(value, dtype), math.copysign(1, value))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_an_element_that_grows_saturates_and_nan_stays_nan(dtype: torch.dtype) -> None:
    """By an eighth of a turn: both elements of the first pair are the largest, one of the second is NaN."""
    largest = torch.finfo(dtype).max
    keys = torch.zeros((1, 64))
    keys[0, [0, 32]] = largest
    keys[0, 1] = math.nan
    rope = make_rope(common.ROPE_STYLE_NEOX, 64)
    rope.inv_freq = (np.frombuffer(rope.inv_freq, "<f8") * math.pi / 4).astype("<f8").tobytes()
    moved = move(keys.expand(3, 64).to(dtype), rope, 1)[0].float()
    assert (moved[0].item(), moved[32].item()) == (0.0, largest)
    assert moved[[1, 33]].isnan().all()
    assert torch.cat([moved[2:32], moved[34:]]).eq(0).all()


def unsaturated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As torch's cast did before it saturated."""
    bits = values.to(dtype).view(torch.uint8)
    bits[values.abs() > torch.finfo(dtype).max] = 0x7F
    return bits.view(dtype)


def towards_zero(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    found = cpu_rounded(values, dtype)
    too_far = found.float().abs() > values.abs()
    # One code less is the next smaller magnitude of the same sign.
    return (found.view(torch.uint8) - too_far.to(torch.uint8)).view(dtype)


def twice(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Through bf16 on its way."""
    return cpu_rounded(values.bfloat16().float(), dtype)


cpu_rounded = cpu.rounded


def rotated_codes(self: cpu._Rotation, keys: torch.Tensor) -> None:
    """The codes, taken for numbers."""
    numbers = keys.view(torch.uint8).float()
    cpu_rotate(self, numbers)
    keys.copy_(numbers.to(torch.uint8).view(keys.dtype))


cpu_rotate = cpu._Rotation.apply


@pytest.mark.parametrize("dtype", FP8, ids=common.Dtype.Name)
@pytest.mark.parametrize("broken", [unsaturated, towards_zero, twice], ids=lambda broken: broken.__name__)
def test_a_wrong_rounding_is_noticed(monkeypatch: pytest.MonkeyPatch, broken: Any, dtype: common.Dtype) -> None:
    case = Case(dtype=dtype)
    for module in (cpu, fake_gpu):
        monkeypatch.setattr(module, "rounded", broken)
    with pytest.raises(AssertionError, match="K is off"):
        round_trip.check_round_trip(case)
    with fake_devices(8 * row_bytes(case)), pytest.raises(AssertionError, match="K is off"):
        round_trip.check_round_trip(case)


@pytest.mark.parametrize("dtype", FP8, ids=common.Dtype.Name)
def test_a_rotation_of_codes_is_noticed(monkeypatch: pytest.MonkeyPatch, dtype: common.Dtype) -> None:
    monkeypatch.setattr(cpu._Rotation, "apply", rotated_codes)
    with pytest.raises(AssertionError, match="K is off"):
        round_trip.check_round_trip(Case(dtype=dtype))


@pytest.mark.parametrize("scaling", sorted(SCALINGS))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("stored", "wanted"), [(0, 37), (3000, 7000), (7000, 12)])
def test_case_36_moved_fp8_k_is_k_made_there(scaling: str, dtype: torch.dtype, stored: int, wanted: int) -> None:
    """As far as fp8 goes: K made there is rounded once, K that is moved twice, which is sqrt(2) of the rms error.

    At most: the stored K's rounding, half a unit in the last place, of a pair that is sqrt(2) of its larger element;
    the moved K's, of a value that is larger by as much; and that of K made there.
    """
    engine = Engine(scaling)
    half = torch.finfo(dtype).eps / 2
    limit = half * (2**0.5 + (1 + half * 2**0.5) + 1)
    moved_error = made_error = 0.0
    for seed in range(8):
        there = engine.keys(wanted, seed)
        made, moved = there.to(dtype).float(), move(engine.keys(stored, seed).to(dtype), engine.rope, wanted - stored)
        assert (moved.float() - made).abs().max() / there.abs().max() < limit
        moved_error += (moved.float() - there).square().sum().item()
        made_error += (made - there).square().sum().item()
    assert math.sqrt(moved_error / made_error) < 1.5


@pytest.mark.parametrize("dtype", FP8, ids=common.Dtype.Name)
def test_a_rope_is_proven_with_k_before_it_is_quantised(dtype: common.Dtype) -> None:
    engine = Engine(dtype=torch.bfloat16)
    rope, proof = rope_spec(engine.rope), engine.proof(11, 4099)
    prove(proof, rope, SHAPE, dtype)
    for wrong in (wrong_theta, wrong_style, one_wrong_frequency):
        with pytest.raises(KvblendError, match="ROPE_MISMATCH"):
            prove(proof, rope_spec(wrong(engine.rope)), SHAPE, dtype)
    quantised = torch.frombuffer(bytearray(proof.key_a), dtype=torch.float32).to(DTYPES[dtype]).float()
    proof.key_a = quantised.numpy().astype("<f4").tobytes()
    with pytest.raises(KvblendError, match="ROPE_MISMATCH"):
        prove(proof, rope, SHAPE, dtype)


def test_a_gpu_that_cannot_convert_fp8_is_refused() -> None:
    for dtype in FP8:
        check_dtype(dtype, (8, 9))
        check_dtype(dtype, (9, 0))
        with pytest.raises(KvblendError, match=r"LAYOUT_UNKNOWN.*compute capability 8\.9; this one has 8\.6"):
            check_dtype(dtype, (8, 6))
    check_dtype(common.DTYPE_BFLOAT16, (8, 0))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Matcher, store and agent; everything that is read is verified."""
    with TemporaryDirectory(prefix="kvb-", dir="/dev/shm") as directory:
        with closing(Stack(Path(directory), arena_mib=8)) as running:
            running.start_matcher()
            running.start_store("--verify-share", "1")
            running.start_agent()
            yield running


@pytest.mark.parametrize("dtype", FP8, ids=common.Dtype.Name)
@pytest.mark.parametrize(("heads", "size"), [(2, 8), (1, 12)], ids=["whole words", "odd rows"])
def test_fp8_text_is_stored_found_and_moved(stack: Stack, dtype: common.Dtype, heads: int, size: int) -> None:
    rig = stack.rig("agent", KvShape(3, heads, size, blocks=24, block_tokens=4, dtype=dtype))
    rope = rig.space.groups[0].rope
    here, there = blocks(*range(0, 12)), blocks(*range(23, 11, -1))
    text = np.random.default_rng(16 * size + dtype).integers(0, 50_000, 37).tolist()
    original = rig.engine.read(slots_of(here, range(37)))

    checksum = checksum_of(original.view(torch.uint8).numpy().tobytes())
    for expected, proven in ((checksum, True), (checksum ^ 1, False)):
        proof = pb.ProveLayoutRequest(
            instance_id=INSTANCE, slots=here, tokens=37, expected_checksums=expected.to_bytes(8, "little")
        )
        assert rig.call("ProveLayout", proof).proven == proven

    stored = rig.store(
        text, here, kind=store.STORE_KIND_DOCUMENT, document=store.DocumentOptions(document=f"{dtype} {size}")
    )
    assert {name for name, _ in outcomes(stored)} == {"STORED"}
    prompt = [*range(60_000, 60_007), *text, 70_000]
    found = rig.lookup(prompt, at_least=[stored.position])
    (segment,) = Segments(found.segments)
    assert (segment.query_position, segment.stored_position) == (7, 0)
    assert ranges(rig.retrieve(there).written) == [(7, 7 + segment.length)]
    kv = rig.engine.read(slots_of(there, range(7, 7 + segment.length)))
    check_moved(kv, original[:, :, : segment.length], rope, 7)
    assert not same_bits(kv[:, 0], original[:, 0, : segment.length])
