"""Text goes from one engine's GPU memory through store and agent, all processes of their own, to another's."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
import torch
from agent_rig import INSTANCE, encode, outcomes, ranges
from containers import PLACES
from engine_memory import DTYPES, FP8
from gpu_rig import GpuRig, GpuStack, gpu_stack, needs_gpu
from test_round_trip import ROPES, check_moved

from kvblend.cuda_memory import cuda_handle, set_semaphore, wait_for_semaphore
from kvblend.layouts import ARRANGEMENTS, KvShape
from kvblend.results import Segments
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.checksums import checksum_of

pytestmark = needs_gpu

SEEDS = count(1)


@pytest.fixture(scope="module", params=PLACES)
def stack(request: pytest.FixtureRequest) -> Iterator[GpuStack]:
    with gpu_stack(256, "--staging-mib", "1", verify=True, place=request.param) as running:
        yield running


@dataclass(frozen=True)
class Case:
    arrangement: str = "paged_nhd"
    target: str = "paged_nhd"
    dtype: common.Dtype = common.DTYPE_BFLOAT16
    rope: str = "neox"
    layers: int = 3
    heads: int = 2
    head_size: int = 16
    block_tokens: int = 4
    tokens: int = 69
    # Tokens that a prompt has in front of the stored text.
    shift: int = 37


def shape_of(case: Case, arrangement: str, slots: int) -> KvShape:
    if arrangement == "contiguous":
        return KvShape.contiguous(case.layers, case.heads, case.head_size, slots, case.dtype)
    blocks = -(-slots // case.block_tokens)
    return KvShape(case.layers, case.heads, case.head_size, blocks, case.block_tokens, case.dtype)


def slot_map(rig: GpuRig, seed: int) -> tuple[pb.SlotMap, list[int]]:
    """Every block in a random order, and the slot of each position."""
    shape = rig.engine.shape
    table = np.random.default_rng(seed).permutation(shape.blocks).tolist()
    slots = [block * shape.block_tokens + place for block in table for place in range(shape.block_tokens)]
    return pb.SlotMap(block_ids=encode(table)), slots


def check_case(stack: GpuStack, case: Case) -> None:
    seed = next(SEEDS)
    rope = ROPES[case.rope](case.head_size)
    source = stack.gpu_rig(case.arrangement, shape_of(case, case.arrangement, case.tokens), rope, seed)
    if rope.inv_freq:
        source.prove_rope()
    text = np.random.default_rng(seed).integers(0, 50_000, case.tokens).tolist()
    table, slots = slot_map(source, seed)
    original = source.engine.read(slots[: case.tokens])
    answer = source.store(
        text,
        table,
        kind=store.STORE_KIND_DOCUMENT,
        document=store.DocumentOptions(document=f"d{seed}"),
    )
    assert {name for name, _ in outcomes(answer)} == {"STORED"}

    length = case.shift + case.tokens + 5
    target = stack.gpu_rig(case.target, shape_of(case, case.target, length), rope, seed + 1)
    if rope.inv_freq:
        target.prove_rope()
    prompt = [*range(60_000, 60_000 + case.shift), *text, *range(70_000, 70_005)]
    table, slots = slot_map(target, seed + 1)
    before = target.engine.snapshot()
    old = target.engine.read(slots[:length])
    found = target.lookup(prompt, f"r{seed}", at_least=[answer.position])
    covered = [(0, 0, found.prefix_tokens)] if found.prefix_tokens else []
    covered += [(item.query_position, item.stored_position, item.length) for item in Segments(found.segments)]
    assert sum(size for _, _, size in covered) >= case.tokens - 32
    response = target.retrieve(table, f"r{seed}")
    assert not response.failed
    assert sum(end - first for first, end in ranges(response.written)) == sum(size for _, _, size in covered)
    for query, stored, size in covered:
        places = slots[query : query + size]
        kv = target.engine.read(places)
        check_moved(kv, original[:, :, stored : stored + size], rope, query - stored)
        target.engine.write(places, old[:, :, query : query + size])
    assert target.engine.snapshot() == before, "a slot outside the request was written"
    for rig in (source, target):
        rig.close()


@pytest.mark.parametrize("arrangement", sorted(ARRANGEMENTS))
@pytest.mark.parametrize("shift", [0, 37])
def test_every_arrangement(stack: GpuStack, arrangement: str, shift: int) -> None:
    check_case(stack, Case(arrangement=arrangement, target=arrangement, shift=shift))


@pytest.mark.parametrize("arrangement", sorted(ARRANGEMENTS))
@pytest.mark.parametrize("dtype", FP8, ids=common.Dtype.Name)
def test_every_arrangement_in_fp8(stack: GpuStack, arrangement: str, dtype: common.Dtype) -> None:
    for shift in (0, 37):
        check_case(stack, Case(arrangement=arrangement, target=arrangement, dtype=dtype, shift=shift))


@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("dtype", sorted(DTYPES), ids=common.Dtype.Name)
def test_every_rope_and_dtype(stack: GpuStack, rope: str, dtype: common.Dtype) -> None:
    check_case(stack, Case(rope=rope, dtype=dtype, target="paged_hnd"))


@pytest.mark.parametrize(
    "case",
    [
        Case(heads=3, head_size=80),
        Case(heads=1, head_size=256, block_tokens=1),
        Case(heads=8, head_size=128, layers=8, block_tokens=16, tokens=331, shift=4001),
        Case(heads=5, head_size=24, rope="neox partial", target="contiguous"),
        Case(heads=8, head_size=128, layers=40, block_tokens=16, tokens=100, dtype=common.DTYPE_FLOAT32),
        Case(heads=8, head_size=128, layers=2, block_tokens=16, tokens=171, shift=4001, dtype=common.DTYPE_FLOAT8_E4M3),
        Case(heads=1, head_size=12, block_tokens=1, rope="gptj tail", dtype=common.DTYPE_FLOAT8_E5M2),
    ],
    ids=[
        "odd heads",
        "one wide head",
        "far",
        "24 elements",
        "objects larger than a slot",
        "far in fp8",
        "no whole words",
    ],
)
def test_shapes_of_models(stack: GpuStack, case: Case) -> None:
    check_case(stack, case)


@pytest.mark.parametrize("dtype", FP8, ids=common.Dtype.Name)
def test_nan_in_fp8_stays_nan(stack: GpuStack, dtype: common.Dtype) -> None:
    """And spreads to the other element of its pair, no further."""
    case, seed = Case(dtype=dtype, tokens=128), next(SEEDS)
    rig = stack.gpu_rig("paged_nhd", shape_of(case, "paged_nhd", 128), ROPES["neox"](16), seed)
    rig.prove_rope()
    table, slots = slot_map(rig, seed)
    rig.engine.token(1, 0, slots[5]).view(torch.uint8)[1, 3] = 0x7F
    torch.cuda.synchronize()
    text = np.random.default_rng(seed).integers(0, 50_000, 48).tolist()
    document = store.DocumentOptions(document=f"nan {dtype}")
    answer = rig.store(text, table, kind=store.STORE_KIND_DOCUMENT, document=document)
    (segment,) = Segments(rig.lookup([*range(64), *text], "nan", at_least=[answer.position]).segments)
    assert (segment.query_position, segment.stored_position) == (64, 0)
    assert not rig.retrieve(table, "nan").failed
    found = rig.engine.read([slots[64 + 5]])[:, :, 0].float().isnan().nonzero().tolist()
    assert found == [[1, 0, 1, 3], [1, 0, 1, 3 + 8]]
    rig.close()


def test_the_layout_is_proven_by_a_pattern(stack: GpuStack) -> None:
    case = Case()
    rig = stack.gpu_rig("paged_hnd", shape_of(case, "paged_hnd", case.tokens), ROPES["neox"](16), next(SEEDS))
    table, slots = slot_map(rig, 5)
    bits = rig.engine.read(slots[:21]).contiguous().view(torch.uint8).numpy()
    right = checksum_of(bits.tobytes())
    for checksum, proven in ((right, True), (right ^ 1, False)):
        request = pb.ProveLayoutRequest(
            instance_id=INSTANCE,
            slots=table,
            tokens=21,
            expected_checksums=np.array([checksum], "<u8").tobytes(),
        )
        assert rig.call("ProveLayout", request).proven == proven


def test_damage_in_the_arena_is_found_on_the_gpu(stack: GpuStack) -> None:
    """By the checksum that the GPU itself made of what it stored."""
    case = Case(tokens=48, layers=8)
    rig = stack.gpu_rig("paged_nhd", shape_of(case, "paged_nhd", 48), ROPES["neox"](16), next(SEEDS))
    table, slots = slot_map(rig, 7)
    marker = torch.full((2, 16), 123.0, dtype=torch.bfloat16)
    rig.engine.token(3, 1, slots[20]).copy_(marker)
    torch.cuda.synchronize()
    text = list(range(90_000, 90_048))
    assert {name for name, _ in outcomes(rig.store(text, table))} == {"STORED"}
    (slab,) = stack.directory.glob("arena/slab*")
    memory = np.memmap(slab, np.uint8, "r+")
    pattern = marker.view(torch.uint8).numpy().tobytes()
    place = memory.tobytes().index(pattern)
    memory[place + 5] ^= 1
    assert rig.lookup([*text, 1], "damaged").prefix_tokens == 48
    response = rig.retrieve(table, "damaged")
    assert ranges(response.written) == [(0, 16), (32, 48)]
    assert [common.Reason.Name(item.reason) for item in response.failed] == ["REASON_CHECKSUM_MISMATCH"]


def test_an_engine_s_stream_goes_on_layer_by_layer(stack: GpuStack) -> None:
    """It waits for each step's semaphore and copies the step's layers at once: they are those of the end."""
    case = Case(tokens=64, layers=8, heads=8, head_size=128)
    rig = stack.gpu_rig("paged_nhd", shape_of(case, "paged_nhd", 64), ROPES["neox"](128), next(SEEDS))
    semaphores = torch.zeros(8, dtype=torch.int64, device="cuda")
    rig.register(semaphores=cuda_handle(semaphores.data_ptr(), semaphores.nbytes))
    table, _ = slot_map(rig, 8)
    text = list(range(95_000, 95_064))
    assert {name for name, _ in outcomes(rig.store(text, table))} == {"STORED"}
    wanted = [tensor.clone() for tensor in rig.engine.tensors]
    for tensor in rig.engine.tensors:
        tensor.zero_()
    torch.cuda.synchronize()
    stream, seen = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for step in range(4):
            wait_for_semaphore(stream.cuda_stream, semaphores.data_ptr() + 8 * (2 + step), 9)
            seen += [tensor.clone() for tensor in rig.engine.tensors[4 * step : 4 * step + 4]]
    try:
        assert not stream.query()
        assert rig.lookup([*text, 1], "steps").prefix_tokens == 64
        response = rig.retrieve(table, "steps", steps=pb.LayerSteps(count=4, first=2, value=9))
        assert ranges(response.written) == [(0, 64)]
    finally:
        for step in range(4):
            set_semaphore(torch.cuda.current_stream().cuda_stream, semaphores.data_ptr() + 8 * (2 + step), 9)
    torch.cuda.synchronize()
    assert semaphores.tolist() == [0, 0, 9, 9, 9, 9, 0, 0]
    assert all(torch.equal(one, two) for one, two in zip(seen, wanted, strict=True))
