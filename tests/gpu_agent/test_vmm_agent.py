"""An engine whose KV is shared by descriptors, from its client to its agent; a fake GPU does the copies."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from agent_rig import CHUNK, INSTANCE, ROPE, SHAPE, CallFailed, Rig, blocks, running_agent, slots_of
from engine_memory import model_space
from fake_gpu import FakeDevice
from fake_store import FakeStore
from memfd_memory import GPU, MemfdDriver, MemfdMemory, open_files

from kvblend.client import KvblendClient
from kvblend.descriptors import sent
from kvblend.layouts import buffer_bytes, build_layout
from kvblend.v1 import agent_pb2 as pb
from services.gpu_agent.devices.cuda.ipc import OpenedHandles
from services.gpu_agent.devices.cuda.memory import CudaKvMemory
from services.gpu_agent.engines.descriptors import Descriptors
from services.gpu_agent.engines.layouts import Layout

ENGINE = Path(__file__).with_name("memfd_engine.py")
ARRANGEMENT = "paged_nhd"
SPACE = model_space(SHAPE, ROPE, CHUNK)
LAYOUT = build_layout(ARRANGEMENT, SHAPE)
TEXT = list(range(100, 148))
STORED, OTHER = blocks(*range(0, 24, 2)), blocks(*range(23, 0, -2))
PAGE, OFFSET = 4096, 512


class MemfdDevice(FakeDevice):
    """A fake GPU that maps engines' chunks as the cuda device does."""

    name = "cuda"

    def __init__(self) -> None:
        super().__init__(seed=1, slot_bytes=1 << 16)
        self.driver = MemfdDriver()

    def open(
        self,
        handles: Sequence[pb.DeviceHandle],
        layout: Layout,
        semaphores: pb.DeviceHandle | None = None,
        descriptors: Descriptors | None = None,
    ) -> CudaKvMemory:
        fake: Any = self.driver
        opened = OpenedHandles(fake, GPU, handles, semaphores, descriptors or {})
        self.gpu.engine_memory = [
            (start, start + handle.bytes) for start, handle in zip(opened.starts, handles, strict=True)
        ]
        return self.kv_memory(opened, layout)

    def adopt(self, memory: Any) -> None:
        pass

    release = adopt


@contextmanager
def running(fake: FakeStore) -> Iterator[tuple[Rig, MemfdDriver]]:
    """An agent, and what it has mapped."""
    device = MemfdDevice()
    with mock.patch("services.gpu_agent.server.make_device", return_value=device):
        with running_agent(fake, register=False, device="cuda") as rig:
            rig.wait_ready()
            yield rig, device.driver


