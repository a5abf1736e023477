"""The agent's session with its store and the engine's with its agent: lost, resumed, drained, gone."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_rig import INSTANCE, CallFailed, Rig, blocks, failures, outcomes, ranges, running_agent
from fake_store import FakeStore, session_files

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import store_pb2 as store
from services.gpu_agent.devices.cpu import CpuKvMemory
from services.gpu_agent.engines import instances

TEXT = list(range(40))
STORED = blocks(*range(10))
OTHER = blocks(*range(10, 22))


class EngineStream:
    """An engine's session, open until `close`."""

    def __init__(self, rig: Rig, instance_id: str = INSTANCE) -> None:
        self._beats: queue.Queue[str | None] = queue.Queue()
        self._beats.put(instance_id)
        self._stream = rig.stub.EngineSession(self._requests())
        self.boot_id = next(self._stream).boot_id

    def _requests(self) -> Iterator[pb.EngineSessionRequest]:
        while (beat := self._beats.get()) is not None:
            yield pb.EngineSessionRequest(instance_id=beat)

    def beat(self) -> bytes:
        self._beats.put("")
        return next(self._stream).boot_id

    def close(self) -> None:
        self._beats.put(None)

    def vanish(self) -> None:
        self._stream.cancel()
        self._beats.put(None)


def registered(rig: Rig) -> bool:
    return rig.ping().instance_registered


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_a_vanished_engine_is_forgotten_and_its_requests_end(rig: Rig, how: str) -> None:
    stream = EngineStream(rig)
    assert stream.boot_id == stream.beat() == rig.ping().liveness.boot_id
    rig.store(TEXT, STORED)
    rig.fake.serve_prefix(3)
    rig.lookup(TEXT)
    getattr(stream, how)()
    rig.wait_for(lambda: not registered(rig))
    rig.wait_for(lambda: len(rig.fake.named("EndRequests")) == 1)
    with pytest.raises(CallFailed, match="UNKNOWN_INSTANCE"):
        rig.lookup(TEXT)


def test_an_engine_that_is_killed_while_it_registers_leaves_no_mapping(fake: FakeStore) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def hold(_: store.RegisterModelSpaceRequest) -> None:
        asked.set()
        go_on.wait(10)

    with running_agent(fake, register=False) as rig:
        rig.wait_ready()
        stream = EngineStream(rig)
        fake.before["RegisterModelSpace"] = hold
        call = rig.stub.RegisterKvCache.future(rig.registration(), timeout=10)
        assert asked.wait(10)
        stream.vanish()
        time.sleep(0.3)
        go_on.set()
        call.exception(10)
        rig.wait_for(lambda: not registered(rig) and not mapped_twice())


