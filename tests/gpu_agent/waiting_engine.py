"""python waiting_engine.py AGENT INSTANCE: an engine whose store waits for a semaphore that it sets when told to.

It prints "registered", asks for its KV to be stored, and on a line on its input overwrites that KV and sets the
semaphore. Then it prints the outcomes of the store, what those bytes are now, and waits.
"""

import sys
import threading

import numpy as np
from engine_memory import make_rope, model_space

from kvblend.client import KvblendClient
from kvblend.layouts import KvShape, buffer_bytes, build_layout
from kvblend.memory import SharedBuffer
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common

SHAPE = KvShape(layers=2, heads=2, head_size=8, blocks=16, block_tokens=4, dtype=common.DTYPE_FLOAT32)
TEXT = list(range(500, 564))
EARLIER, LATER = 1.0, 2.0
EVENT = pb.Event(kind=pb.EVENT_KIND_SEMAPHORE, semaphore=1, value=3)


def main(agent: str, instance: str) -> None:
    buffers = [SharedBuffer(nbytes) for nbytes in buffer_bytes("paged_nhd", SHAPE)]
    words = SharedBuffer(16)
    for buffer in buffers:
        buffer.array.view("<f4")[:] = EARLIER
    client = KvblendClient(agent, instance)
    space = model_space(SHAPE, make_rope(common.ROPE_STYLE_NEOX, SHAPE.head_size), chunk_tokens=16)
    handles = [buffer.handle() for buffer in buffers]
    result = client.register_kv_cache(space, handles, build_layout("paged_nhd", SHAPE), semaphores=words.handle())
    print("registered" if result else f"refused: {result.reason} {result.detail}", flush=True)

    def later() -> None:
        sys.stdin.readline()
        for buffer in buffers:
            buffer.array.view("<f4")[:] = LATER
        words.array.view(np.uint64)[EVENT.semaphore] = EVENT.value

    threading.Thread(target=later, daemon=True).start()
    stored = client.store(TEXT, "waiting", block_ids=range(SHAPE.blocks), event=EVENT, timeout=60)
    print(*sorted({chunk.outcome for chunk in stored.chunks}), stored.reason, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
