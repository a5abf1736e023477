"""What the calls around the copies cost: store, lookup and retrieve over the real services."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.common.screen import Screen
from benchmarks.gpu.shapes import CHUNK_BYTES, CHUNK_TOKENS, block_table, kv_shape, model_space
from cli.local import LocalServices
from kvblend.client import KvblendClient
from kvblend.cuda_memory import cuda_handle
from kvblend.layouts import buffer_bytes, build_layout
from kvblend.v1 import agent_pb2, agent_pb2_grpc
from services.common.channels import open_channel

_ARRANGEMENT = "paged_nhd"


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    # The agent's own times of the first size are told: later ones would blur them.
    sizes = (8, 1) if quick else (8, 1, 32)
    repeats = 3 if quick else 9
    room = max(sizes)
    shape = kv_shape(_ARRANGEMENT, room + 1)
    buffers = [
        torch.randint(0, 127, (size,), dtype=torch.uint8, device="cuda") for size in buffer_bytes(_ARRANGEMENT, shape)
    ]
    torch.cuda.synchronize()
    arena = sum(sizes) * (repeats + 2) * CHUNK_BYTES * 5 // 4
    with LocalServices(arena_bytes=max(arena >> 30, 1) << 30, device="cuda", start_timeout=300) as services:
        client = KvblendClient(services.agent_target, "bench")
        handles = [cuda_handle(buffer.data_ptr(), buffer.nbytes) for buffer in buffers]
        layout = build_layout(_ARRANGEMENT, shape)
        until = time.monotonic() + 60
        # The agent opens its session when the store is there; it maps the whole arena for that.
        while not (registered := client.register_kv_cache(model_space(), handles, layout, timeout=120)):
            if time.monotonic() > until:
                raise RuntimeError(f"the engine's memory was not registered: {registered}")
            time.sleep(0.5)
        time.sleep(5)
        rows = [_row(client, sizes[0], room, repeats)]
        inside = _agent_times(services.agent_target)
        rows += [_row(client, chunks, room, repeats) for chunks in sizes[1:]]
        ping = 1e3 * statistics.median(_seconds(client.ping) for _ in range(50))
        client.close()
    for row in rows:
        screen.line(
            f"{row['chunks']:>3} chunks: store {row['store_ms']:.2f} ms, lookup {row['lookup_ms']:.2f} ms, "
            f"retrieve {row['retrieve_ms']:.2f} ms ({row['retrieve_gbs']:.1f} GB/s)"
        )
    screen.line(", ".join(f"{name} {ms:.2f}" for name, ms in inside.items()))
    return {"rows": rows, "ping_ms": ping, "agent_ms": {"chunks": sizes[0], **inside}}


def _agent_times(target: str) -> dict[str, float]:
    """Medians, in ms, of calls and their parts as the agent sees them."""
    with open_channel(target) as channel:
        stub: Any = agent_pb2_grpc.AgentServiceStub(channel)  # type: ignore[no-untyped-call]
        stats = stub.GetAgentStats(agent_pb2.GetAgentStatsRequest(), timeout=5)
    return {item.name: item.p50_ms for item in stats.latencies}


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _row(client: KvblendClient, chunks: int, room: int, repeats: int) -> dict[str, Any]:
    """Medians; every repeat stores text of its own."""
    tokens = chunks * CHUNK_TOKENS
    blocks = block_table(room + 1)
    times: dict[str, list[float]] = {"store": [], "lookup": [], "retrieve": []}
    for number in range(repeats):
        text = np.random.default_rng(1000 * chunks + number).integers(0, 100_000, tokens)
        name = f"{chunks}-{number}"
        began = time.perf_counter()
        stored = client.store(text, name, block_ids=blocks)
        times["store"].append(time.perf_counter() - began)
        assert stored, stored
        began = time.perf_counter()
        found = client.lookup([*text.tolist(), 1], name, timeout=5)
        times["lookup"].append(time.perf_counter() - began)
        assert found.prefix_tokens == tokens, found
        began = time.perf_counter()
        retrieved = client.retrieve(name, block_ids=blocks)
        times["retrieve"].append(time.perf_counter() - began)
        assert retrieved, retrieved
        client.end_session(name)
    medians = {f"{what}_ms": 1e3 * statistics.median(values) for what, values in times.items()}
    nbytes = chunks * CHUNK_BYTES
    return {"chunks": chunks, **medians, "retrieve_gbs": nbytes / medians["retrieve_ms"] / 1e6}
