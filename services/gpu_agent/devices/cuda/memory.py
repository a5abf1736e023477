"""One registration's GPU memory: its planes as tables on the GPU, and the kernel compiled for each layer group."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from kvblend.v1 import common_pb2 as common
from services.common.errors import KvblendError
from services.gpu_agent.devices.base import SEMAPHORE_BYTES, Hung, Piece, Steps, Transfer, Watch
from services.gpu_agent.devices.cuda.batches import Batches, Packed
from services.gpu_agent.devices.cuda.driver import CudaError
from services.gpu_agent.devices.cuda.gpu import Gpu
from services.gpu_agent.devices.cuda.ipc import OpenedHandles, unusable
from services.gpu_agent.devices.cuda.lane import MAX_PAIRS, Lane, Launch, Move, Signal
from services.gpu_agent.devices.cuda.planes import Constants, constants, plane_table
from services.gpu_agent.devices.cuda.words import WordReader
from services.gpu_agent.engines.layouts import Layout
from services.gpu_agent.engines.rope import RopeSpec

DTYPES: dict[int, torch.dtype] = {
    common.DTYPE_FLOAT32: torch.float32,
    common.DTYPE_FLOAT16: torch.float16,
    common.DTYPE_BFLOAT16: torch.bfloat16,
    common.DTYPE_FLOAT8_E4M3: torch.float8_e4m3fn,
    common.DTYPE_FLOAT8_E5M2: torch.float8_e5m2,
}
# Compute capability from which on a GPU converts fp8.
_FP8_CAPABILITY = (8, 9)

_NO_ROPE = RopeSpec(common.ROPE_STYLE_NONE, 0, np.empty(0, np.float64))


# A GPU that needs longer for a few words hangs, and nobody waits for it then.
_SIGNAL_SECONDS, _LOOK_SECONDS = 1.0, 50e-6

# kernels.start, or what does the same on a CPU.
Start = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Packed, tuple[int, int], Constants, bool], None]


def check_dtype(dtype: common.Dtype, capability: tuple[int, int]) -> None:
    """Raises KvblendError LAYOUT_UNKNOWN for KV that a GPU of this compute capability cannot rotate."""
    if DTYPES[dtype].itemsize == 1 and capability < _FP8_CAPABILITY:
        needs, has = (".".join(map(str, version)) for version in (_FP8_CAPABILITY, capability))
        raise KvblendError(
            "LAYOUT_UNKNOWN",
            f"{common.Dtype.Name(dtype)} needs a GPU of compute capability {needs}; this one has {has}",
        )


class CudaKvMemory:
    """Closes `opened` with itself."""

    def __init__(
        self,
        gpu: Gpu,
        start: Start,
        opened: OpenedHandles,
        layout: Layout,
        inbound: Lane,
        outbound: Lane,
        words: WordReader,
    ) -> None:
        self.layout = layout
        self.semaphores = opened.semaphores
        self._semaphores = opened.first_semaphore
        self.mapped_bytes = opened.mapped_bytes
        self._gpu = gpu
        self._start = start
        self._opened = opened
        self._inbound = inbound
        self._outbound = outbound
        self._words = words
        self._dtype = DTYPES[layout.dtype]
        # Where each group's planes are, as planes.py says.
        self.tables = [plane_table(layout, group, opened.starts) for group in range(len(layout.groups))]
        self._gpu_tables = [gpu.upload(torch.from_numpy(table)) for table in self.tables]

    def scatter(self, group: int, pieces: Sequence[Piece], rope: RopeSpec, watch: Watch) -> list[int | None]:
        return self._run(self._inbound, group, pieces, rope, watch)

    def gather(self, group: int, pieces: Sequence[Piece], watch: Watch) -> list[int | None]:
        return self._run(self._outbound, group, pieces, _NO_ROPE, watch)

    def _run(self, lane: Lane, group: int, pieces: Sequence[Piece], rope: RopeSpec, watch: Watch) -> list[int | None]:
        self._gpu.enter()
        batches = self.batches(group, rope, lane.slot_bytes, pieces)
        launch = self.launch(group, rope, gather=lane is self._outbound)
        return batches.checksums(lane.run((Move(batch, launch) for batch in batches.of()), watch))

    def scatter_in_steps(self, transfers: Sequence[Transfer], steps: Steps, watch: Watch) -> list[list[int | None]]:
        self._gpu.enter()
        lane = self._inbound
        # The pieces of one transfer are numbered behind those of the one before.
        firsts = accumulate((len(transfer.pieces) for transfer in transfers), initial=0)
        batches = [
            self.batches(transfer.group, transfer.rope, lane.slot_bytes, transfer.pieces, first)
            for transfer, first in zip(transfers, firsts, strict=False)
        ]
        terms = lane.run(self._in_steps(transfers, batches, steps), watch)
        return [of.checksums(terms) for of in batches]

    def _in_steps(
        self, transfers: Sequence[Transfer], batches: Sequence[Batches], steps: Steps
    ) -> Iterator[Move | Signal]:
        launches = [self.launch(transfer.group, transfer.rope, gather=False) for transfer in transfers]
        for step in range(steps.count):
            for transfer, of, launch in zip(transfers, batches, launches, strict=True):
                layers = steps.layers(step, self.layout.groups[transfer.group].layers)
                for batch in of.of(layers):
                    yield Move(batch, launch)
            yield Signal(self._semaphores + (steps.first + step) * SEMAPHORE_BYTES, steps.value)

    def set_semaphores(self, steps: Steps) -> None:
        self._gpu.enter()
        for step in range(steps.count):
            address = self._semaphores + (steps.first + step) * SEMAPHORE_BYTES
            self._gpu.signal(address, steps.value, self._gpu.signals)
        until = time.monotonic() + _SIGNAL_SECONDS
        while not self._gpu.signals.query():
            if time.monotonic() > until:
                raise Hung(self._wait_for_signals, "the engine's semaphores are not set yet")
            time.sleep(_LOOK_SECONDS)

    def _wait_for_signals(self) -> None:
        self._gpu.enter()
        self._gpu.signals.synchronize()

    def semaphore(self, index: int, watch: Watch) -> int:
        self._gpu.enter()
        try:
            return self._words.read(self._semaphores + index * SEMAPHORE_BYTES, watch)
        except (CudaError, RuntimeError) as error:
            raise unusable(f"the engine's semaphore cannot be read: {error}") from error

    def _constants(self, group: int, rope: RopeSpec) -> Constants:
        return constants(self.layout, group, rope, self.tables[group])

    def batches(
        self, group: int, rope: RopeSpec, slot_bytes: int, pieces: Sequence[Piece], first_number: int = 0
    ) -> Batches:
        tile_tokens = self._constants(group, rope).tile_tokens
        return Batches(self.layout.groups[group], rope, slot_bytes, tile_tokens, pieces, first_number)

    def launch(self, group: int, rope: RopeSpec, *, gather: bool) -> Launch:
        """What starts the kernel; a gather rotates nothing."""
        known, planes = self._constants(group, rope), self._gpu_tables[group]
        # By slot: what is done for every batch delays its copy.
        views: dict[int, torch.Tensor] = {}

        def launch(staging: torch.Tensor, tables: torch.Tensor, packed: Packed, grid: tuple[int, int]) -> None:
            view = views.get(id(staging))
            if view is None:
                view = views[id(staging)] = staging.view(self._dtype)
            self._start(view, planes, tables, packed, grid, known, gather)

        return launch

    def prepare(self, ropes: Sequence[RopeSpec]) -> None:
        """Compiles and loads the kernels."""
        self._gpu.enter()
        for group, rope in enumerate(ropes):
            if len(rope.inv_freq) > MAX_PAIRS:
                raise KvblendError(
                    "LAYOUT_UNKNOWN", f"a head rotates {len(rope.inv_freq)} pairs; {MAX_PAIRS} are allowed"
                )
            self._inbound.warm(self.launch(group, rope, gather=False))
            self._outbound.warm(self.launch(group, _NO_ROPE, gather=True))

    def check(self) -> None:
        """What was opened stays valid until it is closed, whatever the engine does."""

    def close(self) -> None:
        self._gpu.enter()
        self._gpu_tables.clear()
        self._opened.close()
