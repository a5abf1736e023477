"""Layer by layer: an engine that waits for a step's semaphore finds the step's layers, and never waits in vain."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from agent_rig import INSTANCE, CallFailed, Rig, blocks, failures, ranges, slots_of
from engine_memory import EngineMemory, make_rope, model_space, same_bits
from fake_gpu import FakeDevice, FakeGpu, FakeStream
from hypothesis import given
from hypothesis import strategies as st

from kvblend.layouts import KvShape
from kvblend.memory import SharedBuffer
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.checksums import checksum_of
from services.gpu_agent.devices.base import Hung, Piece, Steps, Stopped, Transfer
from services.gpu_agent.devices.cpu import CpuDevice, CpuKvMemory
from services.gpu_agent.devices.cuda import memory
from services.gpu_agent.engines.layouts import check_layout
from services.gpu_agent.engines.rope import rope_spec

SEEDS = count()
SHAPE = KvShape(5, 2, 8, 16, 4, common.DTYPE_FLOAT32)
ROPE = make_rope(common.ROPE_STYLE_NEOX, 8)
VALUE = 7
TEXT = list(range(100, 140))
STORED, OTHER = blocks(*range(10)), blocks(*range(12, 22))


@given(st.integers(1, 100), st.integers(1, 100))
def test_every_layer_belongs_to_one_step(layers: int, steps: int) -> None:
    split = [layer for step in range(steps) for layer in Steps(steps, 0, 1).layers(step, layers)]
    assert split == list(range(layers))
    assert all(layer in Steps(steps, 0, 1).layers(layer * steps // layers, layers) for layer in range(layers))


class Retrieve:
    """Two objects for 24 and 16 tokens of an engine's memory, whole and moved, partly and not."""

    def __init__(self, device: Any) -> None:
        self.engine = EngineMemory("paged_nhd", SHAPE, next(SEEDS))
        self.buffer = SharedBuffer(8 * 12)
        self.semaphores = self.buffer.array.view(np.uint64)
        layout = check_layout(self.engine.layout, self.engine.handles, model_space(SHAPE, ROPE), common.Rank())
        self.memory = device.open(self.engine.handles, layout, self.buffer.handle())
        dice = np.random.default_rng(next(SEEDS))
        slots = dice.permutation(64).astype(np.int64)
        objects = [
            dice.standard_normal(tokens * layout.groups[0].token_bytes // 4).astype("<f4").view(np.uint8)
            for tokens in (24, 20)
        ]
        pieces = [Piece(objects[0], 24, 0, slots[:24], 9, True), Piece(objects[1], 20, 3, slots[24:40])]
        self.transfer = Transfer(0, pieces, rope_spec(ROPE))
        self.slots = slots[:40].tolist()
        # What one retrieve of everything leaves.
        old = self.engine.read(self.slots)
        self.memory.scatter(0, pieces, self.transfer.rope, lambda: None)
        self.wanted = self.engine.read(self.slots)
        self.engine.write(self.slots, old)
        # So many steps had come at the last look.
        self._looked_at = 0

    def run(self, steps: Steps, watch: Callable[[], None] = lambda: None) -> Any:
        return self.memory.scatter_in_steps([self.transfer], steps, watch)

    def check_arrived(self, steps: Steps) -> None:
        """Steps come in order, and the layers of those that have are what they must be."""
        done = self.semaphores[steps.first : steps.first + steps.count] == VALUE
        arrived = int(done.sum())
        assert done[:arrived].all(), "steps are out of order"
        if arrived == self._looked_at:
            return
        self._looked_at = arrived
        layers = [layer for step in range(arrived) for layer in steps.layers(step, SHAPE.layers)]
        assert same_bits(self.engine.read(self.slots)[layers], self.wanted[layers]), "a layer is not there yet"

    def close(self) -> None:
        self.memory.close()
        self.engine.close()
        self.semaphores = np.empty(0, np.uint64)
        self.buffer.close()


def check_steps(device: Any, steps: Steps) -> None:
    with closing(Retrieve(device)) as retrieve:
        right = FakeGpu.set_value

        def look_and_set(self: FakeGpu, address: int, value: int) -> None:
            right(self, address, value)
            retrieve.check_arrived(steps)

        with mock.patch.object(FakeGpu, "set_value", look_and_set):
            ((whole, part),) = retrieve.run(steps, lambda: retrieve.check_arrived(steps))
        assert same_bits(retrieve.engine.read(retrieve.slots), retrieve.wanted)
        expected = np.zeros(12, np.uint64)
        expected[steps.first : steps.first + steps.count] = VALUE
        assert retrieve.semaphores.tolist() == expected.tolist()
        assert whole in (None, checksum_of(retrieve.transfer.pieces[0].block.data))
        assert part is None


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9])
def test_a_step_s_layers_are_there_when_its_semaphore_is_set(steps: int) -> None:
    check_steps(CpuDevice(Path("/dev/shm"), 1), Steps(steps, 3, VALUE))
    for slot_bytes in (64, 1024, 1 << 16):
        check_steps(FakeDevice(next(SEEDS), slot_bytes), Steps(steps, 3, VALUE))


