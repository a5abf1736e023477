"""python -m benchmarks.gpu.light_engine AGENT INSTANCE CHUNKS: an engine with GPU memory for so many chunks.

It registers, says so, and waits. It speaks to the driver itself: importing torch would take longer than what is
measured.
"""

import ctypes
import sys
import threading
import time

from benchmarks.gpu.shapes import kv_shape, model_space
from kvblend.client import KvblendClient
from kvblend.cuda_memory import cuda_handle
from kvblend.layouts import buffer_bytes, build_layout

_ARRANGEMENT = "contiguous"
_REGISTER_SECONDS = 60.0


def allocate(nbytes: int) -> int:
    """The address of so much touched memory of the first visible GPU."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)) == 0
    assert cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(7), ctypes.c_size_t(nbytes)) == 0
    assert cuda.cuCtxSynchronize() == 0
    return address.value


def main(agent: str, instance: str, chunks: int) -> None:
    shape = kv_shape(_ARRANGEMENT, chunks)
    (nbytes,) = buffer_bytes(_ARRANGEMENT, shape)
    handle = cuda_handle(allocate(nbytes), nbytes)
    client = KvblendClient(agent, instance)
    layout, until = build_layout(_ARRANGEMENT, shape), time.monotonic() + _REGISTER_SECONDS
    # The agent may still be waiting for its store.
    while not (result := client.register_kv_cache(model_space(), [handle], layout, timeout=_REGISTER_SECONDS)):
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    print("registered" if result else f"refused: {result.reason} {result.detail}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
