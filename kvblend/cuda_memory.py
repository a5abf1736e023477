"""CUDA memory and events that an engine gives its agent, by raw IPC handles; needs the driver, not torch.

handles = [cuda_handle(tensor.data_ptr(), tensor.nbytes) for tensor in kv_tensors]

wait_for_semaphore(stream.cuda_stream, semaphores.address(semaphore), value)   # in front of a step's first layer

Order is a matter of semaphores (cuda_semaphores.py). Where engine and agent share /dev/shm, events do as well:

done = torch.cuda.Event(interprocess=True)   # once
done.record()                                # behind the work that the agent must wait for
client.store(..., event=cuda_event(done.ipc_handle()))
"""

import ctypes
import os
from functools import cache
from typing import Any

from kvblend.v1 import agent_pb2 as pb

_HANDLE_BYTES = 64
_DEVICE_ORDINAL = 9
_AT_LEAST = 0


class CudaUnavailable(RuntimeError):
    """There is no CUDA driver, or it refused; the text names the call."""


def cuda_handle(address: int, nbytes: int) -> pb.DeviceHandle:
    """`nbytes` bytes of GPU memory at `address`, as a registration names them.

    The memory must come from cudaMalloc, as PyTorch's does unless `expandable_segments` is on, and must stay
    allocated until the engine unregisters. Raises CudaUnavailable.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    raw = (ctypes.c_ubyte * _HANDLE_BYTES)()
    try:
        _call("cuIpcGetMemHandle", ctypes.byref(raw), base)
    except CudaUnavailable as error:
        raise CudaUnavailable(
            f"{error}: this memory cannot be shared; with PyTorch, set expandable_segments:False "
            "in PYTORCH_CUDA_ALLOC_CONF"
        ) from error
    return pb.DeviceHandle(
        kind=pb.HANDLE_KIND_CUDA_IPC,
        handle=bytes(raw),
        device_uuid=_uuid_at(address),
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


def _uuid_at(address: int) -> str:
    """UUID of the GPU that holds this memory, as nvidia-smi prints it."""
    ordinal, device = ctypes.c_int(), ctypes.c_int()
    _call("cuPointerGetAttribute", ctypes.byref(ordinal), ctypes.c_int(_DEVICE_ORDINAL), ctypes.c_uint64(address))
    _call("cuDeviceGet", ctypes.byref(device), ordinal)
    raw = (ctypes.c_ubyte * 16)()
    _call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
    text = bytes(raw).hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaUnavailable(f"there is no CUDA driver: {error}") from error


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        raise CudaUnavailable(f"{name}: {(text.value or b'unknown error').decode()} ({code})")
