"""An engine's allocations, opened by raw CUDA IPC handles or by descriptors of their physical chunks."""

import os
from collections.abc import Sequence

from kvblend.v1 import agent_pb2 as pb
from services.common.errors import KvblendError
from services.common.logs import get_logger
from services.gpu_agent.devices.base import SEMAPHORE_BYTES
from services.gpu_agent.devices.cuda.driver import IPC_HANDLE_BYTES, CudaError, Driver
from services.gpu_agent.devices.cuda.vmm import MappedChunks
from services.gpu_agent.engines.descriptors import NO_DESCRIPTORS, Descriptors

_log = get_logger("cuda-ipc")


class OpenedHandles:
    """`starts` has the address of each handle's usable part; `semaphores` u64 begin at `first_semaphore`.

    Raises:
        KvblendError: HANDLE_UNUSABLE, HANDLE_OUT_OF_BOUNDS; then nothing stays open.
    """

    def __init__(
        self,
        driver: Driver,
        gpu: str,
        handles: Sequence[pb.DeviceHandle],
        semaphores: pb.DeviceHandle | None,
        descriptors: Descriptors = NO_DESCRIPTORS,
    ) -> None:
        self.mapped_bytes = sum(handle.bytes for handle in handles)
        self.semaphores = semaphores.bytes // SEMAPHORE_BYTES if semaphores is not None else 0
        self._driver = driver
        self._descriptors = descriptors
        # Several handles may name parts of one allocation, which is opened once.
        self._opened: dict[tuple[int, bytes], _IpcMemory | MappedChunks] = {}
        for handle in (*handles, *([semaphores] if semaphores is not None else [])):
            check_handle(handle, gpu, os.getpid())
        try:
            self.starts = [self._open(handle) for handle in handles]
            self.first_semaphore = self._open(semaphores) if semaphores is not None else 0
        except BaseException:
            self.close()
            raise

    def _open(self, handle: pb.DeviceHandle) -> int:
        name = handle.kind, handle.handle
        try:
            if name not in self._opened:
                self._opened[name] = self._open_allocation(handle)
        except CudaError as error:
            raise unusable(f"the engine's memory cannot be opened: {error}") from error
        memory = self._opened[name]
        end = handle.allocation_offset + handle.bytes
        if end > memory.nbytes:
            raise KvblendError(
                "HANDLE_OUT_OF_BOUNDS", f"a handle ends at byte {end} of an allocation of {memory.nbytes}"
            )
        return memory.first + handle.allocation_offset

    def _open_allocation(self, handle: pb.DeviceHandle) -> "_IpcMemory | MappedChunks":
        if handle.kind == pb.HANDLE_KIND_CUDA_IPC:
            return _IpcMemory(self._driver, handle.handle)
        chunks = self._descriptors.get(handle.handle)
        if chunks is None:
            raise unusable(
                "the memory's descriptors are not here: they are sent for each registration by the same instance, "
                "and kept for a minute while the connection that they came over is open"
            )
        return MappedChunks(self._driver, chunks)

    def close(self) -> None:
        """Unmaps everything; no kernel or copy may be running. Idempotent."""
        for memory in self._opened.values():
            memory.close()
        self._opened.clear()
        self.starts = []


class _IpcMemory:
    """Memory of cudaMalloc: `nbytes` bytes from the address `first` on. Raises CudaError."""

    def __init__(self, driver: Driver, raw: bytes) -> None:
        self._driver = driver
        self.first = driver.open_memory(raw)
        try:
            base, size = driver.allocation(self.first)
        except CudaError:
            self.close()
            raise
        self.nbytes = base + size - self.first

    def close(self) -> None:
        try:
            self._driver.close_memory(self.first)
        except CudaError as error:
            _log.error("an engine's memory cannot be closed", detail=str(error))


def unusable(text: str) -> KvblendError:
    return KvblendError("HANDLE_UNUSABLE", text)


def check_handle(handle: pb.DeviceHandle, gpu: str, own_pid: int) -> None:
    """Raises KvblendError for what this agent on the GPU with UUID `gpu` can never open."""
    if handle.kind == pb.HANDLE_KIND_SHARED_MEMORY:
        raise unusable("a shared-memory handle needs the cpu device; this agent runs the cuda device")
    if handle.kind not in (pb.HANDLE_KIND_CUDA_IPC, pb.HANDLE_KIND_CUDA_VMM):
        raise unusable("the handle has no known kind")
    if not handle.bytes:
        raise unusable("a handle is declared with 0 bytes")
    if handle.device_uuid != gpu:
        raise unusable(f"the memory is on {handle.device_uuid or 'a GPU that is not named'}; this agent serves {gpu}")
    if handle.kind == pb.HANDLE_KIND_CUDA_IPC:
        _check_ipc(handle, own_pid)


def _check_ipc(handle: pb.DeviceHandle, own_pid: int) -> None:
    if len(handle.handle) != IPC_HANDLE_BYTES:
        raise unusable(f"a CUDA IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle.handle)}")
    if not handle.exporter_pid:
        raise unusable("the handle does not name its process (exporter_pid)")
    if handle.exporter_pid == own_pid:
        # CUDA would report an uninitialized device and break the context.
        raise unusable(
            f"engine and agent are both process {own_pid} of their PID namespaces, which CUDA IPC cannot tell apart: "
            "start one of them under an init (docker run --init), or share the PID namespace of their pod"
        )
