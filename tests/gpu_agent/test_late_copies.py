"""A caller whose time is up uses its slots for something else: no copy may touch them then."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from agent_rig import failures, outcomes, running_agent
from fake_store import FakeStore
from test_agent_copies import OTHER, STORED, TEXT
from test_order import store_call

from kvblend.v1 import agent_pb2 as pb
from services.gpu_agent.devices.cpu import CpuKvMemory


def endless(memory: CpuKvMemory, group: int, pieces: Sequence[Any], *more: Any) -> None:
    watch: Callable[[], None] = more[-1]
    while True:
        watch()
        time.sleep(0.001)


def test_a_copy_stops_and_is_answered_before_its_caller_gives_up(
    fake: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last layers, and the answer, take the time that is kept back."""
    with running_agent(fake, answer_margin_ms=1000) as rig:
        assert outcomes(rig.store(TEXT, STORED)) == [("STORED", "UNSPECIFIED")] * 3
        fake.serve_prefix(3)
        rig.lookup([*TEXT, 1])
        monkeypatch.setattr(CpuKvMemory, "scatter", endless)
        monkeypatch.setattr(CpuKvMemory, "gather", endless)
        assert failures(rig.retrieve(OTHER, timeout=1.5)) == [(0, 40, "DEADLINE")]
        assert outcomes(store_call(rig, pb.Event(kind=pb.EVENT_KIND_COMPLETE), 1.5)) == [("FAILED", "DEADLINE")] * 2
