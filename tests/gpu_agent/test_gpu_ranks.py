"""Tensor parallelism of two on two GPUs, each with an agent that counts them in another order than the engine does."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from agent_rig import CallFailed
from gpu_rig import GpuRig, GpuStack, needs_gpu
from ranks import RANKS, Engine

from kvblend.layouts import KvShape
from kvblend.v1 import common_pb2 as common
from services.gpu_agent.devices.cuda.driver import visible_gpus

pytestmark = [*needs_gpu, pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")]

SHAPE = KvShape(layers=3, heads=2, head_size=16, blocks=24, block_tokens=4, dtype=common.DTYPE_BFLOAT16)


@pytest.fixture(scope="module")
def stack() -> Iterator[GpuStack]:
    order = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(gpu) for gpu in range(torch.cuda.device_count()))
    backwards = ",".join(reversed(order.split(",")))
    with TemporaryDirectory(prefix="kvb-", dir="/dev/shm") as directory:
        with closing(GpuStack(Path(directory), arena_mib=64)) as stack:
            stack.start_matcher()
            stack.start_store()
            for rank, gpu in enumerate(visible_gpus()[:RANKS]):
                flags = ["--gpu", gpu, "--staging-mib", "4"]
                stack.start_agent(f"agent-{rank}", *flags, CUDA_VISIBLE_DEVICES=backwards)
            for rank in range(RANKS):
                stack.wait_agent(f"agent-{rank}")
            yield stack


def rig_of(stack: GpuStack, rank: int, gpu: int) -> GpuRig:
    rope = common.Rope(style=common.ROPE_STYLE_NEOX, inv_freq=torch.logspace(0, -4, 8).double().numpy().tobytes())
    return GpuRig(stack.target(f"agent-{rank}"), "paged_hnd", SHAPE, rope, rank, f"cuda:{gpu}")


@pytest.fixture(scope="module")
def engine(stack: GpuStack) -> Iterator[Engine]:
    rigs = [rig_of(stack, rank, rank) for rank in range(RANKS)]
    yield Engine(stack, list(rigs))
    for rig in rigs:
        rig.close()


def test_a_rank_that_asks_the_other_gpu_s_agent_is_refused(stack: GpuStack) -> None:
    for rank in range(RANKS):
        with closing(rig_of(stack, rank, 1 - rank)) as rig, pytest.raises(CallFailed, match="this agent serves GPU-"):
            rig.register()


def test_a_chunk_with_one_rank_s_half_missing_is_not_found(engine: Engine) -> None:
    engine.check_halves()


def test_each_rank_gets_its_own_half_back(engine: Engine) -> None:
    engine.check_prefix()


def test_both_ranks_move_the_same_segments(engine: Engine) -> None:
    engine.check_segments()
    engine.check_nothing_is_left()
