"""Tensor parallelism of two on the cpu device: an agent for each rank, one store and one matcher."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from agent_rig import SHAPE, Rig
from processes import Stack
from ranks import RANKS, Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with TemporaryDirectory(prefix="kvb-", dir="/dev/shm") as directory:
        with closing(Stack(Path(directory), arena_mib=8)) as stack:
            stack.start_matcher()
            stack.start_store()
            names = [f"agent-{rank}" for rank in range(RANKS)]
            for name in names:
                stack.start_agent(name)
            for name in names:
                stack.wait_agent(name)
            rigs = [Rig(stack.target(name), shape=SHAPE, seed=seed) for seed, name in enumerate(names)]
            yield Engine(stack, rigs)
            for rig in rigs:
                rig.close()


def test_a_chunk_with_one_rank_s_half_missing_is_not_found(engine: Engine) -> None:
    engine.check_halves()


def test_each_rank_gets_its_own_half_back(engine: Engine) -> None:
    engine.check_prefix()


def test_both_ranks_move_the_same_segments(engine: Engine) -> None:
    engine.check_segments()
    engine.check_nothing_is_left()
