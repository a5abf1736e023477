"""A GPU on the CPU that does what was asked of it as late and as disorderly as CUDA allows.

Work waits in its stream until somebody looks at an event; then some of what may run is run, streams in a
random order. A copy or kernel reads its tables and buffers when it runs, so that a wait which is missing, or
a buffer that is filled again too early, becomes wrong bytes.
"""

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvblend.v1 import agent_pb2 as pb
from services.common.checksums import MULTIPLIERS, SHIFTS, STEP
from services.gpu_agent.devices.cpu import rounded
from services.gpu_agent.devices.cuda.batches import TILE, Packed
from services.gpu_agent.devices.cuda.lane import Lane
from services.gpu_agent.devices.cuda.memory import DTYPES, CudaKvMemory
from services.gpu_agent.devices.cuda.planes import GPTJ, NO_ROPE, Constants
from services.gpu_agent.devices.cuda.words import WordReader
from services.gpu_agent.devices.shared_memory import SharedMemoryFile
from services.gpu_agent.engines.layouts import Layout

_U64 = (1 << 64) - 1


class FakeStream:
    cuda_stream = property(lambda self: self)

    def __init__(self, gpu: "FakeGpu") -> None:
        self.gpu = gpu
        # Each tells whether it could be done.
        self.work: deque[Callable[[], bool]] = deque()

    def wait_event(self, event: "FakeEvent") -> None:
        record = event.record_number
        self.work.append(lambda: event.reached >= record)

    def wait_stream(self, other: "FakeStream") -> None:
        event = FakeEvent(self.gpu)
        event.record(other)
        self.wait_event(event)

    def query(self) -> bool:
        self.gpu.step()
        return not self.work

    def synchronize(self) -> None:
        while self.work:
            self.gpu.step()


class FakeEvent:
    def __init__(self, gpu: "FakeGpu") -> None:
        self.gpu = gpu
        self.record_number = 0
        self.reached = 0

    def record(self, stream: FakeStream) -> None:
        self.record_number += 1
        record = self.record_number

        def reach() -> bool:
            self.reached = record
            return True

        stream.work.append(reach)

    def query(self) -> bool:
        self.gpu.step()
        return self.reached == self.record_number

    def synchronize(self) -> None:
        while not self.query():
            pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.reached
        assert end.reached
        return 1.0