def check_often(steps: Steps) -> None:
    for _ in range(20):
        check_steps(FakeDevice(next(SEEDS), 1024), steps)


def at_once(self: FakeGpu, address: int, value: int, stream: FakeStream) -> None:
    self.set_value(address, value)


def on_another_stream(self: FakeGpu, address: int, value: int, stream: FakeStream) -> None:
    self._later(self.signals, lambda: self.set_value(address, value))


@pytest.mark.parametrize("broken", [at_once, on_another_stream])
def test_a_signal_that_does_not_wait_is_noticed(broken: Callable[..., None]) -> None:
    with mock.patch.object(FakeGpu, "signal", broken), pytest.raises(AssertionError):
        check_often(Steps(3, 0, VALUE))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_semaphores_can_be_set_without_a_copy(device: str) -> None:
    made = CpuDevice(Path("/dev/shm"), 1) if device == "cpu" else FakeDevice(next(SEEDS), 1024)
    with closing(Retrieve(made)) as retrieve:
        before = retrieve.engine.snapshot()
        retrieve.memory.set_semaphores(Steps(4, 2, VALUE))
        assert retrieve.semaphores.tolist() == [0, 0, VALUE, VALUE, VALUE, VALUE, 0, 0, 0, 0, 0, 0]
        assert retrieve.engine.snapshot() == before


def test_stopped_steps_leave_no_signal_in_flight() -> None:
    """A semaphore that is set later would be written into memory that is unmapped by then, or somebody else's."""
    for patience in range(0, 60, 2):
        device = FakeDevice(next(SEEDS), 1024)
        with closing(Retrieve(device)) as retrieve:
            looks = iter(range(patience))

            def watch(looks: Iterator[int] = looks) -> None:
                if next(looks, None) is None:
                    raise Stopped(common.REASON_DEADLINE)

            with suppress(Stopped):
                retrieve.run(Steps(5, 0, VALUE), watch)
            assert not device.gpu.in_flight


def test_semaphores_that_a_gpu_does_not_set_keep_their_memory_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SIGNAL_SECONDS", 0.05)
    device = FakeDevice(next(SEEDS), 1024)
    with closing(Retrieve(device)) as retrieve:
        device.gpu.stuck = True
        with pytest.raises(Hung) as caught:
            retrieve.memory.set_semaphores(Steps(4, 2, VALUE))
        given_back = threading.Event()
        with ExitStack() as held:
            held.callback(given_back.set)
            caught.value.keep(held)
        assert not given_back.wait(0.05)
        device.gpu.stuck = False
        assert given_back.wait(10)
        assert retrieve.semaphores.tolist() == [0, 0, VALUE, VALUE, VALUE, VALUE, 0, 0, 0, 0, 0, 0]


# Through the agent's calls


@pytest.fixture
def semaphores(rig: Rig) -> Iterator[np.ndarray]:
    """Registered, with a text that the store has."""
    with ExitStack() as stack:
        buffer = stack.enter_context(SharedBuffer(8 * 6))
        rig.register(semaphores=buffer.handle())
        rig.prove_rope()
        rig.store(TEXT, STORED)
        rig.fake.serve_prefix(3)
        rig.lookup([*TEXT, 1])
        yield buffer.array.view(np.uint64)


