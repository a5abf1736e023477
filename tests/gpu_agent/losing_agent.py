"""python losing_agent.py FLAG [settings]: the agent, whose device is lost in a copy as soon as the file FLAG exists.

On a GPU its kernels then get addresses that are nobody's, and the rest is the driver's doing. The cpu device fails as
such a GPU would.
"""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from services.gpu_agent.__main__ import main
from services.gpu_agent.devices import choice
from services.gpu_agent.devices.cpu import CpuKvMemory
from services.gpu_agent.devices.loss import LosableDevice

# So many elements behind an engine's memory there is nothing.
FAR = 1 << 40


def lose_gpu(flag: Path) -> Any:
    from services.gpu_agent.devices.cuda import device

    start = device.start

    def start_or_fail(staging: torch.Tensor, planes: torch.Tensor, *more: Any) -> None:
        if flag.exists():
            planes = planes.clone()
            planes[:, 0] += FAR
        start(staging, planes, *more)

    return mock.patch.object(device, "start", start_or_fail)


def lose_cpu(flag: Path) -> Any:
    def problem() -> str:
        return "an illegal address was met" if flag.exists() else ""

    def failing(name: str) -> Any:
        right = getattr(CpuKvMemory, name)

        def copy_or_fail(self: CpuKvMemory, *arguments: Any) -> Any:
            if flag.exists():
                raise RuntimeError(problem())
            return right(self, *arguments)

        return mock.patch.object(CpuKvMemory, name, copy_or_fail)

    for name in ("scatter", "gather", "scatter_in_steps", "set_semaphores"):
        failing(name).start()

    right = choice.make_device
    return mock.patch("services.gpu_agent.server.make_device", lambda *a: LosableDevice(right(*a), problem, a[2]))


if __name__ == "__main__":
    where = Path(sys.argv.pop(1))
    with lose_gpu(where) if "cuda" in sys.argv else lose_cpu(where):
        main()
