"""python -m benchmarks.gpu.engine ARRANGEMENT CHUNKS: an engine that owns KV memory for so many chunks.

Any line on its input is answered with the handles of its memory, the last that of semaphores.
"""

import base64
import json
import sys

import torch

from benchmarks.gpu.shapes import SEMAPHORES, kv_shape
from kvblend.cuda_memory import ipc_handle
from kvblend.layouts import buffer_bytes
from kvblend.v1 import agent_pb2 as pb


def main(arrangement: str, chunks: int) -> None:
    buffers = [
        torch.randint(0, 127, (size,), dtype=torch.uint8, device="cuda")
        for size in buffer_bytes(arrangement, kv_shape(arrangement, chunks))
    ]
    buffers.append(torch.zeros(8 * SEMAPHORES, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    handles = [ipc_handle(buffer.data_ptr(), buffer.nbytes) for buffer in buffers]
    raw = [base64.b64encode(handle.SerializeToString()).decode() for handle in handles]
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"handles": raw}), flush=True)


def parse_handles(raw: list[str]) -> list[pb.DeviceHandle]:
    return [pb.DeviceHandle.FromString(base64.b64decode(item)) for item in raw]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