def test_a_retrieve_in_steps(rig: Rig, semaphores: np.ndarray) -> None:
    """Nothing is copied before the store has agreed."""
    original = rig.engine.read(slots_of(STORED, range(40)))
    asked: list[tuple[bool, list[int]]] = []
    before = rig.engine.snapshot()
    rig.fake.before["BeginCopy"] = lambda _: asked.append((rig.engine.snapshot() == before, semaphores.tolist()))
    response = rig.retrieve(OTHER, steps=pb.LayerSteps(count=2, first=1, value=5))
    assert ranges(response.written) == [(0, 40)]
    assert asked == [(True, [0] * 6)]
    assert semaphores.tolist() == [0, 5, 5, 0, 0, 0]
    assert same_bits(rig.engine.read(slots_of(OTHER, range(40))), original)


def test_an_engine_does_not_wait_for_what_failed(rig: Rig, semaphores: np.ndarray) -> None:
    rig.fake.begin_reasons = [common.REASON_EVICTED] * 3
    response = rig.retrieve(OTHER, steps=pb.LayerSteps(count=6, value=1))
    assert failures(response) == [(0, 40, "EVICTED")]
    assert semaphores.tolist() == [1] * 6


def test_an_engine_does_not_wait_for_a_store_that_is_away(rig: Rig, semaphores: np.ndarray) -> None:
    rig.fake.stop()
    response = rig.retrieve(OTHER, steps=pb.LayerSteps(count=6, value=1))
    assert not response.written
    assert semaphores.tolist() == [1] * 6


def test_an_engine_is_answered_though_its_semaphores_are_late_and_its_memory_stays_mapped(
    rig: Rig, semaphores: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()

    def hang(*_: Any) -> None:
        raise Hung(lambda: end.wait(30) and None)

    rig.fake.begin_reasons = [common.REASON_EVICTED] * 3
    with monkeypatch.context() as patch:
        patch.setattr(CpuKvMemory, "set_semaphores", hang)
        response = rig.retrieve(OTHER, steps=pb.LayerSteps(count=6, value=1))
    assert failures(response) == [(0, 40, "EVICTED")]
    with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
        rig.call("UnregisterKvCache", pb.UnregisterKvCacheRequest(instance_id=INSTANCE), timeout=0.5)
    end.set()


def test_corrupt_bytes_are_told_in_the_answer(rig: Rig, semaphores: np.ndarray) -> None:
    rig.fake.objects[2].verify = True
    rig.fake.payload(rig.fake.objects[2])[5] ^= 1
    rig.lookup([*TEXT, 1], "again")
    response = rig.retrieve(OTHER, "again", steps=pb.LayerSteps(count=2, value=1))
    assert failures(response) == [(32, 40, "CHECKSUM_MISMATCH")]
    assert semaphores.tolist() == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("steps", [pb.LayerSteps(count=7, value=1), pb.LayerSteps(count=1, first=6, value=1)])
def test_semaphores_that_there_are_not_are_refused(rig: Rig, semaphores: np.ndarray, steps: pb.LayerSteps) -> None:
    before = rig.engine.snapshot()
    with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
        rig.retrieve(OTHER, steps=steps)
    assert rig.engine.snapshot() == before
    assert semaphores.tolist() == [0] * 6


def test_semaphores_at_odd_places_are_refused(rig: Rig) -> None:
    with SharedBuffer(64) as buffer:
        handle = buffer.handle()
        handle.allocation_offset, handle.bytes = 4, 32
        with pytest.raises(CallFailed, match="HANDLE_UNUSABLE"):
            rig.register(semaphores=handle)


def test_steps_without_semaphores_are_refused(rig: Rig) -> None:
    rig.store(TEXT, STORED)
    rig.fake.serve_prefix(3)
    rig.lookup([*TEXT, 1])
    with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
        rig.retrieve(OTHER, steps=pb.LayerSteps(count=1, value=1))
