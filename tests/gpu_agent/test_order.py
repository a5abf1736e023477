"""A call waits for the engine's semaphore before it touches KV, and for nothing longer than it must."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from agent_rig import INSTANCE, CallFailed, Rig, blocks, outcomes, ranges, slots_of
from engine_memory import EngineMemory
from test_agent_sessions import EngineStream

from kvblend.memory import SharedBuffer
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.checksums import checksum_of
from services.gpu_agent.copying import retrieve, storing
from services.gpu_agent.devices.cpu import CpuKvMemory
from services.gpu_agent.engines import prove

TEXT = list(range(100, 140))
STORED, OTHER = blocks(*range(10)), blocks(*range(12, 22))
WORDS = 6
# Longer than any of these calls may take.
LONG = 30.0


class Words:
    """The semaphores of the registered engine, in memory that it shares."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self.handle = buffer.handle()
        self.buffer = buffer

    def __setitem__(self, index: int, value: int) -> None:
        self.buffer.array.view(np.uint64)[index] = value


@pytest.fixture
def words(rig: Rig) -> Iterator[Words]:
    """Registered; the store has TEXT already, and a lookup found it."""
    with ExitStack() as stack:
        words = Words(stack.enter_context(SharedBuffer(8 * WORDS)))
        rig.register(semaphores=words.handle)
        rig.prove_rope()
        rig.store(TEXT, STORED)
        rig.fake.serve_prefix(3)
        rig.lookup([*TEXT, 1])
        yield words


def semaphore(value: int = 5, index: int = 2) -> pb.Event:
    return pb.Event(kind=pb.EVENT_KIND_SEMAPHORE, semaphore=index, value=value)