def test_a_registration_whose_engine_opens_no_session_ends(fake: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_SESSION_SECONDS", 0.3)
    with running_agent(fake) as rig:
        rig.wait_for(lambda: not registered(rig) and not mapped_twice())
        rig.register()
        stream = EngineStream(rig)
        time.sleep(0.6)
        assert registered(rig)
        stream.close()
        rig.wait_for(lambda: not registered(rig))


def test_case_07_an_engine_that_is_merely_idle_stays(rig: Rig) -> None:
    rig.wait_for(lambda: len(rig.fake.named("PingStore")) >= 1)
    stream = EngineStream(rig)
    threading.Event().wait(0.5)
    assert registered(rig)
    stream.close()


def test_one_of_two_streams_may_end(rig: Rig) -> None:
    """As when an engine opens its session anew before the old one is noticed to be gone."""
    old, new = EngineStream(rig), EngineStream(rig)
    old.vanish()
    new.beat()
    threading.Event().wait(0.3)
    assert registered(rig)
    new.close()
    rig.wait_for(lambda: not registered(rig))


def test_a_stream_without_a_name_is_refused(rig: Rig) -> None:
    with pytest.raises(Exception, match="instance_id"):
        EngineStream(rig, "")


def test_a_session_is_proven_alive_before_its_hello_and_leaves_no_file(fake: FakeStore) -> None:
    with running_agent(fake) as rig:
        hello = fake.named("Session")[0]
        assert session_files(fake.directory) == [hello.session_id.hex()]
        assert hello.agent == "agent"
        assert rig.ping().epoch == 1
    assert session_files(fake.directory) == []


def test_a_restarted_store_gets_a_new_session_and_every_model_space(rig: Rig) -> None:
    rig.store(TEXT, STORED)
    rig.fake.serve_prefix(3)
    rig.lookup(TEXT)
    first = rig.fake.named("Session")[0].session_id
    rig.fake.restart()
    rig.wait_for(lambda: rig.ping().epoch == 2)
    assert len(rig.fake.spaces) == 1
    rig.wait_for(lambda: rig.fake.drained == [first])
    rig.wait_for(lambda: session_files(rig.fake.directory) == [rig.fake.named("Session")[-1].session_id.hex()])
    # Leases of the lost session are gone, and nothing is written.
    before = rig.engine.snapshot()
    assert failures(rig.retrieve(OTHER)) == [(0, 40, "SESSION_LOST")]
    assert rig.engine.snapshot() == before
    # And reuse goes on without the engine having done anything.
    rig.lookup(TEXT, "again")
    assert ranges(rig.retrieve(OTHER, "again").written) == [(0, 40)]


def test_a_session_whose_stream_alone_broke_is_resumed(rig: Rig) -> None:
    rig.store(TEXT, STORED)
    rig.fake.serve_prefix(3)
    rig.lookup(TEXT)
    rig.fake.stop()
    rig.fake.start()
    rig.wait_for(lambda: len(rig.fake.named("Session")) == 2)
    one, two = rig.fake.named("Session")
    assert one.session_id == two.session_id
    rig.wait_ready()
    assert ranges(rig.retrieve(OTHER).written) == [(0, 40)]
    assert not rig.fake.drained


def test_a_session_is_drained_only_when_its_last_copy_has_stopped(rig: Rig) -> None:
    go_on, copying = threading.Event(), threading.Event()
    answers: list[list[tuple[str, str]]] = []

    def hold(_: store.CommitRequest) -> None:
        copying.set()
        go_on.wait(10)

    rig.fake.before["Commit"] = hold
    copier = threading.Thread(target=lambda: answers.append(outcomes(rig.store(TEXT, STORED))))
    copier.start()
    copying.wait(5)
    # The store has forgotten the session while a copy of it runs.
    rig.fake.sessions.clear()
    rig.fake.errors["Lookup"] = ["UNKNOWN_SESSION"]
    rig.lookup(TEXT)
    rig.wait_for(lambda: len(rig.fake.named("Session")) == 2)
    rig.wait_ready()
    threading.Event().wait(0.4)
    assert not rig.fake.drained
    go_on.set()
    copier.join(5)
    rig.wait_for(lambda: rig.fake.drained == [rig.fake.named("Session")[0].session_id])
    assert len(answers) == 1


def test_an_end_of_copy_that_does_not_arrive_gives_the_session_up(rig: Rig) -> None:
    rig.store(TEXT, STORED)
    rig.fake.serve_prefix(3)
    rig.lookup(TEXT)
    rig.fake.errors["EndCopy"] = ["OVERLOADED"]
    assert ranges(rig.retrieve(OTHER).written) == [(0, 40)]
    rig.wait_for(lambda: rig.fake.drained == [rig.fake.named("Session")[0].session_id])
    rig.wait_ready()
    assert len({request.session_id for request in rig.fake.named("Session")}) == 2


def test_a_store_that_falls_silent_counts_as_away(fake: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gpu_agent.store.sessions._CALL_SECONDS", 0.3)
    with running_agent(fake, heartbeat_seconds=0.05) as rig:
        silent = threading.Event()
        original = FakeStore.Session

        def mute(self: FakeStore, requests: Iterator[store.SessionRequest], context: object) -> Iterator[object]:
            yield from original(self, iter([next(requests)]), context)
            silent.wait(10)

        monkeypatch.setattr(FakeStore, "Session", mute)
        fake.stop()
        fake.start()
        rig.wait_for(lambda: len(fake.named("Session")) >= 3)
        silent.set()


def test_case_62_a_copy_stops_at_its_next_layer_when_the_time_is_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(self: CpuKvMemory, group: int, pieces: object, rope: object, watch: Callable[[], None]) -> None:
        while True:
            watch()
            threading.Event().wait(0.01)

    rig.store(TEXT, STORED)
    rig.fake.serve_prefix(3)
    rig.lookup(TEXT)
    monkeypatch.setattr(CpuKvMemory, "scatter", endless)
    try:
        told = {reason for *_, reason in failures(rig.retrieve(OTHER, timeout=0.3))}
    except CallFailed as error:
        # A busy machine's answer may come too late for what is kept back.
        told = {str(error).split("_")[0]}
    assert told == {"DEADLINE"}
    rig.wait_for(lambda: len(rig.fake.named("EndCopy")) == 1)


def test_a_vanished_engine_s_copy_stops_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    copying = threading.Event()

    def endless(self: CpuKvMemory, group: int, pieces: object, watch: Callable[[], None]) -> None:
        copying.set()
        while True:
            watch()
            threading.Event().wait(0.01)

    monkeypatch.setattr(CpuKvMemory, "gather", endless)
    stream = EngineStream(rig)
    answers: list[list[tuple[str, str]]] = []
    copier = threading.Thread(target=lambda: answers.append(outcomes(rig.store(TEXT, STORED))))
    copier.start()
    copying.wait(5)
    stream.vanish()
    copier.join(5)
    assert answers == [[("FAILED", "SESSION_LOST")] * 3]
    assert len(rig.fake.named("Abort")) == 1
    rig.wait_for(lambda: not registered(rig))


def test_unregistering_waits_for_a_transfer(rig: Rig) -> None:
    go_on, committing = threading.Event(), threading.Event()

    def hold(_: store.CommitRequest) -> None:
        committing.set()
        go_on.wait(10)

    rig.fake.before["Commit"] = hold
    copier = threading.Thread(target=lambda: rig.store(TEXT, STORED))
    copier.start()
    committing.wait(5)
    request = pb.UnregisterKvCacheRequest(instance_id=INSTANCE)
    with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
        rig.call("UnregisterKvCache", request, timeout=0.3)
    assert not registered(rig)
    assert rig.engine.buffers[0].name in mapped_twice()
    go_on.set()
    copier.join(5)
    rig.wait_for(lambda: not mapped_twice())


def mapped_twice() -> set[str]:
    """Engine memory that this process has mapped as the engine and as the agent."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = [Path(line.split(maxsplit=5)[5]).name for line in lines if "/dev/shm/kvblend-" in line]
    return {name for name in names if names.count(name) > 1}
