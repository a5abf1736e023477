"""How soon the memory of a killed engine is free for the next: while its agent maps it, the GPU keeps it."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.common.screen import Screen
from benchmarks.gpu.shapes import CHUNK_BYTES
from cli.local import LocalServices

# 2 GiB.
CHUNKS = 64
_LOOK_SECONDS = 0.001
_GIVE_UP_SECONDS = 10.0
# What else comes and goes on a GPU.
_NOISE_BYTES = 64 << 20


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    times = 3 if quick else 20
    with LocalServices(arena_bytes=1 << 30, device="cuda", start_timeout=300) as services:
        engine = partial(light_engine, services.agent_target)
        seconds = killed_and_restarted(engine, CHUNKS * CHUNK_BYTES, times)
    result = {"times": times, "median_s": statistics.median(seconds), "worst_s": max(seconds), "seconds": seconds}
    screen.line(
        f"a killed engine's {CHUNKS * CHUNK_BYTES >> 20} MiB are free after {result['median_s']:.3f} s, "
        f"at worst of {times} times {result['worst_s']:.3f} s"
    )
    return result


def killed_and_restarted(
    engine: Callable[[str], AbstractContextManager["subprocess.Popen[str]"]], nbytes: int, times: int
) -> list[float]:
    """Seconds, for each of so many engines that are killed one after the other, until its memory is free.

    `engine` starts one with an instance id and so many bytes of GPU memory. Raises RuntimeError if an engine does not
    find the memory of the one before.
    """
    # The agent prepares its kernels for the first one.
    with engine("first"):
        pass
    time.sleep(2)
    baseline = free_bytes()
    seconds = []
    for number in range(times):
        with engine(f"engine-{number}") as process:
            if free_bytes() > baseline - nbytes:
                raise RuntimeError("the engine has no memory of its own")
            process.kill()
            process.wait()
            killed = time.monotonic()
            while free_bytes() < baseline - _NOISE_BYTES:
                if time.monotonic() > killed + _GIVE_UP_SECONDS:
                    raise RuntimeError(f"the memory of engine {number} is still taken")
                time.sleep(_LOOK_SECONDS)
            seconds.append(time.monotonic() - killed)
    return seconds


def free_bytes() -> int:
    free: int = torch.cuda.mem_get_info()[0]
    return free


@contextmanager
def light_engine(agent: str, instance: str) -> Iterator["subprocess.Popen[str]"]:
    """A registered engine of a process of its own. Raises RuntimeError."""
    command = [sys.executable, "-m", "benchmarks.gpu.light_engine", agent, instance, str(CHUNKS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if (said := process.stdout.readline().strip()) != "registered":
                raise RuntimeError(f"the engine was not registered: {said}")
            yield process
        finally:
            process.kill()
