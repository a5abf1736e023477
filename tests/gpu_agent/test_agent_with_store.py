"""The agent with a real store and a real matcher, each a process of its own."""

import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from agent_rig import SHAPE, Rig, blocks, failures, outcomes, ranges, slots_of
from engine_memory import rotate_slowly, same_bits
from processes import Stack

from kvblend.layouts import KvShape
from kvblend.results import Segments
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store

TEXT = np.random.default_rng(1).integers(0, 50_000, 72).tolist()
STORED = blocks(3, 1, 7, 0, 9, 2, 11, 5, 8, 6, 4, 10, 12, 14, 13, 15, 18, 16)
OTHER = blocks(*range(23, -1, -1))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Shared by the tests of small models; each stores text of its own."""
    with TemporaryDirectory(prefix="kvb-", dir="/dev/shm") as directory:
        with closing(Stack(Path(directory), arena_mib=8)) as running:
            running.start_matcher()
            running.start_store()
            running.start_agent()
            yield running


def unused_leases(stack: Stack) -> tuple[int, int]:
    stats = stack.stats()
    return stats.held_leases, stats.busy_leases


def document(rig: Rig, text: list[int], first_position: int, **changes: object) -> pb.StoreKvResponse:
    fields = {
        "kind": store.STORE_KIND_DOCUMENT,
        "first_position": first_position,
        "context": common.Context(tokens=np.array([1] * first_position, "<u4").tobytes()),
        "document": store.DocumentOptions(document="d"),
    }
    return rig.store(text, STORED, **(fields | changes))


def test_what_is_stored_is_found_and_arrives(stack: Stack) -> None:
    rig = stack.rig("agent", SHAPE)
    original = rig.engine.read(slots_of(STORED, range(len(TEXT))))
    answer = rig.store(TEXT, STORED)
    assert outcomes(answer) == [("STORED", "UNSPECIFIED")] * 5
    assert outcomes(rig.store(TEXT, STORED)) == [("PRESENT", "UNSPECIFIED")] * 5

    # As a prefix, at once, bit for bit.
    found = rig.lookup([*TEXT, 7])
    assert found.prefix_tokens == len(TEXT)
    assert ranges(rig.retrieve(OTHER).written) == [(0, len(TEXT))]
    assert same_bits(rig.engine.read(slots_of(OTHER, range(len(TEXT)))), original)

    # As a segment, behind other text, K rotated.
    rig.engine.write(slots_of(STORED, range(len(TEXT))), original)
    answer = document(rig, TEXT, 1)
    assert {name for name, _ in outcomes(answer)} == {"STORED"}
    prompt = [*range(60_000, 60_013), *TEXT[5:], *range(70_000, 70_009)]
    found = rig.lookup(prompt, "segment", at_least=[answer.position])
    assert found.prefix_tokens == 0
    covered = [(item.query_position, item.stored_position, item.length) for item in Segments(found.segments)]
    assert sum(length for _, _, length in covered) >= 48
    response = rig.retrieve(OTHER, "segment")
    assert not response.failed
    for query, stored, length in covered:
        kv = rig.engine.read(slots_of(OTHER, range(query, query + length)))
        # The document's first token was at position 1.
        wanted = original[:, :, stored - 1 : stored - 1 + length]
        assert same_bits(kv[:, 1], wanted[:, 1])
        moved = rotate_slowly(wanted[:, 0], rig.space.groups[0].rope, query - stored)
        assert torch.allclose(kv[:, 0].double(), moved, atol=1e-5)
    rig.wait_for(lambda: unused_leases(stack) == (0, 0))

    # Nothing of another tenant, adapter, salt or weights epoch.
    strangers = [
        common.Space(tenant="other"),
        common.Space(adapter_digest=b"a" * 32),
        common.Space(cache_salt=b"salt"),
    ]
    for number, space in enumerate(strangers):
        stranger = rig.lookup(prompt, f"stranger {number}", space=space, at_least=[answer.position])
        assert (stranger.prefix_tokens, len(stranger.segments.lengths)) == (0, 0)
        assert rig.lookup([*TEXT, 7], f"stranger prefix {number}", space=space).prefix_tokens == 0
    rig.space.weights_epoch = 1
    rig.register(instance_id="engine-2")
    assert rig.lookup([*TEXT, 7], "newer weights", instance_id="engine-2").prefix_tokens == 0


def test_case_70_stored_means_visible(stack: Stack) -> None:
    rig = stack.rig("agent", SHAPE)
    for number in range(50):
        text = [number * 100 + token for token in range(32)]
        assert outcomes(rig.store(text, STORED)) == [("STORED", "UNSPECIFIED")] * 2
        assert rig.lookup([*text, 1], f"r{number}").prefix_tokens == 32
        rig.end(f"r{number}")
    rig.wait_for(lambda: unused_leases(stack) == (0, 0))


def test_a_killed_store_and_a_killed_agent_lose_no_text(stack: Stack) -> None:
    rig = stack.rig("agent", SHAPE)
    text = [token + 100_000 for token in TEXT]
    original = rig.engine.read(slots_of(STORED, range(len(text))))
    rig.store(text, STORED)
    rig.lookup([*text, 7], "before")

    stack.kill("store")
    assert failures(rig.retrieve(OTHER, "before"))[0][:2] == (0, len(text))
    away = rig.lookup([*text, 7], "away")
    assert (away.prefix_tokens, away.shortfalls[0].reason) == (0, common.REASON_STORE_UNAVAILABLE)
    stack.start_store()
    rig.wait_for(rig._ready, 30)
    assert rig.lookup([*text, 7], "after").prefix_tokens == len(text)
    assert ranges(rig.retrieve(OTHER, "after").written) == [(0, len(text))]
    assert same_bits(rig.engine.read(slots_of(OTHER, range(len(text)))), original)

    rig.lookup([*text, 7], "leased")
    stack.kill("agent")
    rig.wait_for(lambda: unused_leases(stack) == (0, 0))
    stack.start_agent()
    rig.wait_for(rig._ready, 30)
    rig.register()
    assert rig.lookup([*text, 7], "leased").prefix_tokens == len(text)
    assert stack.stats().quarantined_objects == 0


BIG = KvShape(layers=8, heads=8, head_size=64, blocks=1, block_tokens=1024, dtype=common.DTYPE_FLOAT32)


def stop_in_the_middle_of_a_store(stack: Stack, rig: Rig) -> tuple[threading.Thread, list[pb.StoreKvResponse]]:
    """A store whose agent was stopped with its blocks reserved and not committed."""
    for attempt in range(20):
        answers: list[pb.StoreKvResponse] = []
        text = [attempt * 2000 + token for token in range(1024)]
        copier = threading.Thread(target=lambda text=text, answers=answers: answers.append(store_all(rig, text)))
        copier.start()
        while copier.is_alive() and not stack.stats().reserved_objects:
            pass
        stack.signal("victim", signal.SIGSTOP)
        if stack.stats().reserved_objects:
            return copier, answers
        stack.signal("victim", signal.SIGCONT)
        copier.join()
    raise AssertionError("the agent was never caught in the middle of a store")


def store_all(rig: Rig, text: list[int]) -> pb.StoreKvResponse:
    return rig.store(text, blocks(0))


def test_a_stopped_agent_that_still_copies_corrupts_nothing(shm_dir: Path) -> None:
    """Its writes after waking go to blocks that nobody else was given, and are never called stored."""
    with closing(Stack(shm_dir, arena_mib=80)) as stack:
        stack.start_matcher()
        stack.start_store()
        stack.start_agent("victim")
        stack.start_agent("other")
        victim, other = stack.rig("victim", BIG, seed=1), stack.rig("other", BIG, seed=2)
        copier, answers = stop_in_the_middle_of_a_store(stack, victim)
        victim.wait_for(lambda: stack.stats().quarantined_objects > 0)

        # The other one fills all that is left, and more: what it is told was stored must stay its own.
        texts = [[10**6 + 1000 * number + token for token in range(256)] for number in range(12)]
        for text in texts:
            other.store(text, blocks(0))
        stack.signal("victim", signal.SIGCONT)
        copier.join(30)
        assert {name for name, _ in outcomes(answers[0])} == {"FAILED"}
        served = 0
        for number, text in enumerate(texts):
            found = other.lookup([*text, 1], f"r{number}").prefix_tokens
            response = other.retrieve(pb.SlotMap(block_ids=b"\0\0\0\0", first_slot=512), f"r{number}")
            assert not response.failed
            served += found
            for buffer in other.engine._tensors():
                assert same_bits(buffer[0, 512 : 512 + found], buffer[0, :found])
                buffer[0, 512:].zero_()
        assert served >= 256
        victim.wait_for(lambda: stack.stats().quarantined_objects == 0, 15)


def test_leases_that_gave_way_under_pressure_are_told_range_by_range(shm_dir: Path) -> None:
    """The store takes the oldest leases for a text that needs more room than is left; the engine computes those."""
    with closing(Stack(shm_dir, arena_mib=40)) as stack:
        stack.start_matcher()
        stack.start_store()
        stack.start_agent()
        rig = stack.rig("agent", BIG)
        # A chunk has half a MiB. Leases may protect 20 MiB; the text that follows needs 32.
        text = list(range(512))
        assert {name for name, _ in outcomes(rig.store(text, blocks(0)))} == {"STORED"}
        assert rig.lookup([*text, 1], "leased").prefix_tokens == 512
        answer = store_all(rig, [2000 + token for token in range(1024)])
        assert {name for name, _ in outcomes(answer)} == {"STORED"}, "a lease is never a reason to refuse"
        response = rig.retrieve(pb.SlotMap(block_ids=b"\0\0\0\0"), "leased")
        lost = [(first, end) for first, end, reason in failures(response) if reason == "LEASE_REVOKED"]
        assert len(lost) == len(response.failed) >= 1
        covered = sorted([*lost, *ranges(response.written)])
        assert (covered[0][0], covered[-1][1]) == (0, 512)
        assert all(one[1] == two[0] for one, two in pairwise(covered))
        rig.wait_for(lambda: unused_leases(stack) == (0, 0))


def test_kept_leases_are_held_between_retrieves(stack: Stack) -> None:
    rig = stack.rig("agent", SHAPE)
    text = [token + 300_000 for token in TEXT]
    others = unused_leases(stack)[0]
    rig.store(text, STORED)
    rig.lookup([*text, 7], "kept")
    for _ in range(3):
        assert ranges(rig.retrieve(OTHER, "kept", keep_leases=True).written) == [(0, len(text))]
        rig.wait_for(lambda: unused_leases(stack) == (others + 5, 0))
    rig.end("kept")
    rig.wait_for(lambda: unused_leases(stack) == (others, 0))
