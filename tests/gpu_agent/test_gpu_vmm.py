"""Engines whose KV is memory of cuMemCreate, as with PyTorch's expandable segments."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_rig import INSTANCE, CallFailed, blocks, outcomes, ranges, slots_of
from containers import CONTAINER, needs_root
from engine_memory import make_rope, same_bits
from gpu_rig import GpuMemory, GpuRig, GpuStack, gpu_stack, needs_gpu
from memfd_memory import MemfdMemory
from vmm_memory import MIB, VmmBuffer

from benchmarks.gpu.life import killed_and_restarted
from kvblend.cuda_memory import CudaUnavailable, cuda_handle
from kvblend.cuda_vmm import VmmMemory
from kvblend.descriptors import Memory, sent
from kvblend.layouts import KvShape
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common

pytestmark = needs_gpu

ENGINE = Path(__file__).with_name("gpu_vmm_engine.py")
# K and V of a layer have 2 MiB each; block 31 of K lies across the end of the first chunk.
SHAPE = KvShape(4, 8, 128, 64, 16, common.DTYPE_BFLOAT16)
ROPE = make_rope(common.ROPE_STYLE_NEOX, 128)
CHUNK_MIB, OFFSET = [2, 2, 4], MIB + 512
STORED, OTHER = blocks(31, 5, 63, 0, 40), blocks(8, 62, 30, 1, 32)
ENGINE_MIB = 2000
TIMES = 5


class ChunkedMemory(GpuMemory):
    """The same tensors, from OFFSET on of several chunks each."""

    def __init__(self, arrangement: str, shape: KvShape, seed: int = 0) -> None:
        super().__init__(arrangement, shape, seed)
        self.chunked = [VmmBuffer(CHUNK_MIB) for _ in self.tensors]
        for number, (buffer, plain) in enumerate(zip(self.chunked, self.tensors, strict=True)):
            whole = torch.as_tensor(buffer, device="cuda")
            self.tensors[number] = whole[OFFSET : OFFSET + plain.nbytes].view(plain.dtype).copy_(plain)
        torch.cuda.synchronize()

    def close(self) -> None:
        super().close()
        for buffer in self.chunked:
            buffer.close()


class ChunkedRig(GpuRig):
    """Sends descriptors for each registration, as a client does."""

    def __init__(self, stack: GpuStack, seed: int) -> None:
        super().__init__(stack.target("agent"), "paged_nhd_kv_outer", SHAPE, ROPE, seed)
        self.target = stack.target("agent")
        self.engine.close()
        self.engine = ChunkedMemory("paged_nhd_kv_outer", SHAPE, seed)

    def register_memory(self, memories: Sequence[Memory], semaphores: Memory | None = None) -> None:
        with sent(self.target, INSTANCE, [*memories, *([semaphores] if semaphores else [])], 30) as handles:
            changes: dict[str, Any] = {"semaphores": handles[-1]} if semaphores else {}
            self.register(handles=handles[: len(memories)], **changes)


@pytest.fixture(scope="module")
def stack() -> Iterator[GpuStack]:
    with gpu_stack(64, "--staging-mib", "4", matcher=False) as running:
        yield running


@pytest.fixture
def rig(stack: GpuStack) -> Iterator[ChunkedRig]:
    with closing(ChunkedRig(stack, 1)) as made:
        yield made


def check_round_trip(rig: GpuRig, text: list[int], **changes: Any) -> None:
    """Bit for bit, and nothing else is written."""
    places = range(len(text))
    original = rig.engine.read(slots_of(STORED, places, 16))
    assert {name for name, _ in outcomes(rig.store(text, STORED))} == {"STORED"}
    request = f"r{text[0]}"
    assert rig.lookup([*text, 1], request).prefix_tokens == len(text)
    old, before = rig.engine.read(slots_of(OTHER, places, 16)), rig.engine.snapshot()
    response = rig.retrieve(OTHER, request, **changes)
    assert ranges(response.written) == [(0, len(text))]
    assert same_bits(rig.engine.read(slots_of(OTHER, places, 16)), original)
    rig.engine.write(slots_of(OTHER, places, 16), old)
    assert rig.engine.snapshot() == before


def test_chunks_of_an_engine_are_read_and_written(rig: ChunkedRig) -> None:
    memories = rig.engine.handles
    assert all(isinstance(memory, VmmMemory) for memory in memories)
    assert [size for _, size in memories[0].chunks] == [mib * MIB for mib in CHUNK_MIB]
    assert memories[0].offset == OFFSET
    rig.register_memory(memories)
    check_round_trip(rig, list(range(100, 169)))


def test_semaphores_may_lie_in_chunks(rig: ChunkedRig) -> None:
    with closing(VmmBuffer([2])) as buffer:
        words = torch.as_tensor(buffer, device="cuda")[64:128].view(torch.int64).zero_()
        torch.cuda.synchronize()
        rig.register_memory(rig.engine.handles, cuda_handle(words.data_ptr(), words.nbytes))
        check_round_trip(rig, list(range(200, 269)), steps=pb.LayerSteps(count=4, first=2, value=9))
        assert words.tolist() == [0, 0, 9, 9, 9, 9, 0, 0]


class NoMemory(MemfdMemory):
    """A descriptor that is none of CUDA's, for a handle that says so."""

    def __init__(self, memory: VmmMemory) -> None:
        super().__init__(memory.chunk_bytes)
        self.handle = memory.handle  # type: ignore[method-assign]