class FakeGpu:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[FakeStream] = []
        self.current: FakeStream | None = None
        # Nothing runs any more.
        self.stuck = False
        self.bytes_copied = 0
        # Copies and kernels that are still to be done.
        self.in_flight = 0
        # (first address, end) of what kernels may touch outside the slots.
        self.engine_memory: list[tuple[int, int]] = []
        self.signals = self.stream()

    def enter(self) -> None:
        pass

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = None

    def event(self, *, timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    pinned = empty

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        return table.clone()

    def step(self) -> None:
        """Runs a few of the things that may run."""
        for _ in range(0 if self.stuck else self.random.randint(1, 6)):
            stream = self.random.choice(self.streams)
            if stream.work and stream.work[0]():
                stream.work.popleft()

    def to_device(self, host: int, pitch: int, device: int, width: int, rows: int, stream: FakeStream) -> None:
        self._later(stream, lambda: self._copy(device, width, host, pitch, width, rows))

    def to_host(self, device: int, host: int, pitch: int, width: int, rows: int, stream: FakeStream) -> None:
        self._later(stream, lambda: self._copy(host, pitch, device, width, width, rows))

    def signal(self, address: int, value: int, stream: FakeStream) -> None:
        self._later(stream, lambda: self.set_value(address, value))

    def set_value(self, address: int, value: int) -> None:
        ctypes.c_uint64.from_address(address).value = value

    def _copy(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        self.bytes_copied += width * rows

    def start(self, *arguments: Any) -> None:
        """The kernel, on the current stream."""
        stream = self.current
        assert stream is not None, "a kernel was started on no stream of the lane"
        self._later(stream, lambda: plain_kernel(self.engine_memory, *arguments))

    def _later(self, stream: FakeStream, work: Callable[[], None]) -> None:
        def run() -> bool:
            work()
            self.in_flight -= 1
            return True

        self.in_flight += 1
        stream.work.append(run)


def plain_kernel(
    engine_memory: list[tuple[int, int]],
    staging: torch.Tensor,
    planes: torch.Tensor,
    tables: torch.Tensor,
    packed: Packed,
    grid: tuple[int, int],
    known: Constants,
    gather: bool,
) -> None:
    """What kernels.py does, token by token, by the definition of the tables."""
    tiles = tables[packed.tiles :].view(torch.int64)
    slots = tables[packed.slots :].view(torch.int32)
    for number in range(grid[0]):
        columns = tiles[len(TILE) * number : len(TILE) * (number + 1)].tolist()
        start, pitch, row, tokens, first, first_plane, count, rotation, target, first_word, plane_words = columns
        first_plane += packed.base
        first_word += packed.base * plane_words
        assert 0 <= count <= grid[1], "these are no tables"
        assert 0 <= tokens <= known.tile_tokens, "these are no tables"
        for plane in range(count):
            begin, by_block, by_token, by_head, by_element, is_key = planes[first_plane + plane].tolist()
            for token in range(tokens):
                block, place = divmod(int(slots[row + token]), known.block_tokens)
                inside = start + plane * pitch + (first + token) * known.heads * known.size
                stored = staging[inside : inside + known.heads * known.size].view(known.heads, known.size)
                outside = begin + block * by_block + place * by_token
                engine = engine_view(
                    engine_memory, outside, (known.heads, known.size), (by_head, by_element), staging.dtype
                )
                if gather:
                    stored.copy_(engine)
                elif rotation < 0 or not is_key or known.style == NO_ROPE:
                    engine.copy_(stored)
                else:
                    cos, sin = (
                        tables[at:].view(torch.float32)[rotation * known.pairs :][: known.pairs]
                        for at in (packed.cos, packed.sin)
                    )
                    engine.copy_(rotated(stored, cos, sin, known))
            if target >= 0:
                inside = start + plane * pitch + first * known.heads * known.size
                words = staging[inside : inside + tokens * known.heads * known.size].view(torch.uint8).numpy()
                sums = tables[packed.sums :].view(torch.int64)
                sums[target] += signed(terms_of(words.tobytes(), first_word + plane * plane_words))


def terms_of(data: bytes, number: int) -> int:
    """The sum of the terms of these words, by the checksum's definition."""
    words = np.frombuffer(data, "<u8").tolist()
    return sum(mix(word ^ ((number + place) * STEP & _U64)) for place, word in enumerate(words)) & _U64


def mix(word: int) -> int:
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        word = (word ^ word >> shift) * multiplier & _U64
    return word


def signed(word: int) -> int:
    return word - (1 << 64 if word >> 63 else 0)


def rotated(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, known: Constants) -> torch.Tensor:
    moved = keys.clone()
    for pair in range(known.pairs):
        one = known.rotary_offset + (2 * pair if known.style == GPTJ else pair)
        two = one + (1 if known.style == GPTJ else known.pairs)
        x, y = keys[:, one].float(), keys[:, two].float()
        moved[:, one] = rounded(x * cos[pair] - y * sin[pair], keys.dtype)
        moved[:, two] = rounded(y * cos[pair] + x * sin[pair], keys.dtype)
    return moved


def engine_view(
    allowed: list[tuple[int, int]],
    begin: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Memory of this process by its address over the size of an element."""
    reach = 1 + sum(stride * (extent - 1) for stride, extent in zip(strides, shape, strict=True))
    first, end = begin * dtype.itemsize, (begin + reach) * dtype.itemsize
    assert any(low <= first and end <= high for low, high in allowed), "a kernel leaves the engine's memory"
    raw = (ctypes.c_ubyte * (reach * dtype.itemsize)).from_address(begin * dtype.itemsize)
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides)


class Opened:
    """Shared memory in place of an engine's GPU memory."""

    def __init__(
        self, gpu: FakeGpu, handles: Sequence[pb.DeviceHandle], semaphores: pb.DeviceHandle | None = None
    ) -> None:
        self._gpu = gpu
        self.mapped_bytes = sum(handle.bytes for handle in handles)
        self._files = [SharedMemoryFile(handle, Path("/dev/shm")) for handle in handles]
        self._arrays = [np.frombuffer(file.map, np.uint8) for file in self._files]
        self.starts = [
            int(array.ctypes.data) + handle.allocation_offset
            for array, handle in zip(self._arrays, handles, strict=True)
        ]

        self.semaphores = semaphores.bytes // 8 if semaphores is not None else 0
        if semaphores is not None:
            self._files.append(SharedMemoryFile(semaphores, Path("/dev/shm")))
            self._arrays.append(np.frombuffer(self._files[-1].map, np.uint8))
        self.first_semaphore = int(self._arrays[-1].ctypes.data)
        gpu.engine_memory = [(start, start + handle.bytes) for start, handle in zip(self.starts, handles, strict=True)]

    def close(self) -> None:
        # What somebody forgot to wait for happens now.
        for stream in self._gpu.streams:
            stream.synchronize()
        self._arrays.clear()
        for file in self._files:
            file.close()
        self._files.clear()


class SomeRegistered:
    """Host memory of which the GPU reaches some blocks and others not."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def is_registered(self, address: int, nbytes: int) -> bool:
        return random.Random(self._seed * 31 + address).random() < 0.5


class FakeDevice:
    """Opens shared memory as the cuda device opens an engine's; `start` replaces the kernel."""

    def __init__(self, seed: int, slot_bytes: int, hang_seconds: float = 60.0) -> None:
        self.gpu = FakeGpu(seed)
        self.start: Callable[..., None] = self.gpu.start
        host: Any = SomeRegistered(seed)
        fake: Any = self.gpu
        self.inbound, self.outbound = (Lane(fake, host, slot_bytes, hang_seconds, way) for way in (True, False))
        self.words = WordReader(fake, hang_seconds)

    def open(
        self, handles: Sequence[pb.DeviceHandle], layout: Layout, semaphores: pb.DeviceHandle | None = None
    ) -> CudaKvMemory:
        assert layout.dtype in DTYPES
        return self.kv_memory(Opened(self.gpu, handles, semaphores), layout)

    def kv_memory(self, opened: Any, layout: Layout) -> CudaKvMemory:
        fake: Any = self.gpu
        return CudaKvMemory(fake, self.start, opened, layout, self.inbound, self.outbound, self.words)
