"""Ways to move KV between the arena and an engine's planes: what the lanes do, beside two that need no staging.

Every way's bytes are compared with what they must be; one that moves wrong bytes fails the bench.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from benchmarks.common.screen import Screen
from benchmarks.gpu.batched import BatchedCopies
from benchmarks.gpu.ceilings import link
from benchmarks.gpu.contents import ROW_BYTES, Contents, gpu_bytes
from benchmarks.gpu.copies import Bench, Clocked, bench, timed
from benchmarks.gpu.direct import DirectKernel
from benchmarks.gpu.shapes import CHUNK_BYTES, SHIFT, STAGING_BYTES, TRANSFERS
from benchmarks.gpu.transfer import Absent
from services.gpu_agent.devices.base import Piece
from services.gpu_agent.devices.cuda.device import CudaDevice
from services.gpu_agent.devices.cuda.driver import Driver
from services.gpu_agent.devices.cuda.memory import CudaKvMemory

_ARRANGEMENT = "paged_nhd"
# (what, by how many positions K is moved)
_WAYS = (("retrieve", 0), ("retrieve shifted", SHIFT), ("store", 0))


class Method(Protocol):
    """`inbound` and `outbound` know how long the latest retrieve and store took."""

    name: str
    rotates: bool

    @property
    def inbound(self) -> Clocked: ...

    @property
    def outbound(self) -> Clocked: ...

    def retrieve(self, pieces: list[Piece]) -> None: ...

    def store(self, pieces: list[Piece]) -> None: ...


class Staged:
    """What the lanes do: whole objects are copied to staging slots, from where a kernel moves them, and back."""

    name = "staged"
    rotates = True

    def __init__(self, made: Bench) -> None:
        self.inbound, self.outbound = made.device.inbound, made.device.outbound
        self.retrieve, self.store = made.retrieve, made.store


_METHODS: tuple[Callable[[Bench], Method], ...] = (Staged, DirectKernel, BatchedCopies)


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    sizes = TRANSFERS[:2] if quick else TRANSFERS
    device = CudaDevice("", STAGING_BYTES, 30.0)
    rows: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    with bench(device, _ARRANGEMENT, sizes[-1]) as made:
        contents = _contents(made)
        methods = list(_present(made, absent))
        for chunks in sizes:
            best = link(made.arena, Driver(0))
            for method in methods:
                for row in _rows(made, method, contents, chunks, 3 if quick else 5):
                    row["fraction_of_link"] = row["gbs"] / best["to_host" if row["what"] == "store" else "to_gpu"]
                    rows.append(row)
                    screen.line(
                        f"{row['what']:>16} {chunks:>4} chunks, {method.name:>14}: {row['gbs']:.1f} GB/s, "
                        f"{row['fraction_of_link']:.3f} of the link, {row['cpu_ms_per_chunk']:.3f} ms of CPU a chunk"
                    )
    device.close()
    for name, why in absent.items():
        screen.line(f"{name}: {why}")
    return {"rows": rows, "absent": absent}


def _contents(made: Bench) -> Contents:
    assert isinstance(made.memory, CudaKvMemory)
    begins = (made.memory.tables[0][:, 0] * made.memory.layout.groups[0].item_bytes).tolist()
    planes = [gpu_bytes(begin, len(made.slots) * ROW_BYTES).view(-1, ROW_BYTES) for begin in begins]
    slots = torch.from_numpy(made.slots).to("cuda")
    return Contents(planes, slots, made.arena.address, made.rope, Driver(0).to_device)


def _present(made: Bench, absent: dict[str, str]) -> Iterator[Method]:
    for make in _METHODS:
        try:
            yield make(made)
        except Absent as error:
            absent[error.method] = str(error)


def _rows(made: Bench, method: Method, contents: Contents, chunks: int, times: int) -> Iterator[dict[str, Any]]:
    for what, delta in _WAYS:
        if delta and not method.rotates:
            continue
        store = what == "store"
        move, clock = (method.store, method.outbound) if store else (method.retrieve, method.inbound)
        pieces = made.pieces(chunks, delta)
        if store:
            contents.fill()
        else:
            contents.clear()
        torch.cuda.synchronize()
        found = timed(lambda: move(pieces), clock, chunks * CHUNK_BYTES, chunks, times)  # noqa: B023
        wrong = contents.wrong_planes(chunks, delta)
        if wrong:
            raise RuntimeError(f"{method.name}, {what}, {chunks} chunks: wrong bytes in planes {wrong}")
        yield {"method": method.name, "what": what, "chunks": chunks, **found}
