"""The cuda device: engines' memory is opened by IPC handles or descriptors, copies run on lanes of the GPU's own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvblend.v1 import agent_pb2 as pb
from services.common.logs import get_logger
from services.gpu_agent.devices.base import Bytes, KvMemory
from services.gpu_agent.devices.cuda.driver import IPC_HANDLE_BYTES, CudaError, visible_gpus
from services.gpu_agent.devices.cuda.gpu import Gpu
from services.gpu_agent.devices.cuda.host import HostMemory
from services.gpu_agent.devices.cuda.ipc import OpenedHandles, unusable
from services.gpu_agent.devices.cuda.kernels import start
from services.gpu_agent.devices.cuda.lane import Lane
from services.gpu_agent.devices.cuda.memory import CudaKvMemory, check_dtype
from services.gpu_agent.devices.cuda.words import WordReader
from services.gpu_agent.engines.descriptors import NO_DESCRIPTORS, Descriptors
from services.gpu_agent.engines.layouts import Layout

_log = get_logger("cuda")

# A GPU that needs longer for one word hangs.
_WORD_SECONDS = 1.0


class NoGpuError(Exception):
    """There is no such GPU, or it cannot be used."""


class CudaDevice:
    """One GPU. Everything it needs of the GPU's memory is taken here: it neither grows nor shrinks later.

    Raises:
        NoGpuError: in a line for people.
    """

    def __init__(self, gpu: str, slot_bytes: int, hang_seconds: float) -> None:
        """`gpu` is a UUID; empty: the only visible one."""
        try:
            ordinal, self.uuid = choose_gpu(visible_gpus(), gpu)
            # As much of it as tells GPUs apart, on a screen.
            self.name = f"cuda {self.uuid[:12]}"
            self._gpu = Gpu(ordinal)
            free, _ = self._gpu.driver.memory()
            self.host = HostMemory(self._gpu.driver)
            self._words = WordReader(self._gpu, _WORD_SECONDS)
            self.inbound, self.outbound = (
                Lane(self._gpu, self.host, slot_bytes, hang_seconds, inbound) for inbound in (True, False)
            )
        except (OSError, CudaError, RuntimeError) as error:
            raise NoGpuError(str(error)) from error
        taken = free - self._gpu.driver.memory()[0]
        _log.info("serving a GPU", gpu=self.uuid, staging_mib=taken >> 20)

    def problem(self) -> str:
        """Why this process can use the GPU no more, whatever it does; empty: it can."""
        return self._gpu.driver.problem()

    def adopt(self, memory: Bytes) -> None:
        self.host.adopt(memory)

    def release(self, memory: Bytes) -> None:
        self.host.release(memory)

    def open(
        self,
        handles: Sequence[pb.DeviceHandle],
        layout: Layout,
        semaphores: pb.DeviceHandle | None = None,
        descriptors: Descriptors = NO_DESCRIPTORS,
    ) -> KvMemory:
        check_dtype(layout.dtype, self._gpu.capability)
        self._gpu.enter()
        opened = OpenedHandles(self._gpu.driver, self.uuid, handles, semaphores, descriptors)
        try:
            return CudaKvMemory(self._gpu, start, opened, layout, self.inbound, self.outbound, self._words)
        except BaseException:
            opened.close()
            raise

    @contextmanager
    def opened(self, event: pb.Event) -> Iterator[Callable[[], bool]]:
        """CUDA IPC event handles."""
        if event.kind != pb.EVENT_KIND_CUDA_IPC or len(event.handle) != IPC_HANDLE_BYTES:
            raise unusable("the event is no CUDA IPC event handle")
        self._gpu.enter()
        driver = self._gpu.driver
        try:
            with driver.opened_event(event.handle) as opened:
                yield lambda: driver.event_done(opened)
        except CudaError as error:
            raise unusable(
                f"the engine's event cannot be opened ({error}): it needs a /dev/shm that engine and agent share; "
                "a semaphore does not"
            ) from error

    def close(self) -> None:
        self.host.close()


def choose_gpu(visible: Sequence[str], wanted: str) -> tuple[int, str]:
    """(ordinal, UUID). Raises NoGpuError."""
    names = ", ".join(visible) or "none"
    if not wanted:
        if len(visible) != 1:
            raise NoGpuError(f"one GPU must be visible or the setting gpu must name one; visible: {names}")
        return 0, visible[0]
    if wanted not in visible:
        raise NoGpuError(f"{wanted} is not visible to this process; visible: {names}")
    return visible.index(wanted), wanted
