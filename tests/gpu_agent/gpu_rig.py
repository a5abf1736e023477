"""An engine whose KV tensors are in this process's GPU memory, and an agent with the cuda device."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from math import prod
from typing import Any

import pytest
import torch
from agent_rig import Rig
from containers import volume
from engine_memory import DTYPES, EngineMemory, arbitrary, model_space
from processes import AGENT, Stack

from kvblend.cuda_memory import cuda_handle
from kvblend.layouts import KvShape, buffer_shapes
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common

_USABLE = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _USABLE, reason="needs an NVIDIA GPU, a CUDA build of torch, and Triton (make test-gpu)"),
]


class GpuMemory(EngineMemory):
    """The same buffers in GPU memory."""

    def __init__(self, arrangement: str, shape: KvShape, seed: int = 0, device: str = "cuda:0") -> None:
        self.arrangement = arrangement
        self.shape = shape
        self.dtype = DTYPES[shape.dtype]
        self.shapes = buffer_shapes(arrangement, shape)
        self.device = torch.device(device)
        generator = torch.Generator(self.device).manual_seed(seed)
        self.tensors = [arbitrary(prod(dims), self.dtype, generator) for dims in self.shapes]
        torch.cuda.synchronize(self.device)

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor.view(dims) for tensor, dims in zip(self.tensors, self.shapes, strict=True)]

    @property
    def handles(self) -> list[pb.DeviceHandle]:
        with torch.cuda.device(self.device):
            return [cuda_handle(tensor.data_ptr(), tensor.nbytes) for tensor in self.tensors]

    def read(self, slots: list[int]) -> torch.Tensor:
        return super().read(slots).cpu()

    def write(self, slots: list[int], values: torch.Tensor) -> None:
        super().write(slots, values.to(self.device))
        torch.cuda.synchronize(self.device)

    def snapshot(self) -> list[bytes]:
        return [tensor.view(torch.uint8).cpu().numpy().tobytes() for tensor in self.tensors]

    def close(self) -> None:
        self.tensors = []


class GpuRig(Rig):
    """A rig with an arrangement and a rope of its own."""

    def __init__(
        self, target: str, arrangement: str, shape: KvShape, rope: common.Rope, seed: int, device: str = "cuda:0"
    ) -> None:
        super().__init__(target, shape=KvShape(1, 1, 8, 1, 1, common.DTYPE_FLOAT32))
        self.engine.close()
        self.engine = GpuMemory(arrangement, shape, seed, device)
        self.space = model_space(shape, rope)


class GpuStack(Stack):
    @property
    def shares_shm(self) -> bool:
        """Engines and the agent see the same /dev/shm."""
        return "agent" not in self.contained

    def start_agent(
        self, name: str = "agent", *more: str, program: str | Sequence[str] = AGENT, **environment: str
    ) -> None:
        super().start_agent(name, "--device", "cuda", *more, program=program, **environment)

    def gpu_rig(self, arrangement: str, shape: KvShape, rope: common.Rope, seed: int = 0, **changes: Any) -> GpuRig:
        """Registered, its rope proven."""
        rig = GpuRig(self.target("agent"), arrangement, shape, rope, seed)
        self._rigs.append(rig)
        rig.register(**changes)
        rig.hold_session()
        return rig


@contextmanager
def gpu_stack(
    arena_mib: int, *agent_flags: str, matcher: bool = True, verify: bool = False, place: str = "beside"
) -> Iterator[GpuStack]:
    """`verify`: what is read is compared with its checksum, always. `place`: where the agent runs, one of PLACES."""
    with volume(place) as directory, closing(GpuStack(directory, arena_mib)) as stack:
        if matcher:
            stack.start_matcher()
        stack.start_store(*(["--verify-share", "1"] if verify else []))
        if place == "container":
            stack.contained.add("agent")
        stack.start_agent("agent", *agent_flags)
        stack.wait_agent()
        yield stack
