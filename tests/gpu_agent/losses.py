"""What must become of an agent, its engine and its store when the agent's device is lost in the middle of copies."""

import threading
import time
from pathlib import Path

import numpy as np
from agent_rig import Rig, blocks, slots_of
from engine_memory import same_bits
from processes import Stack

from kvblend.client import KvblendClient

PROGRAM = Path(__file__).with_name("losing_agent.py")
TEXT = np.random.default_rng(7).integers(0, 50_000, 64).tolist()
# Blocks of four tokens each, of 24.
HERE, THERE = list(range(16)), list(range(23, 7, -1))


def start_losing_agent(stack: Stack) -> Path:
    """The file that makes its next copy lose the device."""
    flag = stack.directory / "lose-it"
    stack.start_agent("agent", program=[str(PROGRAM), str(flag)])
    return flag


def check_loss(stack: Stack, flag: Path, rig: Rig) -> None:
    """`rig` has an engine's memory; it is registered here."""
    client = KvblendClient(stack.target("agent"), "engine-1")
    try:
        registered = client.register_kv_cache(rig.space, rig.engine.handles, rig.engine.layout, timeout=60)
        assert registered, registered
        original = rig.engine.read(slots_of(blocks(*HERE), range(64)))
        assert client.store(TEXT, "stored", block_ids=HERE)
        assert client.lookup([*TEXT, 1], "leased").prefix_tokens == 64

        flag.touch()
        calls = [
            threading.Thread(target=lambda: answers.append(client.retrieve("leased", block_ids=THERE))),
            threading.Thread(target=lambda: answers.append(client.store(TEXT[::-1], "lost", block_ids=HERE))),
        ]
        answers: list[object] = []
        began = time.monotonic()
        for call in calls:
            call.start()
        assert stack.wait_end("agent") == 1, "it must be told from an agent that was asked to end"
        print(f"seconds from the loss to the agent's end: {time.monotonic() - began:.2f}")
        for call in calls:
            call.join(30)
        assert len(answers) == 2
        assert not any(answers), "nothing was copied"
        lines = [line for line in stack.log("agent").read_text().splitlines() if "the device is lost" in line]
        assert len(lines) == 1, lines
        print(lines[0])
        rig.wait_for(lambda: is_clean(stack))

        flag.unlink()
        stack.start_agent("agent", program=[str(PROGRAM), str(flag)])
        stack.wait_agent()
        # The client has registered again by itself.
        rig.wait_for(lambda: client.lookup([*TEXT, 1], "again").prefix_tokens == 64)
        assert client.lookup([*TEXT[::-1], 1], "never").prefix_tokens == 0
        retrieved = client.retrieve("again", block_ids=THERE)
        assert retrieved.written == ((0, 64),), retrieved
        assert same_bits(rig.engine.read(slots_of(blocks(*THERE), range(64))), original)
        client.end_session("again")
    finally:
        client.close()


def is_clean(stack: Stack) -> bool:
    stats = stack.stats()
    return not any((stats.held_leases, stats.busy_leases, stats.reserved_objects, stats.quarantined_objects))
