"""An engine, an agent and a store, each a process of its own, and a semaphore between the first two.

The agent may be in a container: then KV and semaphores are in a volume, and /dev/shm is not the same.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from agent_rig import Rig, blocks, outcomes, ranges, slots_of
from containers import PLACES, volume
from processes import Stack
from waiting_engine import EARLIER, LATER, SHAPE, text_from

ENGINE = Path(__file__).with_name("waiting_engine.py")
ALL = blocks(*range(16))


@pytest.fixture(scope="module", params=PLACES)
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with volume(request.param) as directory, closing(Stack(directory, arena_mib=8)) as running:
        running.start_store()
        running.shm_dir = directory
        if request.param == "container":
            running.contained.add("agent")
        running.start_agent("agent", "--shm-dir", str(directory))
        yield running


@contextmanager
def engine(stack: Stack, token: int) -> Iterator[subprocess.Popen[str]]:
    """Registered, its store on its way."""
    command = [sys.executable, str(ENGINE), stack.target("agent"), str(stack.shm_dir), str(token)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert said(process) == "registered"
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("now\n")
    process.stdin.flush()


def check_others_are_served(rig: Rig, number: int) -> None:
    text = [1000 * (1 + number) + token for token in range(64)]
    original = rig.engine.read(slots_of(ALL, range(64)))
    assert {name for name, _ in outcomes(rig.store(text, ALL))} == {"STORED"}
    assert rig.lookup([*text, 1], f"other {number}").prefix_tokens == 64
    assert ranges(rig.retrieve(ALL, f"other {number}").written) == [(0, 64)]
    assert (rig.engine.read(slots_of(ALL, range(64))) == original).all()


def test_case_15_what_is_stored_are_the_bytes_of_the_event_s_time(stack: Stack) -> None:
    rig = stack.rig("agent", SHAPE)
    with engine(stack, 500) as process:
        for number in range(5):
            check_others_are_served(rig, number)
        assert rig.lookup([*text_from(500), 1], "early").prefix_tokens == 0, "it was stored before the event"
        tell(process)
        assert said(process) == "STORED"
    assert rig.lookup([*text_from(500), 1], "late").prefix_tokens == 64
    assert ranges(rig.retrieve(ALL, "late").written) == [(0, 64)]
    found = rig.engine.read(slots_of(ALL, range(64)))
    assert not (found == EARLIER).any()
    assert (found == LATER).all()


def test_an_engine_that_is_killed_before_its_event_leaves_nothing(stack: Stack) -> None:
    rig = stack.rig("agent", SHAPE)
    with engine(stack, 600) as process:
        check_others_are_served(rig, 10)
        mine = f"kvblend-{process.pid}-"
        assert mine in stack.maps("agent")
        process.kill()
        process.wait()
        rig.wait_for(lambda: mine not in stack.maps("agent"))
    check_others_are_served(rig, 11)
    assert rig.lookup([*text_from(600), 1], "never").prefix_tokens == 0
    stats = stack.stats()
    assert (stats.reserved_objects, stats.quarantined_objects) == (0, 0)
