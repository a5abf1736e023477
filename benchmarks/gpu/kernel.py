"""The kernel alone, on a staging slot that lies in GPU memory already; and the way of an engine without it."""

from typing import Any

import torch

from benchmarks.common.screen import Screen
from benchmarks.gpu.ceilings import device_copy, random_bytes, seconds
from benchmarks.gpu.copies import bench
from benchmarks.gpu.shapes import BLOCK_TOKENS, CHUNK_BYTES, CHUNK_TOKENS, HEADS, LAYERS, SHIFT, SIZE, block_table
from services.gpu_agent.devices.cuda.batches import pack, table_bytes
from services.gpu_agent.devices.cuda.device import CudaDevice
from services.gpu_agent.devices.cuda.lane import MAX_PAIRS
from services.gpu_agent.devices.cuda.memory import CudaKvMemory

_CHUNKS = 16
# (what, by how many positions K is moved, with checksums)
_WAYS = (
    ("scatter", 0, False),
    ("scatter and rotate", SHIFT, False),
    ("scatter, rotate and verify", SHIFT, True),
    ("gather", 0, True),
)


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    """GB/s read and written together, of several times what the GPU's cache holds."""
    chunks = 4 if quick else _CHUNKS
    nbytes = chunks * CHUNK_BYTES
    device = CudaDevice("", nbytes, 30.0)
    copy = device_copy(nbytes)
    figures: dict[str, Any] = {"chunks": chunks, "device_copy_gbs": copy}
    for arrangement in ("paged_nhd", "paged_hnd"):
        with bench(device, arrangement, chunks) as made:
            assert isinstance(made.memory, CudaKvMemory)
            for what, delta, checked in _WAYS:
                pieces = made.pieces(chunks, delta, checked=checked)
                (batch,) = made.memory.batches(0, made.rope, nbytes, pieces).of()
                launch = made.memory.launch(0, made.rope, gather=what == "gather")
                host = torch.empty(table_bytes(MAX_PAIRS), dtype=torch.uint8)
                packed = pack(batch, host.numpy())
                tables = host.cuda()
                staging = random_bytes(nbytes)
                grid = (len(batch.tables.tiles), batch.most_planes)
                found = 2 * nbytes / seconds(lambda: launch(staging, tables, packed, grid)) / 1e9  # noqa: B023
                figures[f"{what}, {arrangement}"] = {"gbs": found, "of_device_copy": found / copy}
                screen.line(f"{what:>26} {arrangement}: {found:.0f} GB/s, {found / copy:.2f} of device copy")
    figures["naive"] = _naive(min(chunks, 8))
    device.close()
    return figures


def _naive(chunks: int) -> dict[str, float]:
    """index_select a layer and a copy of each layer to pinned memory; and back, without any rotation."""
    blocks = chunks * CHUNK_TOKENS // BLOCK_TOKENS
    kv = [torch.randn(2, blocks, BLOCK_TOKENS, HEADS, SIZE, device="cuda").to(torch.bfloat16) for _ in range(LAYERS)]
    index = torch.tensor(block_table(chunks), device="cuda")
    pinned = torch.empty((LAYERS, *kv[0].shape), dtype=torch.bfloat16, pin_memory=True)

    def store() -> None:
        for layer in range(LAYERS):
            pinned[layer].copy_(torch.index_select(kv[layer], 1, index), non_blocking=True)

    def retrieve() -> None:
        for layer in range(LAYERS):
            kv[layer].index_copy_(1, index, pinned[layer].to("cuda", non_blocking=True))

    nbytes = chunks * CHUNK_BYTES
    return {"store_gbs": nbytes / seconds(store) / 1e9, "retrieve_gbs": nbytes / seconds(retrieve) / 1e9}
