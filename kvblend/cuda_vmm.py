"""Memory of CUDA's virtual memory management (cuMemCreate), which an engine gives its agent chunk by chunk.

CUDA IPC handles do not exist for it. Each physical chunk behind a range of addresses is exported as a descriptor
instead, when the memory is registered (kvblend/descriptors.py); PyTorch's chunks have 2 or 20 MiB.
"""

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from kvblend.cuda_driver import CudaUnavailable, call, uuid_at
from kvblend.v1 import agent_pb2 as pb

POSIX_FILE_DESCRIPTOR = 1
_MINIMUM_GRANULARITY = 0

_NOT_EXPORTABLE = (
    "this memory was allocated so that no other process can open it. With PyTorch set expandable_segments:False in "
    "PYTORCH_CUDA_ALLOC_CONF (or leave TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC unset), with vLLM enable_sleep_mode=False; "
    "an allocator of your own asks cuMemCreate for CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
)


class Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


@dataclass(frozen=True)
class VmmMemory:
    """`nbytes` bytes from `offset` on of physical chunks that follow each other in this process's addresses.

    They must stay mapped there until the engine unregisters.
    """

    device_uuid: str
    offset: int
    nbytes: int
    # Where each begins, and its bytes.
    chunks: tuple[tuple[int, int], ...]

    @property
    def chunk_bytes(self) -> list[int]:
        return [size for _, size in self.chunks]

    def export(self, chunk: int) -> int:
        """A new descriptor of that chunk, the caller's to close. Raises CudaUnavailable."""
        descriptor = ctypes.c_int()
        address, _ = self.chunks[chunk]
        handle = _retain(address)
        try:
            call(
                "cuMemExportToShareableHandle",
                ctypes.byref(descriptor),
                handle,
                ctypes.c_int(POSIX_FILE_DESCRIPTOR),
                ctypes.c_ulonglong(0),
            )
        finally:
            call("cuMemRelease", handle)
        # A program that is started meanwhile must not keep the memory.
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def handle(self, slot: bytes) -> pb.DeviceHandle:
        """As a registration names it, once its descriptors are in this slot."""
        return pb.DeviceHandle(
            kind=pb.HANDLE_KIND_CUDA_VMM,
            handle=slot,
            device_uuid=self.device_uuid,
            allocation_offset=self.offset,
            bytes=self.nbytes,
        )


def vmm_memory(address: int, nbytes: int) -> VmmMemory | None:
    """The chunks behind `nbytes` bytes of GPU memory at `address`; None: it is not of this kind.

    Raises CudaUnavailable, with the setting to change, for memory that cannot be exported.
    """
    owner = _owner(address)
    if owner is None:
        return None
    step = _granularity(address)
    first = address - address % step
    while _owner(first - step) == owner:
        first -= step
    chunks: list[tuple[int, int]] = []
    at = first
    while at < address + nbytes:
        chunks.append((at, _chunk_bytes(at)))
        at += chunks[-1][1]
    return VmmMemory(uuid_at(address), address - first, nbytes, tuple(chunks))


def _chunk_bytes(start: int) -> int:
    """CUDA tells whose an address is, but not how far that chunk reaches."""
    owner = _owner(start)
    if owner is None:
        raise CudaUnavailable(f"there is no memory at {start:#x}, in the middle of what is to be shared")
    size = step = _granularity(start)
    while _owner(start + size) == owner:
        size += step
    return size


def _granularity(address: int) -> int:
    """What sizes and places of chunks are multiples of. Raises CudaUnavailable if this chunk cannot be exported."""
    properties, step = AllocationProperties(), ctypes.c_size_t()
    handle = _retain(address)
    try:
        call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), handle)
    finally:
        call("cuMemRelease", handle)
    if not properties.handle_types & POSIX_FILE_DESCRIPTOR:
        raise CudaUnavailable(_NOT_EXPORTABLE)
    call(
        "cuMemGetAllocationGranularity",
        ctypes.byref(step),
        ctypes.byref(properties),
        ctypes.c_int(_MINIMUM_GRANULARITY),
    )
    return step.value


def _owner(address: int) -> int | None:
    """Names the chunk that is mapped there."""
    try:
        handle = _retain(address)
    except CudaUnavailable:
        return None
    call("cuMemRelease", handle)
    return int(handle.value)


def _retain(address: int) -> Any:
    """The handle that the memory was mapped with; released by the caller."""
    handle = ctypes.c_uint64()
    call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(address))
    return handle
