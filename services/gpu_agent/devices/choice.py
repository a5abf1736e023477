"""Makes the device that the settings name."""

from collections.abc import Callable
from contextlib import ExitStack

from services.gpu_agent.devices.base import Device
from services.gpu_agent.devices.cpu import CpuDevice
from services.gpu_agent.devices.loss import LosableDevice
from services.gpu_agent.settings import AgentSettings


def make_device(settings: AgentSettings, stack: ExitStack, lost: Callable[[str], None]) -> Device:
    """Exits with one line where there is no such device; the stack closes it. `lost` is told why it works no more."""
    if settings.device == "cpu":
        return CpuDevice(settings.shm_dir, settings.copy_threads)
    try:
        # Imports Triton, which comes with torch's builds for CUDA.
        from services.gpu_agent.devices.cuda.device import CudaDevice, NoGpuError
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"kvblend gpu_agent: device = cuda cannot be used: {error}; install a build of torch for CUDA"
        ) from error
    try:
        device = CudaDevice(settings.gpu, settings.staging_mib << 20, settings.hang_seconds)
    except NoGpuError as error:
        raise SystemExit(f"kvblend gpu_agent: device = cuda cannot be used: {error}") from error
    stack.callback(device.close)
    return LosableDevice(device, device.problem, lost)
