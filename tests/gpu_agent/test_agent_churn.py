"""Random registrations, copies and kills on the cpu device; test_gpu_churn.py has a thousand on a GPU."""

import os
from contextlib import closing
from functools import partial
from pathlib import Path

from churn import Churn
from processes import Stack

CYCLES = int(os.environ.get("KVBLEND_CHURN_CYCLES", "60"))
SEED = int(os.environ.get("KVBLEND_CHURN_SEED", "2"))


def test_random_lives_and_deaths_leave_nothing_and_no_wrong_byte(shm_dir: Path) -> None:
    engines = shm_dir / "engines"
    engines.mkdir()
    with closing(Stack(shm_dir, arena_mib=64)) as stack:
        stack.start_matcher()
        stack.start_store()
        restart = partial(stack.start_agent, "agent", "--shm-dir", str(engines))
        restart()
        stack.wait_agent()
        with closing(Churn(stack, "cpu", engines, restart, lambda: _unused(shm_dir))) as churn:
            churn.run(CYCLES, SEED)
            churn.check_nothing_is_left()
            assert churn.counts["prefix tokens"]
            assert churn.counts["moved tokens"]
            assert churn.counts["killed at work"]


def _unused(directory: Path) -> int:
    """Engines' memory is in files: what would be left of them."""
    return -sum(file.stat().st_size for file in directory.glob("engines/*"))
