"""Retrieve and store as the device does them, from the first byte to the last by the GPU's clock."""

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.common.processes import piped
from benchmarks.common.screen import Screen
from benchmarks.gpu.arena import BenchArena
from benchmarks.gpu.ceilings import link
from benchmarks.gpu.engine import parse_handles
from benchmarks.gpu.shapes import (
    BLOCK_TOKENS,
    CHUNK_BYTES,
    CHUNK_TOKENS,
    LAYERS,
    SHIFT,
    STAGING_BYTES,
    TRANSFERS,
    block_table,
    kv_shape,
    model_space,
)
from kvblend.layouts import build_layout
from kvblend.v1 import common_pb2 as common
from services.gpu_agent.devices.base import KvMemory, Piece, Steps, Transfer
from services.gpu_agent.devices.cuda.device import CudaDevice
from services.gpu_agent.devices.cuda.driver import Driver
from services.gpu_agent.engines.layouts import check_layout
from services.gpu_agent.engines.rope import RopeSpec, rope_spec

# (what, by how many positions K is moved, with checksums): every store has them, of retrieves a sample.
_WAYS = (
    ("retrieve", 0, False),
    ("retrieve shifted", SHIFT, False),
    ("retrieve verified", SHIFT, True),
    ("store", 0, True),
)


class Clocked(Protocol):
    """Knows how long its latest transfer took, from the first byte to the last, by the GPU's clock: a lane does."""

    device_seconds: float


@dataclass(frozen=True)
class Bench:
    device: CudaDevice
    memory: KvMemory
    arena: BenchArena
    rope: RopeSpec
    slots: np.ndarray[Any, np.dtype[np.int64]]

    def pieces(self, chunks: int, delta: int, tokens: int = CHUNK_TOKENS, *, checked: bool = False) -> list[Piece]:
        return [
            Piece(
                self.arena.memory[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES],
                CHUNK_TOKENS,
                0,
                self.slots[number * CHUNK_TOKENS : number * CHUNK_TOKENS + tokens],
                delta,
                checked,
            )
            for number in range(chunks)
        ]

    def retrieve(self, pieces: list[Piece]) -> None:
        self.memory.scatter(0, pieces, self.rope, lambda: None)

    def retrieve_in_steps(self, pieces: list[Piece], steps: int) -> None:
        self.memory.scatter_in_steps([Transfer(0, pieces, self.rope)], Steps(steps, 0, 1), lambda: None)

    def store(self, pieces: list[Piece]) -> None:
        self.memory.gather(0, pieces, lambda: None)


@contextmanager
def bench(device: CudaDevice, arrangement: str, chunks: int) -> Iterator[Bench]:
    """An engine process with memory for `chunks` chunks, opened by this one, and an arena for them, registered."""
    command = (sys.executable, ["benchmarks.gpu.engine", arrangement, str(chunks)])
    with piped({"engine": command}) as started, BenchArena(chunks * CHUNK_BYTES, device) as arena:
        *handles, semaphores = parse_handles(started["engine"].ask("handles")["handles"])
        space = model_space()
        layout = check_layout(build_layout(arrangement, kv_shape(arrangement, chunks)), handles, space, common.Rank())
        memory = device.open(handles, layout, semaphores)
        rope = rope_spec(space.groups[0].rope)
        memory.prepare([rope])
        if not device.host.wait(60):
            raise TimeoutError("the arena was not registered in a minute")
        yield Bench(device, memory, arena, rope, _slots(arrangement, chunks))
        memory.close()


