"""python gpu_vmm_engine.py MODE AGENT INSTANCE MIB: an engine whose KV is memory of cuMemCreate, in many chunks.

registered: registers so much of it, says so, and waits.
sent: only sends its descriptors, says so, and waits.
round-trip: PyTorch allocates it, in expandable segments; stores KV, retrieves it elsewhere, says how that went.
"""

import ctypes
import os
import sys
import threading

import numpy as np
import torch
from engine_memory import make_rope, model_space
from vmm_memory import VmmBuffer

from kvblend.client import KvblendClient
from kvblend.cuda_driver import call
from kvblend.cuda_memory import CudaUnavailable, cuda_handle
from kvblend.cuda_vmm import VmmMemory
from kvblend.descriptors import Memory, sent
from kvblend.layouts import KvShape, buffer_bytes, build_layout
from kvblend.v1 import common_pb2 as common

ARRANGEMENT = "contiguous"
CHUNK_MIB = 20
TOKENS = 64


def shape_of(mib: int) -> KvShape:
    return KvShape.contiguous(4, 8, 128, (mib << 20) // (4 * 2 * 8 * 128 * 2), common.DTYPE_BFLOAT16)


def register(client: KvblendClient, memory: Memory, shape: KvShape) -> str:
    space = model_space(shape, make_rope(common.ROPE_STYLE_NEOX, shape.head_size))
    result = client.register_kv_cache(space, [memory], build_layout(ARRANGEMENT, shape), timeout=60)
    return "registered" if result else f"refused: {result.reason} {result.detail}"


def allocated(mib: int) -> Memory:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", ctypes.c_uint(0))
    call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    buffer = VmmBuffer([CHUNK_MIB] * -(-mib // CHUNK_MIB))
    (nbytes,) = buffer_bytes(ARRANGEMENT, shape_of(mib))
    return cuda_handle(buffer.address, nbytes)


def registered(agent: str, instance: str, mib: int) -> None:
    memory = allocated(mib)
    client = KvblendClient(agent, instance)
    print(register(client, memory, shape_of(mib)), flush=True)
    threading.Event().wait()


def only_sent(agent: str, instance: str, mib: int) -> None:
    with sent(agent, instance, [allocated(mib)], 60):
        print("sent", flush=True)
        threading.Event().wait()


def round_trip(agent: str, instance: str, mib: int) -> None:
    shape = shape_of(mib)
    (nbytes,) = buffer_bytes(ARRANGEMENT, shape)
    # Another tensor in front, so that this one begins in the middle of a chunk.
    in_front = torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")
    tensor = torch.randint(0, 127, (nbytes,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    try:
        memory = cuda_handle(tensor.data_ptr(), nbytes)
    except CudaUnavailable as error:
        print(f"not exportable: {error}", flush=True)
        return
    assert isinstance(memory, VmmMemory), "PyTorch's expandable segments are no memory of cuMemCreate"
    client = KvblendClient(agent, instance)
    outcome = register(client, memory, shape)
    if outcome == "registered":
        outcome = stored_and_retrieved(client, tensor.view(torch.bfloat16).view(4, 2, -1, 8, 128))
    client.close()
    print(f"{outcome}; process {os.getpid()}, {len(memory.chunks)} chunks, offset {memory.offset}", flush=True)
    assert not in_front.any()


def stored_and_retrieved(client: KvblendClient, kv: torch.Tensor) -> str:
    """KV [layers, 2, slots, heads, size]: the first tokens go out and come back at its end."""
    first_slot = kv.shape[2] - TOKENS
    text = np.random.default_rng(os.getpid()).integers(0, 50_000, TOKENS).tolist()
    wanted = kv[:, :, :TOKENS].clone()
    between = kv[:, :, TOKENS:first_slot].clone()
    if not (result := client.store(text, "out")):
        return f"not stored: {result.reason} {result.detail}"
    found = client.lookup([*text, 1], "back")
    if not (result := client.retrieve("back", first_slot=first_slot)):
        return f"not retrieved, {found.prefix_tokens} found: {result.reason} {result.detail}"
    same = (kv[:, :, first_slot:] == wanted).all() and (kv[:, :, TOKENS:first_slot] == between).all()
    return "the same" if same and found.prefix_tokens == TOKENS else "other bits came back"


if __name__ == "__main__":
    mode = {"registered": registered, "sent": only_sent, "round-trip": round_trip}[sys.argv[1]]
    mode(sys.argv[2], sys.argv[3], int(sys.argv[4]))