def test_a_lying_engine_is_refused_and_the_agent_goes_on(rig: ChunkedRig) -> None:
    first, *others = rig.engine.handles
    (*chunks, (place, size)) = first.chunks
    lies: list[tuple[Memory, str]] = [
        (replace(first, chunks=(*chunks, (place, size + 2 * MIB))), "HANDLE_UNUSABLE.*cuMem"),
        (replace(first, chunks=(*chunks, (place, 1 << 40))), "HANDLE_UNUSABLE.*cuMem"),
        (replace(first, nbytes=8 * MIB), "HANDLE_OUT_OF_BOUNDS"),
        (NoMemory(first), "HANDLE_UNUSABLE.*cuMemImportFromShareableHandle"),
    ]
    for lie, words in lies:
        with pytest.raises(CallFailed, match=words) as caught:
            rig.register_memory([lie, *others])
        print(caught.value)
    rig.register_memory([first, *others])
    check_round_trip(rig, list(range(300, 369)))


def test_memory_that_was_not_made_to_be_shared_names_the_setting() -> None:
    torch.cuda.init()
    with closing(VmmBuffer([2, 2], handle_types=0)) as buffer:
        with pytest.raises(CudaUnavailable, match="expandable_segments:False"):
            cuda_handle(buffer.address, buffer.nbytes)


def run_engine(stack: GpuStack, *before: str) -> str:
    command = [*before, sys.executable, str(ENGINE), "round-trip", stack.target("agent"), "torch", "100"]
    # Read when torch is imported.
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    print("expandable segments:", done.stdout.strip())
    return done.stdout


def test_pytorchs_expandable_segments(stack: GpuStack) -> None:
    """Where PyTorch shares them by a fabric alone the engine is told what to set."""
    outcome = run_engine(stack)
    assert outcome.startswith("the same") or "expandable_segments:False" in outcome


@needs_root
def test_two_containers_whose_process_is_number_1() -> None:
    """CUDA IPC cannot tell them apart; descriptors do not ask."""
    with gpu_stack(64, "--staging-mib", "1", matcher=False, place="container") as contained:
        outcome = run_engine(contained, *CONTAINER)
    assert outcome.startswith("the same; process 1,") or "expandable_segments:False" in outcome


@contextmanager
def engine(stack: GpuStack, mode: str, instance: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(ENGINE), mode, stack.target("agent"), instance, str(ENGINE_MIB)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == mode
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("mode", ["registered", "sent"])
def test_each_engine_finds_the_chunks_of_the_killed_one_before_it(stack: GpuStack, mode: str) -> None:
    """Also of one that was killed before its registration."""
    waits = sorted(killed_and_restarted(partial(engine, stack, mode), ENGINE_MIB << 20, TIMES))
    print(f"seconds until the memory was free ({mode}):", " ".join(f"{wait:.3f}" for wait in waits))
