"""Shared memory as a store's slab is: a touched file that is mapped, and registered if a device is told of it."""

import mmap
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from services.gpu_agent.devices.base import Bytes
from services.gpu_agent.devices.cuda.device import CudaDevice

_PERIOD = 1 << 24


class BenchArena:
    """`memory` is [nbytes] uint8 of random content."""

    def __init__(self, nbytes: int, device: CudaDevice | None) -> None:
        self.nbytes = nbytes
        self._device = device
        path = Path("/dev/shm") / f"kvblend-bench-{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            self.memory: Bytes = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        finally:
            os.close(descriptor)
            path.unlink()
        noise = np.random.default_rng(1).integers(0, 127, _PERIOD, np.uint8)
        for first in range(0, nbytes, _PERIOD):
            part = self.memory[first : first + _PERIOD]
            part[:] = noise[: len(part)]

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def __enter__(self) -> Self:
        if self._device is not None:
            self._device.adopt(self.memory)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device is not None:
            self._device.release(self.memory)