class Engine:
    def __init__(self, stack: ExitStack, target: str) -> None:
        self.buffers = [MemfdMemory([PAGE, PAGE], OFFSET, size) for size in buffer_bytes(ARRANGEMENT, SHAPE)]
        for number, buffer in enumerate(self.buffers):
            stack.callback(buffer.close)
            buffer.write(np.random.default_rng(number).random(2 * PAGE // 4, np.float32).tobytes())
        self.client = KvblendClient(target, INSTANCE)
        stack.callback(self.client.close)

    def register(self) -> str:
        result = self.client.register_kv_cache(SPACE, self.buffers, LAYOUT)
        return f"{result.reason} {result.detail}".strip()

    def read(self, table: pb.SlotMap) -> np.ndarray[Any, np.dtype[np.float32]]:
        """[buffers, tokens, heads, size]"""
        slots = slots_of(table, range(len(TEXT)))
        dims = (SHAPE.blocks * SHAPE.block_tokens, SHAPE.heads, SHAPE.head_size)
        whole = [np.frombuffer(buffer.read()[OFFSET:][: buffer.nbytes], "<f4") for buffer in self.buffers]
        return np.stack([one.reshape(dims)[slots] for one in whole])

    def round_trip(self, fake: FakeStore, request_id: str) -> None:
        wanted = self.read(STORED)
        assert self.client.store(TEXT, request_id, block_ids=ids(STORED))
        fake.serve_prefix(len(TEXT) // CHUNK)
        assert self.client.lookup([*TEXT, 1], request_id).prefix_tokens == len(TEXT)
        outside = [buffer.read()[:OFFSET] for buffer in self.buffers]
        answer = self.client.retrieve(request_id, block_ids=ids(OTHER))
        assert answer.written == ((0, len(TEXT)),)
        assert (self.read(OTHER) == wanted).all()
        assert [buffer.read()[:OFFSET] for buffer in self.buffers] == outside


def ids(table: pb.SlotMap) -> list[int]:
    return np.frombuffer(table.block_ids, "<u4").tolist()


@pytest.fixture
def agent(fake: FakeStore) -> Iterator[tuple[Rig, MemfdDriver]]:
    with running(fake) as started:
        yield started


@pytest.fixture
def engine(agent: tuple[Rig, MemfdDriver], fake: FakeStore) -> Iterator[Engine]:
    with ExitStack() as stack:
        yield Engine(stack, f"unix:{fake.directory}/agent.sock")


def test_kv_goes_round_through_chunks(agent: tuple[Rig, MemfdDriver], engine: Engine, fake: FakeStore) -> None:
    _, driver = agent
    assert engine.register() == ""
    assert len(driver.mapped) == 2 * len(engine.buffers)
    engine.round_trip(fake, "r1")
    assert engine.client.unregister_kv_cache()
    assert (driver.mapped, driver.reserved) == ({}, {})


def test_registering_again_sends_again_and_unmaps_what_was(
    agent: tuple[Rig, MemfdDriver], engine: Engine, fake: FakeStore
) -> None:
    rig, driver = agent
    assert engine.register() == ""
    before = open_files()
    for _ in range(10):
        assert engine.register() == ""
        assert len(driver.mapped) == 2 * len(engine.buffers)
    # As many as one registration's are sent, and the connections are few.
    rig.wait_for(lambda: open_files() <= before)
    engine.round_trip(fake, "r1")


def test_an_agent_that_comes_back_gets_the_descriptors_by_itself(fake: FakeStore) -> None:
    with ExitStack() as stack:
        with running(fake) as (rig, _):
            engine = Engine(stack, f"unix:{fake.directory}/agent.sock")
            assert engine.register() == ""
        with running(fake) as (rig, driver):
            rig.wait_for(lambda: rig.ping().instance_registered)
            engine.round_trip(fake, "r1")
            assert len(driver.mapped) == 2 * len(engine.buffers)


def test_semaphores_may_be_such_memory(agent: tuple[Rig, MemfdDriver], engine: Engine, fake: FakeStore) -> None:
    with closing(MemfdMemory([PAGE], 64, 64)) as words:
        assert engine.client.register_kv_cache(SPACE, engine.buffers, LAYOUT, semaphores=words)
        assert engine.client.store(TEXT, "r1", block_ids=ids(STORED))
        fake.serve_prefix(len(TEXT) // CHUNK)
        assert engine.client.lookup([*TEXT, 1], "r1").prefix_tokens == len(TEXT)
        steps = pb.LayerSteps(count=2, first=3, value=9)
        assert engine.client.retrieve("r1", block_ids=ids(OTHER), steps=steps)
        assert np.frombuffer(words.read(), "<u8").tolist()[8:16] == [0, 0, 0, 9, 9, 0, 0, 0]


@pytest.mark.parametrize("way", ["killed", "closed"])
def test_the_memory_of_an_engine_that_is_gone_is_let_go(
    agent: tuple[Rig, MemfdDriver], engine: Engine, fake: FakeStore, way: str
) -> None:
    """So that it is free: nothing else holds it."""
    rig, driver = agent
    if way == "closed":
        assert engine.register() == ""
        engine.client.close()
    else:
        target = f"unix:{fake.directory}/agent.sock"
        command = [sys.executable, str(ENGINE), target]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
            assert peer.stdout is not None
            assert peer.stdout.readline().strip() == "registered"
            assert driver.mapped
            peer.kill()
    rig.wait_for(lambda: (driver.mapped, driver.reserved) == ({}, {}))


def refused(rig: Rig, handles: list[pb.DeviceHandle], instance_id: str = INSTANCE) -> str:
    with pytest.raises(CallFailed) as caught:
        rig.register(handles=handles, layout=LAYOUT, instance_id=instance_id)
    return str(caught.value)


def test_a_slot_serves_one_registration_of_its_instance(
    agent: tuple[Rig, MemfdDriver], engine: Engine, fake: FakeStore
) -> None:
    rig, driver = agent
    with sent(f"unix:{fake.directory}/agent.sock", INSTANCE, engine.buffers, 10) as handles:
        assert "are not here" in refused(rig, handles, "somebody-else")
        guessed = [engine.buffers[0].handle(bytes(16)), *handles[1:]]
        rig.register(handles=handles, layout=LAYOUT)
        assert "are not here" in refused(rig, handles)
        assert "are not here" in refused(rig, guessed)
        assert len(driver.mapped) == 2 * len(engine.buffers)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda memory: setattr(memory, "chunk_bytes", [PAGE, 2 * PAGE]), "cuMemMap"),
        (lambda memory: setattr(memory, "nbytes", 2 * PAGE), "HANDLE_OUT_OF_BOUNDS"),
    ],
)
def test_a_lying_engine_is_refused_and_nothing_stays(
    agent: tuple[Rig, MemfdDriver], engine: Engine, lie: Callable[[MemfdMemory], None], words: str
) -> None:
    _, driver = agent
    lie(engine.buffers[2])
    assert words in engine.register()
    assert (driver.mapped, driver.reserved) == ({}, {})


def test_an_engine_that_cannot_send_is_not_cached_and_told_why(fake: FakeStore) -> None:
    with ExitStack() as stack:
        nobody = Engine(stack, f"unix:{fake.directory}/nobody.sock")
        assert nobody.register().startswith("AGENT_UNAVAILABLE")
        over_tcp = Engine(stack, "127.0.0.1:1")
        assert "unix:/path" in over_tcp.register()
        assert over_tcp.client.failures["HANDLE_UNUSABLE"] == 1
