"""The machine's own ceilings, measured with nothing of kvblend in the way."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.screen import Screen
from benchmarks.gpu.arena import BenchArena
from services.gpu_agent.devices.cuda.driver import Driver, visible_gpus

_MIB = 1 << 20
_PIECES_KIB = (64, 256, 1024, 4096, 32768)


def seconds(work: Callable[[], Any], times: int = 10, warm: int = 2) -> float:
    """Median by the GPU's clock; `work` starts and ends on the current stream."""
    found: list[float] = []
    for turn in range(warm + times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if turn >= warm:
            found.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(found))


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 127, (nbytes,), dtype=torch.uint8, device="cuda")


def device_copy(nbytes: int) -> float:
    """GB/s read and written together."""
    source, target = random_bytes(nbytes), random_bytes(nbytes)
    return 2 * nbytes / seconds(lambda: target.copy_(source)) / 1e9


def link(arena: BenchArena, driver: Driver, nbytes: int = 256 * _MIB) -> dict[str, float]:
    """GB/s of copies between the registered arena and the GPU, each direction alone."""
    gpu = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    host = arena.address
    up = seconds(lambda: driver.to_device(host, nbytes, gpu.data_ptr(), nbytes, 1, stream))
    down = seconds(lambda: driver.to_host(gpu.data_ptr(), host, nbytes, nbytes, 1, stream))
    return {"to_gpu": nbytes / up / 1e9, "to_host": nbytes / down / 1e9}


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    nbytes = (64 if quick else 512) * _MIB
    driver = Driver(0)
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "uuid": visible_gpus()[0]}
    figures["torch"] = torch.__version__
    with BenchArena(nbytes * 2, None) as arena:
        driver.register(arena.address, arena.nbytes)
        figures["link_gbs"] = link(arena, driver, min(nbytes, 256 * _MIB))
        figures["both_directions_gbs"] = _both(arena, driver, nbytes)
        figures["pieces_gbs"] = {str(kib): _pieces(arena, driver, kib << 10) for kib in _PIECES_KIB}
        driver.unregister(arena.address)
    figures["device_copy_gbs"] = device_copy(nbytes)
    screen.line(
        f"link {figures['link_gbs']['to_gpu']:.1f} / {figures['link_gbs']['to_host']:.1f} GB/s, "
        f"device copy {figures['device_copy_gbs']:.0f} GB/s"
    )
    return figures


def _both(arena: BenchArena, driver: Driver, nbytes: int) -> float:
    """Both directions at once, together."""
    gpus = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def work() -> None:
        main = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main)
        driver.to_device(arena.address, nbytes, gpus[0].data_ptr(), nbytes, 1, streams[0].cuda_stream)
        driver.to_host(gpus[1].data_ptr(), arena.address + nbytes, nbytes, nbytes, 1, streams[1].cuda_stream)
        for stream in streams:
            main.wait_stream(stream)

    return 2 * nbytes / seconds(work) / 1e9


def _pieces(arena: BenchArena, driver: Driver, piece: int) -> float:
    total = 64 * _MIB
    gpu = torch.empty(total, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream

    def work() -> None:
        for first in range(0, total, piece):
            driver.to_device(arena.address + first, piece, gpu.data_ptr() + first, piece, 1, stream)

    return total / seconds(work, 5) / 1e9
