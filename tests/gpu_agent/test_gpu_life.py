"""What becomes of GPU memory when engines and agents come and go."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gpu_rig import GpuStack, gpu_stack, needs_gpu

pytestmark = needs_gpu

ENGINE = Path(__file__).with_name("gpu_engine.py")
MIB = 2048
TIMES = 6


@pytest.fixture(scope="module")
def stack() -> Iterator[GpuStack]:
    with gpu_stack(64, "--staging-mib", "4", matcher=False) as running:
        yield running


@contextmanager
def engine(stack: GpuStack, instance: str) -> Iterator[subprocess.Popen[str]]:
    """A registered engine process."""
    command = [sys.executable, str(ENGINE), stack.target("agent"), instance, str(MIB)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "registered"
            yield process
        finally:
            process.kill()


def free_mib() -> int:
    return torch.cuda.mem_get_info()[0] >> 20


def test_a_killed_engine_is_gone_from_the_gpu_at_once(stack: GpuStack) -> None:
    """Time and again; the next engine finds its memory free."""
    with engine(stack, "first"):
        pass
    time.sleep(2)
    baseline = free_mib()
    waits = []
    for number in range(TIMES):
        with engine(stack, f"engine-{number}") as process:
            assert free_mib() <= baseline - MIB
            process.kill()
            process.wait()
            killed = time.monotonic()
            while free_mib() < baseline - 64:
                assert time.monotonic() < killed + 5, "its memory is still taken"
                time.sleep(0.005)
            waits.append(time.monotonic() - killed)
    print("seconds until the memory was free:", " ".join(f"{wait:.3f}" for wait in sorted(waits)))
    assert sorted(waits)[TIMES // 2] < 0.5
    assert abs(free_mib() - baseline) < 64
