"""One GPU, as lanes and registrations use it: torch's streams, events and memory, and the driver's copies."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from services.gpu_agent.devices.cuda.driver import Driver


class Gpu:
    """Every thread calls `enter` before anything else. Raises OSError, CudaError, RuntimeError."""

    def __init__(self, ordinal: int) -> None:
        self._device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self._device)
        # (major, minor) of what it can compute.
        self.capability: tuple[int, int] = torch.cuda.get_device_capability(self._device)
        self.driver = Driver(ordinal)
        self.to_device = self.driver.to_device
        self.to_host = self.driver.to_host
        # For what must not wait behind a copy.
        self.signals = self.stream()

    def enter(self) -> None:
        """Makes the GPU this thread's, for torch and for the driver."""
        torch.cuda.set_device(self._device)
        self.driver.bind()

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What torch and Triton start inside runs on this stream."""
        entered: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return entered

    def event(self, *, timing: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timing)

    def empty(self, nbytes: int) -> torch.Tensor:
        """GPU memory, [nbytes] uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that the GPU reaches, [nbytes] uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def signal(self, address: int, value: int, stream: Any) -> None:
        """Sets a u64 in GPU memory when everything before it on the stream is done and can be seen."""
        self.driver.write_value(address, value, stream.cuda_stream)

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU that is there when this returns."""
        copy = table.to(self._device)
        torch.cuda.current_stream().synchronize()
        return copy