def _slots(arrangement: str, chunks: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    if arrangement == "contiguous":
        return np.arange(chunks * CHUNK_TOKENS)
    blocks = np.array(block_table(chunks), np.int64)
    return (blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()


def timed(work: Callable[[], None], lane: Clocked, nbytes: int, chunks: int, times: int) -> dict[str, float]:
    work()
    device, wall, cpu = [], [], []
    for _ in range(times):
        begun, busy = time.perf_counter(), time.thread_time()
        work()
        wall.append(time.perf_counter() - begun)
        cpu.append(time.thread_time() - busy)
        device.append(lane.device_seconds)
    return {
        "gbs": nbytes / statistics.median(device) / 1e9,
        "wall_gbs": nbytes / statistics.median(wall) / 1e9,
        "wall_added_ms": 1e3 * (statistics.median(wall) - statistics.median(device)),
        "cpu_ms_per_chunk": 1e3 * statistics.median(cpu) / chunks,
    }


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    sizes = TRANSFERS[:2] if quick else TRANSFERS
    device = CudaDevice("", STAGING_BYTES, 30.0)
    driver = Driver(0)
    rows: list[dict[str, Any]] = []
    links: list[dict[str, float]] = []
    figures: dict[str, Any] = {"chunks": sizes[-1], "chunk_bytes": CHUNK_BYTES, "staging_bytes": STAGING_BYTES}
    for arrangement in ("paged_nhd", "contiguous"):
        with bench(device, arrangement, sizes[-1]) as made:
            for chunks in sizes:
                links.append(link(made.arena, driver))
                rows += _rows(made, arrangement, chunks, links[-1], 3 if quick else 9)
                for row in rows[-len(_WAYS) :]:
                    screen.line(
                        f"{row['what']:>17} {arrangement:>10} {chunks:>4} chunks: {row['gbs']:.1f} GB/s, "
                        f"{row['fraction_of_link']:.3f} of the link, wall + {row['wall_added_ms']:.2f} ms"
                    )
            if arrangement == "paged_nhd":
                figures["steps"] = list(_in_steps(made, links, sizes, screen))
                figures["both_directions_gbs"] = _both(made, min(16, sizes[-1] // 2))
                figures["half_of_each_chunk"] = _halves(made, min(32, sizes[-1]))
                figures["not_registered_gbs"] = _cold(made, min(8, sizes[-1]))
    device.close()
    return {**figures, "rows": rows, "links": links}


def _rows(
    made: Bench, arrangement: str, chunks: int, ceiling: dict[str, float], times: int
) -> Iterator[dict[str, Any]]:
    nbytes = chunks * CHUNK_BYTES
    for what, delta, checked in _WAYS:
        pieces = made.pieces(chunks, delta, checked=checked)
        store = what == "store"
        lane = made.device.outbound if store else made.device.inbound
        move = made.store if store else made.retrieve
        found = timed(lambda: move(pieces), lane, nbytes, chunks, times)  # noqa: B023
        best = ceiling["to_host" if store else "to_gpu"]
        yield {
            "what": what,
            "arrangement": arrangement,
            "chunks": chunks,
            **found,
            "fraction_of_link": found["gbs"] / best,
        }


def _in_steps(
    made: Bench, links: list[dict[str, float]], sizes: tuple[int, ...], screen: Screen
) -> Iterator[dict[str, Any]]:
    """Layer by layer, in pieces of so many bytes; K is moved."""
    for chunks, best in zip(sizes, links, strict=True):
        for steps in (LAYERS // 4, LAYERS):
            pieces = made.pieces(chunks, SHIFT)
            move = lambda: made.retrieve_in_steps(pieces, steps)  # noqa: B023, E731
            found = timed(move, made.device.inbound, chunks * CHUNK_BYTES, chunks, 5)
            fraction = found["gbs"] / best["to_gpu"]
            piece = CHUNK_BYTES // steps
            screen.line(f"{steps:>3} steps {chunks:>4} chunks, pieces of {piece >> 10} KiB: {fraction:.3f} of the link")
            yield {"chunks": chunks, "steps": steps, "piece_bytes": piece, **found, "fraction_of_link": fraction}


def _both(made: Bench, chunks: int) -> float:
    """A retrieve and a store of as much at the same time, together, by the clock on the wall."""
    inbound, outbound = made.pieces(2 * chunks, SHIFT)[:chunks], made.pieces(2 * chunks, 0)[chunks:]
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        other = threading.Thread(target=made.store, args=(outbound,))
        other.start()
        made.retrieve(inbound)
        other.join()
        found.append(time.perf_counter() - begun)
    return 2 * chunks * CHUNK_BYTES / statistics.median(found) / 1e9


def _halves(made: Bench, chunks: int) -> dict[str, float]:
    """Only the first half of each chunk's tokens is wanted: rows of 256 KiB are copied, not whole objects."""
    pieces = made.pieces(chunks, SHIFT, CHUNK_TOKENS // 2)
    return timed(lambda: made.retrieve(pieces), made.device.inbound, chunks * CHUNK_BYTES // 2, chunks, 5)


def _cold(made: Bench, chunks: int) -> dict[str, float]:
    """From memory that is not registered, through the bounce buffer."""
    plain = [
        Piece(np.array(piece.block), piece.tokens, 0, piece.slots, piece.delta) for piece in made.pieces(chunks, SHIFT)
    ]
    nbytes = chunks * CHUNK_BYTES
    return {
        "retrieve": timed(lambda: made.retrieve(plain), made.device.inbound, nbytes, chunks, 3)["wall_gbs"],
        "store": timed(lambda: made.store(plain), made.device.outbound, nbytes, chunks, 3)["wall_gbs"],
    }
