"""The calls of an engine as docs/agent.md shows them, on the cpu device: its GPU memory is shared memory."""

import ctypes
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent_rig import SHAPE, Rig, blocks, rope_proof, slots_of
from engine_memory import same_bits

from kvblend import cuda_memory, cuda_semaphores
from kvblend.client import KvblendClient
from kvblend.memory import SharedBuffer
from kvblend.results import RetrieveResult
from kvblend.v1 import agent_pb2 as pb

PAGE = Path(__file__).parents[2] / "docs" / "agent.md"
TEXT = list(range(100, 140))
STORED, OTHER = range(10), range(12, 22)
STREAM, OTHER_STREAM = SimpleNamespace(cuda_stream=11), SimpleNamespace(cuda_stream=12)


class Gpu:
    """Memory by its address, and streams that do at once what they are given, but for what they wait for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._buffers: dict[int, SharedBuffer] = {}
        # (address, value)
        self.waits: list[tuple[int, int]] = []

    def empty(self, count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda"
        buffer = self._stack.enter_context(closing(SharedBuffer(count * dtype.itemsize)))
        self.add(buffer)
        return torch.frombuffer(buffer.array, dtype=dtype)

    def add(self, buffer: SharedBuffer) -> None:
        self._buffers[int(buffer.array.ctypes.data)] = buffer

    def handle(self, address: int, nbytes: int) -> pb.DeviceHandle:
        assert nbytes == self._buffers[address].nbytes
        return self._buffers[address].handle()

    def wait(self, stream: int, address: int, value: int) -> None:
        assert stream == STREAM.cuda_stream
        self.waits.append((address, value))

    def set(self, stream: int, address: int, value: int) -> None:
        assert stream != STREAM.cuda_stream or self.waited_enough(), "the stream waits, and for this"
        ctypes.c_uint64.from_address(address).value = value

    def waited_enough(self) -> bool:
        return all(ctypes.c_uint64.from_address(address).value >= value for address, value in self.waits)


class Engine:
    """What the page's code runs in."""

    def __init__(self, rig: Rig, gpu: Gpu) -> None:
        self.steps: list[int] = []
        self.computed = 0
        self.names: dict[str, Any] = {
            "agent": f"unix:{rig.fake.directory}/agent.sock",
            "torch": SimpleNamespace(empty=gpu.empty, int64=torch.int64),
            "stream": STREAM,
            "other": OTHER_STREAM,
            "space": rig.space,
            "shape": SHAPE,
            "kv_tensors": [torch.frombuffer(buffer.array, dtype=torch.uint8) for buffer in rig.engine.buffers],
            "rope_proofs": [rope_proof(rig.engine, rig.space.groups[0].rope)],
            "enqueue_layers": lambda step, _: self.steps.append(step),
            "enqueue_all_layers": self._compute,
        }

    def _compute(self, prompt: list[int]) -> None:
        assert prompt == TEXT
        self.computed += 1

    def prefill(self, request_id: str, block_ids: range) -> None:
        self.names["prefill"](TEXT, request_id, block_ids)


@pytest.fixture
def gpu(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with ExitStack() as stack:
        gpu = Gpu(stack)
        for buffer in rig.engine.buffers:
            gpu.add(buffer)
        monkeypatch.setattr(cuda_memory, "cuda_handle", gpu.handle)
        monkeypatch.setattr(cuda_memory, "wait_for_semaphore", gpu.wait)
        monkeypatch.setattr(cuda_memory, "set_semaphore", gpu.set)
        monkeypatch.setattr(cuda_semaphores, "cuda_handle", gpu.handle)
        monkeypatch.setattr(cuda_semaphores, "set_semaphore", gpu.set)
        monkeypatch.setattr(cuda_semaphores, "zero_memory", lambda address, nbytes: ctypes.memset(address, 0, nbytes))
        yield gpu


@pytest.fixture
def engine(rig: Rig, gpu: Gpu) -> Iterator[Engine]:
    """The page's first part has run, and its request is answered once, without anything to reuse."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    engine = Engine(rig, gpu)
    exec(code.replace("import torch\n", ""), engine.names)
    engine.prefill("first", STORED)
    assert (engine.computed, engine.steps) == (1, [])
    rig.fake.serve_prefix(3)
    yield engine
    engine.names["client"].close()
    engine.names["pool"].shutdown()


def test_the_page_s_engine_gets_its_text_back_in_steps(rig: Rig, gpu: Gpu, engine: Engine) -> None:
    assert [item.tokens for item in rig.fake.objects] == [16, 16, 8]
    engine.prefill("second", OTHER)
    assert (engine.computed, engine.steps) == (1, list(range(8)))
    assert len(gpu.waits) == 8
    assert gpu.waited_enough()
    original, copied = (rig.engine.read(slots_of(blocks(*ids), range(40))) for ids in (STORED, OTHER))
    assert same_bits(original, copied)


def test_the_page_s_engine_goes_on_when_the_agent_does_not_answer(
    gpu: Gpu, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvblendClient, "retrieve", lambda *_, **__: RetrieveResult(ok=False, reason="DEADLINE"))
    engine.prefill("second", OTHER)
    assert gpu.waited_enough()
    assert engine.computed == 2
