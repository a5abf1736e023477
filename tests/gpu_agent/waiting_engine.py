"""python waiting_engine.py AGENT FOLDER TOKEN: an engine whose store waits for a semaphore, which it sets when told to.

Its memory is in files of the folder, and its text begins with that token. It prints "registered" and asks for its KV to
be stored; on a line on its input it overwrites that KV and sets the semaphore. Then it prints the outcomes, and
waits.
"""

import sys
import threading
from pathlib import Path

import numpy as np
from engine_memory import make_rope, model_space

from kvblend.client import KvblendClient
from kvblend.layouts import KvShape, buffer_bytes, build_layout
from kvblend.memory import SharedBuffer
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common

SHAPE = KvShape(layers=2, heads=2, head_size=8, blocks=16, block_tokens=4, dtype=common.DTYPE_FLOAT32)
EARLIER, LATER = 1.0, 2.0
EVENT = pb.Event(kind=pb.EVENT_KIND_SEMAPHORE, semaphore=1, value=3)


def text_from(token: int) -> list[int]:
    return list(range(token, token + SHAPE.blocks * SHAPE.block_tokens))


def main(agent: str, folder: Path, token: int) -> None:
    buffers = [SharedBuffer(nbytes, folder) for nbytes in buffer_bytes("paged_nhd", SHAPE)]
    words = SharedBuffer(16, folder)
    for buffer in buffers:
        buffer.array.view("<f4")[:] = EARLIER
    client = KvblendClient(agent, "waiting")
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
    stored = client.store(text_from(token), "waiting", block_ids=range(SHAPE.blocks), event=EVENT, timeout=60)
    print(*sorted({chunk.outcome for chunk in stored.chunks}), stored.reason, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
