"""A thousand random registrations, copies and kills on a GPU; test_agent_churn.py has fewer on the cpu device."""

import os
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from churn import Churn
from gpu_rig import GpuStack, needs_gpu

pytestmark = needs_gpu

CYCLES = int(os.environ.get("KVBLEND_CHURN_CYCLES", "1000"))
SEED = int(os.environ.get("KVBLEND_CHURN_SEED", "1"))


def test_a_thousand_lives_and_deaths_leave_nothing_and_no_wrong_byte(shm_dir: Path) -> None:
    with closing(GpuStack(shm_dir, arena_mib=64)) as stack:
        stack.start_matcher()
        stack.start_store()
        restart = partial(stack.start_agent, "agent", "--staging-mib", "4")
        restart()
        stack.wait_agent()
        # This process has its own context before the first look at what is free.
        torch.cuda.init()
        with closing(Churn(stack, "cuda", shm_dir, restart, lambda: torch.cuda.mem_get_info()[0])) as churn:
            churn.run(CYCLES, SEED)
            churn.check_nothing_is_left()
            assert churn.counts["prefix tokens"]
            assert churn.counts["moved tokens"]
            assert churn.counts["killed at work"]
