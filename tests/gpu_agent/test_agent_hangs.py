"""A copy on the device that does not end: its call fails, its memory is kept from everybody until it has ended."""

import threading
import time
from typing import Any

import pytest
from agent_rig import INSTANCE, CallFailed, Rig, blocks, outcomes
from test_agent_copies import OTHER, STORED, TEXT

from kvblend.v1 import agent_pb2 as pb
from services.gpu_agent.devices.base import Hung
from services.gpu_agent.devices.cpu import CpuKvMemory


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> threading.Event:
    """From now on copies hang, until this is set. TEXT is stored already."""
    assert outcomes(rig.store(TEXT, STORED)) == [("STORED", "UNSPECIFIED")] * 3
    end = threading.Event()

    def hang(*_: Any) -> None:
        raise Hung(lambda: end.wait(30) and None)

    monkeypatch.setattr(CpuKvMemory, "scatter", hang)
    monkeypatch.setattr(CpuKvMemory, "gather", hang)
    return end


def check_quarantine(rig: Rig, end: threading.Event) -> None:
    """The session is given up, but drained only when the copy has ended."""
    rig.wait_for(lambda: len(rig.fake.named("Session")) > 1)
    rig.wait_ready()
    time.sleep(0.4)
    assert not rig.fake.drained
    end.set()
    rig.wait_for(lambda: len(rig.fake.drained) == 1)


def test_a_hung_retrieve_has_no_answer_and_its_blocks_are_quarantined(rig: Rig, end: threading.Event) -> None:
    """An answer would give the slots back to the engine, which the copy may still write."""
    rig.fake.serve_prefix(3)
    assert rig.lookup([*TEXT, 1]).prefix_tokens == 40
    with pytest.raises(CallFailed, match=r"INTERNAL: .*may still write the slots"):
        rig.retrieve(OTHER)
    assert not rig.fake.named("EndCopy")
    check_quarantine(rig, end)


def test_a_hung_store_is_answered_and_its_blocks_are_quarantined(rig: Rig, end: threading.Event) -> None:
    commits = len(rig.fake.named("Commit"))
    assert outcomes(rig.store([7] * 20, blocks(0, 1, 2, 3, 4))) == [("FAILED", "COPY_FAILED")] * 2
    assert len(rig.fake.named("Commit")) == commits
    assert not rig.fake.named("Abort")
    check_quarantine(rig, end)


def test_mappings_stay_open_under_a_hung_copy(rig: Rig, end: threading.Event) -> None:
    memory = rig.engine.buffers[0].name
    assert outcomes(rig.store([7], blocks(0))) == [("FAILED", "COPY_FAILED")]
    with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
        rig.call("UnregisterKvCache", pb.UnregisterKvCacheRequest(instance_id=INSTANCE), timeout=0.5)
    assert mapped(memory) == 2
    end.set()
    rig.wait_for(lambda: mapped(memory) == 1)


def mapped(name: str) -> int:
    """How often this process maps a file; the engine of the test does once."""
    with open("/proc/self/maps") as maps:
        return sum(name in line for line in maps)


def test_a_hung_proof_is_refused(rig: Rig, end: threading.Event) -> None:
    request = pb.ProveLayoutRequest(instance_id=INSTANCE, slots=blocks(0), tokens=3, expected_checksums=b"8" * 8)
    with pytest.raises(CallFailed, match="does not end"):
        rig.call("ProveLayout", request)
    end.set()
