"""python memfd_engine.py AGENT: an engine that registers memory by descriptors, says so, and waits."""

import sys
import threading

from agent_rig import CHUNK, ROPE, SHAPE
from engine_memory import model_space
from memfd_memory import MemfdMemory

from kvblend.client import KvblendClient
from kvblend.layouts import buffer_bytes, build_layout

PAGE = 4096


def main(agent: str) -> None:
    sizes = buffer_bytes("paged_nhd", SHAPE)
    memories = [MemfdMemory([PAGE] * -(-size // PAGE), 0, size) for size in sizes]
    client = KvblendClient(agent, "engine-2")
    space = model_space(SHAPE, ROPE, CHUNK)
    result = client.register_kv_cache(space, memories, build_layout("paged_nhd", SHAPE))
    print("registered" if result else f"{result.reason} {result.detail}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
