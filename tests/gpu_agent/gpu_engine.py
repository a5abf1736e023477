"""python gpu_engine.py AGENT INSTANCE MIB: an engine with so much GPU memory that registers, says so, and waits.

It speaks to the driver itself, as importing torch would take longer than what is tested.
"""

import ctypes
import sys
import threading

from engine_memory import make_rope, model_space

from kvblend.client import KvblendClient
from kvblend.cuda_memory import cuda_handle
from kvblend.layouts import KvShape, buffer_bytes, build_layout
from kvblend.v1 import common_pb2 as common

ARRANGEMENT = "contiguous"


def allocate(nbytes: int) -> int:
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


def main(agent: str, instance: str, mib: int) -> None:
    shape = KvShape.contiguous(4, 8, 128, (mib << 20) // (4 * 2 * 8 * 128 * 2), common.DTYPE_BFLOAT16)
    (nbytes,) = buffer_bytes(ARRANGEMENT, shape)
    handle = cuda_handle(allocate(nbytes), nbytes)
    client = KvblendClient(agent, instance)
    space = model_space(shape, make_rope(common.ROPE_STYLE_NEOX, shape.head_size))
    result = client.register_kv_cache(space, [handle], build_layout(ARRANGEMENT, shape), timeout=60)
    print("registered" if result else f"refused: {result.reason} {result.detail}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
