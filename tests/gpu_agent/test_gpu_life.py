"""What becomes of GPU memory when engines and agents come and go."""

import statistics
from contextlib import closing
from functools import partial
from pathlib import Path

from agent_rig import ROPE, SHAPE
from gpu_rig import GpuRig, GpuStack, gpu_stack, needs_gpu
from losses import check_loss, start_losing_agent

from benchmarks.gpu.life import CHUNKS, killed_and_restarted, light_engine
from benchmarks.gpu.shapes import CHUNK_BYTES

pytestmark = needs_gpu

TIMES = 20


def test_each_engine_finds_the_memory_of_the_killed_one_before_it() -> None:
    """How soon is a matter of the benchmark."""
    with gpu_stack(64, "--staging-mib", "4", matcher=False) as stack:
        waits = sorted(killed_and_restarted(partial(light_engine, stack.target("agent")), CHUNKS * CHUNK_BYTES, TIMES))
        print(f"seconds until the memory was free: median {statistics.median(waits):.3f}, worst {waits[-1]:.3f}")


def test_an_agent_whose_gpu_context_is_lost_ends_and_the_next_one_goes_on(shm_dir: Path) -> None:
    """A kernel of its next copies gets an address that is nobody's, which breaks all that the process does on it."""
    with closing(GpuStack(shm_dir, arena_mib=64)) as stack:
        stack.start_store()
        flag = start_losing_agent(stack)
        stack.wait_agent()
        with closing(GpuRig(stack.target("agent"), "paged_nhd", SHAPE, ROPE, 1)) as rig:
            check_loss(stack, flag, rig)
