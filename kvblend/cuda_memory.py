"""CUDA memory and events that an engine gives its agent; needs the driver, not torch.

handles = [cuda_handle(tensor.data_ptr(), tensor.nbytes) for tensor in kv_tensors]
client.register_kv_cache(space, handles, layout)

wait_for_semaphore(stream.cuda_stream, semaphores.address(semaphore), value)   # in front of a step's first layer

Order is a matter of semaphores (cuda_semaphores.py). Where engine and agent share /dev/shm, events do as well:

done = torch.cuda.Event(interprocess=True)   # once
done.record()                                # behind the work that the agent must wait for
client.store(..., event=cuda_event(done.ipc_handle()))
"""

import ctypes
import os
from typing import Any

from kvblend.cuda_driver import CudaUnavailable as CudaUnavailable
from kvblend.cuda_driver import call as _call
from kvblend.cuda_driver import uuid_at
from kvblend.cuda_vmm import VmmMemory, vmm_memory
from kvblend.v1 import agent_pb2 as pb

_HANDLE_BYTES = 64
_AT_LEAST = 0


def cuda_handle(address: int, nbytes: int) -> pb.DeviceHandle | VmmMemory:
    """`nbytes` bytes of GPU memory at `address`, as `KvblendClient.register_kv_cache` takes them.

    The memory comes from cudaMalloc, as PyTorch's does, or from cuMemCreate, as PyTorch's does with
    `expandable_segments:True`: then the agent must be at a unix socket, and every physical chunk must have been made
    exportable as a descriptor, which is so with PyTorch but not in vLLM's sleep mode. It stays allocated, at the same
    place, until the engine unregisters. Raises CudaUnavailable, with the setting to change.
    """
    try:
        return ipc_handle(address, nbytes)
    except CudaUnavailable:
        memory = vmm_memory(address, nbytes)
        if memory is None:
            raise
        return memory


def ipc_handle(address: int, nbytes: int) -> pb.DeviceHandle:
    """The same of memory from cudaMalloc alone, as a registration names it. Raises CudaUnavailable."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    raw = (ctypes.c_ubyte * _HANDLE_BYTES)()
    try:
        _call("cuIpcGetMemHandle", ctypes.byref(raw), base)
    except CudaUnavailable as error:
        raise CudaUnavailable(f"{error}: this memory cannot be shared; allocate it with cudaMalloc") from error
    return pb.DeviceHandle(
        kind=pb.HANDLE_KIND_CUDA_IPC,
        handle=bytes(raw),
        device_uuid=uuid_at(address),
        allocation_offset=address - base.value,
        bytes=nbytes,
        exporter_pid=os.getpid(),
    )


def cuda_event(ipc_handle: bytes) -> pb.Event:
    """An interprocess event that has been recorded already. Engine and agent must share /dev/shm."""
    return pb.Event(kind=pb.EVENT_KIND_CUDA_IPC, handle=ipc_handle)


def zero_memory(address: int, nbytes: int) -> None:
    """Zeroes GPU memory, behind everything that the GPU was given for it. Raises CudaUnavailable."""
    _call("cuCtxSynchronize")
    _call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
    _call("cuCtxSynchronize")


def wait_for_semaphore(stream: int, address: int, value: int) -> None:
    """What follows on the stream runs once the u64 at this address of the GPU is at least `value`.

    Raises CudaUnavailable.
    """
    _call("cuStreamWaitValue64_v2", *_word(stream, address, value), ctypes.c_uint(_AT_LEAST))


def set_semaphore(stream: int, address: int, value: int) -> None:
    """Sets it, in the stream's order: for what an agent did not answer. The stream must not be one that waits for it.

    Raises CudaUnavailable.
    """
    _call("cuStreamWriteValue64_v2", *_word(stream, address, value), ctypes.c_uint(0))


def _word(stream: int, address: int, value: int) -> tuple[Any, Any, Any]:
    return ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint64(value)
