"""What an engine's planes and the arena must hold after a transfer, looked at with plain torch."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.shapes import CHUNK_BYTES, CHUNK_TOKENS, HEADS, SIZE
from services.gpu_agent.engines.rope import RopeSpec

ROW_BYTES = HEADS * SIZE * 2
# K that is rotated: half a unit in the last place of bf16, fp32 arithmetic over the length of the pair, subnormals.
_ROUNDING, _ARITHMETIC, _TINY = 2.0**-8, 2.0**-20, 1e-37


@dataclass(frozen=True)
class Contents:
    """`planes` are the engine's, K and V of each layer, [slots, row bytes] uint8; `host` is the arena's address."""

    planes: list[torch.Tensor]
    slots: torch.Tensor
    host: int
    rope: RopeSpec
    # Driver.to_device
    fetch: Callable[[int, int, int, int, int, int], None]

    def clear(self) -> None:
        for plane in self.planes:
            plane.zero_()

    def fill(self) -> None:
        """With something new; read as bf16 every value is finite, and so is any pair when it is rotated."""
        for plane in self.planes:
            plane.random_(0, 127)

    def wrong_planes(self, chunks: int, delta: int) -> list[int]:
        """Planes that do not hold what the arena has of the first chunks, K moved by `delta`."""
        slots = self.slots[: chunks * CHUNK_TOKENS]
        wrong = []
        for number, plane in enumerate(self.planes):
            stored, found = self._stored(number, chunks), plane[slots]
            moved = delta and number % 2 == 0
            if not (self._moved(stored, found, delta) if moved else torch.equal(stored, found)):
                wrong.append(number)
        return wrong

    def _stored(self, number: int, chunks: int) -> torch.Tensor:
        """A plane of each chunk in the arena, [tokens, row bytes]."""
        width = CHUNK_TOKENS * ROW_BYTES
        rows = torch.empty((chunks * CHUNK_TOKENS, ROW_BYTES), dtype=torch.uint8, device=self.planes[0].device)
        # Torch's own stream here, which is the driver's default one.
        self.fetch(self.host + number * width, CHUNK_BYTES, rows.data_ptr(), width, chunks, 0)
        return rows

    def _moved(self, stored: torch.Tensor, found: torch.Tensor, delta: int) -> bool:
        cos, sin = (torch.from_numpy(table).to(stored.device) for table in self.rope.tables(np.array([delta])))
        x, y = (half.float() for half in stored.view(torch.bfloat16).view(-1, HEADS, SIZE).chunk(2, -1))
        exact = torch.cat([x * cos - y * sin, y * cos + x * sin], -1)
        length = torch.cat([x.abs() + y.abs()] * 2, -1)
        error = (found.view(torch.bfloat16).view(-1, HEADS, SIZE).float() - exact).abs()
        return bool((error <= _ROUNDING * exact.abs() + _ARITHMETIC * length + _TINY).all())


def gpu_bytes(address: int, nbytes: int) -> torch.Tensor:
    """GPU memory that somebody else keeps mapped, [nbytes] uint8."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    return torch.as_tensor(Memory(), device="cuda")