class Later:
    """A call that somebody else waits for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.answer: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._call()
        except Exception as error:
            self.error = error

    def waits(self, seconds: float = 0.2) -> bool:
        self._thread.join(seconds)
        return self._thread.is_alive()

    def result(self) -> Any:
        assert not self.waits(10), "the call does not end"
        if self.error is not None:
            raise self.error
        return self.answer


def store_call(rig: Rig, event: pb.Event, timeout: float = LONG) -> Any:
    request = pb.StoreKvRequest(
        instance_id=INSTANCE,
        request=common.RequestKey(request_id="later"),
        kind=1,
        tokens=np.arange(900, 932, dtype="<u4").tobytes(),
        slots=OTHER,
        event=event,
    )
    return rig.call("StoreKv", request, timeout)


def retrieve_call(rig: Rig, event: pb.Event, timeout: float = LONG) -> Any:
    return rig.retrieve(OTHER, event=event, timeout=timeout)


def prove_call(rig: Rig, event: pb.Event, timeout: float = LONG) -> Any:
    """Of a pattern that all slots have once the engine has written 2 everywhere."""
    pattern = np.full(2 * 2 * 8 * 2 * 8, 2.0, "<f4")
    expected = np.array([checksum_of(pattern.tobytes())], "<u8").tobytes()
    request = pb.ProveLayoutRequest(
        instance_id=INSTANCE, slots=OTHER, tokens=8, event=event, expected_checksums=expected
    )
    return rig.call("ProveLayout", request, timeout)


CALLS = {"store": store_call, "retrieve": retrieve_call, "prove": prove_call}


def fill(engine: EngineMemory, value: float) -> None:
    for tensor in engine._tensors():
        tensor.fill_(value)


def check_order(rig: Rig, words: Words, verb: str) -> None:
    """The engine writes 2 everywhere after the call was made, and sets its semaphore behind that."""
    commits = len(rig.fake.objects)
    fill(rig.engine, 1.0)
    later = Later(lambda: CALLS[verb](rig, semaphore()))
    words[2] = 4
    words[3] = 100
    waited = later.waits()
    fill(rig.engine, 2.0)
    words[2] = 5
    answer = later.result()
    match verb:
        case "store":
            assert outcomes(answer) == [("STORED", "UNSPECIFIED")] * 2
            stored = [rig.fake.payload(item).view("<f4") for item in rig.fake.objects[commits:]]
            assert all((payload == 2.0).all() for payload in stored), "bytes of before the event were stored"
        case "retrieve":
            assert ranges(answer.written) == [(0, 40)]
            assert not (rig.engine.read(slots_of(OTHER, range(40))) == 2.0).any(), "it wrote before the event"
        case "prove":
            assert answer.proven, "it read before the event"
    assert waited


@pytest.mark.parametrize("verb", CALLS)
def test_case_19_a_call_waits_for_the_engine_s_semaphore(rig: Rig, words: Words, verb: str) -> None:
    check_order(rig, words, verb)


@pytest.mark.parametrize("verb", CALLS)
def test_a_call_that_does_not_wait_is_noticed(
    rig: Rig, words: Words, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (storing, retrieve, prove):
        monkeypatch.setattr(module, "wait_for_engine", lambda *_: None)
    with pytest.raises(AssertionError, match="before the event"):
        check_order(rig, words, verb)


def test_a_semaphore_that_is_further_already_is_not_waited_for(rig: Rig, words: Words) -> None:
    words[5] = 2**64 - 1
    for value in (1, 2**63, 2**64 - 1):
        rig.lookup([*TEXT, 1], f"r{value}")
        assert ranges(rig.retrieve(OTHER, f"r{value}", event=semaphore(value, 5)).written) == [(0, 40)]


@pytest.mark.parametrize("verb", CALLS)
def test_case_62_a_semaphore_that_never_comes_ends_at_the_deadline_and_leaves_nothing(
    rig: Rig, words: Words, verb: str
) -> None:
    reserved, copies = len(rig.fake.named("Reserve")), len(rig.fake.named("BeginCopy"))
    before = rig.engine.snapshot()
    later = Later(lambda: CALLS[verb](rig, semaphore(), 1.5))
    # Meanwhile others are served.
    rig.register(instance_id="other")
    rig.lookup([*TEXT, 1], "r", instance_id="other")
    other = rig.retrieve(STORED, "r", instance_id="other", event=pb.Event())
    assert ranges(other.written) == [(0, 40)]
    assert later.waits(0)
    with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
        later.result()
    assert rig.engine.snapshot() == before
    assert len(rig.fake.named("Reserve")) == reserved
    assert len(rig.fake.named("BeginCopy")) == copies + 1
    if verb == "retrieve":
        rig.wait_for(lambda: any(_of_r(call) for call in rig.fake.named("ReleaseLeases")))
    # Nothing waits any more: what is written now, nobody reads.
    words[2] = 5
    threading.Event().wait(0.1)
    assert rig.engine.snapshot() == before
    unregister(rig)


def _of_r(call: Any) -> bool:
    return bool(call.request.request_id == f"{INSTANCE}/r" and len(call.objects) == 3)


def unregister(rig: Rig) -> None:
    assert rig.call("UnregisterKvCache", pb.UnregisterKvCacheRequest(instance_id=INSTANCE)).existed


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_a_request_that_ends_is_not_waited_for(rig: Rig, words: Words, verb: str) -> None:
    later = Later(lambda: CALLS[verb](rig, semaphore()))
    assert later.waits()
    rig.end("later" if verb == "store" else "r")
    with pytest.raises(CallFailed, match="SUPERSEDED"):
        later.result()


@pytest.mark.parametrize("verb", CALLS)
def test_an_engine_that_unregisters_need_not_wait_for_its_calls(rig: Rig, words: Words, verb: str) -> None:
    later = Later(lambda: CALLS[verb](rig, semaphore()))
    assert later.waits()
    unregister(rig)
    with pytest.raises(CallFailed, match=r"UNKNOWN_INSTANCE|SUPERSEDED"):
        later.result()


def test_a_new_registration_ends_what_waits_for_the_old_one(rig: Rig, words: Words) -> None:
    """Its semaphores are others."""
    later = Later(lambda: store_call(rig, semaphore()))
    assert later.waits()
    rig.register()
    with pytest.raises(CallFailed, match="UNKNOWN_INSTANCE"):
        later.result()


@pytest.mark.parametrize("verb", CALLS)
def test_an_engine_that_vanishes_is_not_waited_for(rig: Rig, words: Words, verb: str) -> None:
    stream = EngineStream(rig)
    later = Later(lambda: CALLS[verb](rig, semaphore()))
    assert later.waits()
    stream.vanish()
    with pytest.raises(CallFailed, match="UNKNOWN_INSTANCE"):
        later.result()


def test_semaphores_that_the_engine_takes_back_are_not_looked_at(rig: Rig, words: Words) -> None:
    later = Later(lambda: store_call(rig, semaphore()))
    assert later.waits()
    with open(f"/dev/shm/{words.buffer.name}", "r+b") as file:
        file.truncate(0)
    with pytest.raises(CallFailed, match="HANDLE_UNUSABLE"):
        later.result()


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize(
    "event",
    [
        semaphore(1, WORDS),
        semaphore(1, 2**32 - 1),
        semaphore(0),
        pb.Event(semaphore=2, value=5),
        pb.Event(handle=b"h" * 64),
    ],
)
def test_semaphores_that_there_are_not_are_refused(rig: Rig, words: Words, verb: str, event: pb.Event) -> None:
    """A value of 0 would be there from the beginning: nobody means that. Nor an event that says not what it is."""
    before = rig.engine.snapshot()
    with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
        CALLS[verb](rig, event)
    assert rig.engine.snapshot() == before


@pytest.mark.parametrize("verb", ["store", "prove"])
def test_an_engine_without_semaphores_is_told_so(rig: Rig, verb: str) -> None:
    with pytest.raises(CallFailed, match=r"INVALID_ARGUMENT.*semaphore 0 of 0"):
        CALLS[verb](rig, semaphore(1, 0))


@pytest.mark.parametrize("kind", [pb.EVENT_KIND_CUDA_IPC, 99])
def test_an_event_of_a_kind_that_this_device_lacks_is_refused(rig: Rig, kind: Any) -> None:
    """Also of a kind that only a newer engine knows."""
    rig.register()
    with pytest.raises(CallFailed, match="HANDLE_UNUSABLE"):
        store_call(rig, pb.Event(kind=kind))


def test_a_semaphore_is_read_in_mapped_memory_only(rig: Rig, words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often registrations come and go meanwhile."""
    looks: list[bool] = []
    right = CpuKvMemory.semaphore

    def look(self: CpuKvMemory, index: int, watch: Callable[[], None]) -> int:
        looks.append(bool(self._files))
        return right(self, index, watch)

    monkeypatch.setattr(CpuKvMemory, "semaphore", look)
    for _ in range(10):
        seen = len(looks)
        later = Later(lambda: store_call(rig, semaphore()))
        rig.wait_for(lambda seen=seen: len(looks) > seen)
        rig.register(semaphores=words.handle)
        with pytest.raises(CallFailed, match="UNKNOWN_INSTANCE"):
            later.result()
    assert all(looks)
