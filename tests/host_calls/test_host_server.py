"""What the service's end does with callers of any kind; whatever they do, nothing of them stays."""

import errno
import os
import random
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from host_service import SECONDS, Service, eventually, host_alone, serving, stream, unary
from host_wire import RawCaller, call_frame, old_service
from test_host_channel import open_channel, outcome

from kvblend.host_calls.frames import SUFFIX
from kvblend.v1 import host_calls_pb2 as pb
from services.common.host_calls.context import HostContext
from services.common.host_calls.server import HostCallServer
from services.common.server import GrpcServer

Code = grpc.StatusCode


def threads_and_files() -> tuple[int, int]:
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def path(shm_dir: Path) -> Path:
    return shm_dir / "s"


@pytest.fixture
def served(path: Path) -> Iterator[tuple[Service, GrpcServer]]:
    """A service of which no thread and no descriptor stays at the end of a test."""
    with serving(path) as (service, server), host_alone(path) as channel:
        assert outcome(unary(channel, "echo"), b"first") == b"first"
        channel.close()
        (host,) = server._host_servers
        eventually(lambda: not host._callers)
        before = threads_and_files()
        yield service, server
        service.release.set()
        eventually(lambda: not host._callers)
        eventually(lambda: all(now <= then for now, then in zip(threads_and_files(), before, strict=True)))
        assert not host.watch._watched
        assert host.turns._free._value == 16


@pytest.fixture
def service(served: tuple[Service, GrpcServer]) -> Service:
    return served[0]


@pytest.fixture
def raw(served: Any, path: Path) -> Iterator[RawCaller]:
    with closing(RawCaller(path)) as caller:
        yield caller


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 8,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x02\0\0\0\0\0\0\0\xff\xff",
        # A call's metadata that are no text.
        b"\x08\0\0\0\0\0\0\0\x1a\x06\x0a\x01k\x12\x01\xff",
    ],
)
def test_garbage_ends_the_connection_alone(service: Service, raw: RawCaller, path: Path, garbage: bytes) -> None:
    raw.socket.sendall(garbage)
    assert raw.ends()
    with host_alone(path) as channel:
        assert outcome(unary(channel, "echo"), b"other") == b"other"


def test_half_a_request_is_none(service: Service, path: Path) -> None:
    frame = call_frame("echo", b"half")
    for size in range(len(frame)):
        with closing(RawCaller(path)) as raw:
            raw.socket.sendall(frame[:size])
            if size % 2:
                raw.socket.shutdown(socket.SHUT_WR)
                assert raw.ends()
    assert service.begun == {"first": 1}


def test_a_call_without_a_method_or_a_deadline_is_answered(raw: RawCaller) -> None:
    raw.socket.sendall(bytes(8))
    assert raw.receive()[0].code == Code.UNIMPLEMENTED.value[0]
    raw.send("echo", b"", timeout=0)
    assert {item.key: item.value for item in raw.receive()[0].trailing_metadata}["kvblend-reason"] == (
        b"DEADLINE_REQUIRED"
    )
    raw.send("echo", b"after")
    assert raw.receive() == (pb.HostAnswer(), b"after")


def check_no_answer_after_the_callbacks(service: Service, raw: RawCaller) -> None:
    """The caller is stopped, say: it has not ended its call when its time is over."""
    raw.send("wait", b"late", timeout=0.1)
    eventually(lambda: service.called_back["late"])
    service.release.set()
    assert raw.ends()
    eventually(lambda: service.active)
    assert (service.called_back, service.active) == ({"late": 1}, {"late": False})


def test_no_answer_leaves_after_the_callbacks(service: Service, raw: RawCaller) -> None:
    """They take back what the answer would promise."""
    check_no_answer_after_the_callbacks(service, raw)


def test_a_service_that_answers_after_the_callbacks_is_found_out(
    service: Service, raw: RawCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostContext, "cancel", HostContext.end)
    with pytest.raises(AssertionError):
        check_no_answer_after_the_callbacks(service, raw)


def test_a_callback_after_the_end_is_not_taken(service: Service, raw: RawCaller, monkeypatch: Any) -> None:
    """So that whoever wanted it does its work at once."""
    contexts: list[HostContext] = []
    given = HostContext.add_callback
    monkeypatch.setattr(HostContext, "add_callback", lambda self, work: contexts.append(self) or given(self, work))
    for name in (b"one", b"two"):
        raw.send("wait", name, timeout=0.1 if name == b"two" else SECONDS)
        eventually(lambda name=name: service.begun[name.decode()])
        if name == b"one":
            service.release.set()
            assert raw.receive()[1] == name
            service.release.clear()
    eventually(lambda: service.called_back["two"])
    for context in contexts:
        assert not given(context, lambda: service.late.append("late"))
        assert not context.cancel()
    assert service.called_back == {"one": 1, "two": 1}
    assert not service.late


def test_callbacks_that_fail_hurt_nobody(service: Service, raw: RawCaller) -> None:
    service.called_back = None  # type: ignore[assignment]
    for _ in range(2):
        raw.send("count", b"0")
        assert raw.receive()[0].end_of_stream
    raw.send("echo", b"after")
    assert raw.receive()[1] == b"after"


def test_callers_that_come_and_go_are_told_apart(service: Service, path: Path) -> None:
    """Descriptors are used again at once: each callback runs once, for its own call, and no other call is cut."""
    service.release.set()

    def visit(seed: int) -> None:
        luck = random.Random(seed)
        with host_alone(path) as channel:
            for number in range(60):
                name = f"{seed}-{number}".encode()
                if luck.random() < 0.5:
                    with closing(RawCaller(path)) as raw:
                        raw.send("wait", name)
                        if luck.random() < 0.5:
                            assert raw.receive() == (pb.HostAnswer(), name)
                else:
                    assert outcome(unary(channel, "wait"), name) == name

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(visit, range(6)))
    eventually(lambda: service.called_back.total() + len(service.late) == 360)
    assert max(service.called_back.values()) == 1
    assert not set(service.called_back) & set(service.late)


def test_a_caller_that_does_not_read_its_stream_is_noticed(service: Service, raw: RawCaller) -> None:
    raw.send("endless", b"unread", timeout=0.3)
    eventually(lambda: service.closed["unread"] == service.called_back["unread"] == 1)


def test_a_call_in_flight_is_answered_by_a_service_that_stops(path: Path) -> None:
    with serving(path) as (service, server), host_alone(path) as channel, closing(RawCaller(path)) as idle:
        with ThreadPoolExecutor(2) as pool:
            flying = pool.submit(outcome, unary(channel, "wait"), b"flying")
            eventually(lambda: service.begun["flying"])
            stopping = pool.submit(server.stop, SECONDS)
            assert idle.ends()
            eventually(lambda: not Path(f"{path}{SUFFIX}").exists())
            # Over gRPC, which is not there.
            assert outcome(unary(channel, "echo"), b"later", 5) == Code.UNAVAILABLE
            service.release.set()
            assert flying.result(SECONDS) == b"flying"
            stopping.result(SECONDS)
        assert service.begun == service.called_back == {"flying": 1}


def test_what_outlasts_the_grace_is_ended(path: Path) -> None:
    with serving(path) as (service, server), host_alone(path) as channel, ThreadPoolExecutor(2) as pool:
        flying = pool.submit(outcome, unary(channel, "wait"), b"flying")
        eventually(lambda: service.begun["flying"])
        server.stop(0.1)
        assert flying.result(SECONDS) == Code.UNAVAILABLE
        service.release.set()
        eventually(lambda: service.active == {"flying": False})
        eventually(lambda: service.called_back == {"flying": 1})


def test_a_call_that_meets_the_stop_is_refused_and_not_begun(served: Any, raw: RawCaller) -> None:
    service, server = served
    (host,) = server._host_servers
    with host._changed:
        host._stopping = True
    raw.send("echo", b"crossing")
    answer, _ = raw.receive()
    assert (answer.code, answer.details) == (Code.UNAVAILABLE.value[0], "the service is stopping")
    assert raw.ends()
    assert service.begun == {"first": 1}


def test_half_a_request_does_not_hold_the_stop(path: Path) -> None:
    with serving(path) as (service, server), closing(RawCaller(path)) as raw:
        raw.socket.sendall(call_frame("echo", b"half")[:-1])
        server.stop(SECONDS)
        assert raw.ends()
        assert not server._host_servers[0]._callers
        assert not service.begun


def test_a_stop_leaves_the_next_process_its_socket(path: Path) -> None:
    """Also one with the same inode number."""
    with closing(socket.socket(socket.AF_UNIX)) as beside:
        beside.bind(str(path))
        server = HostCallServer(path, lambda _: None, None, 1)  # type: ignore[arg-type]
        server.start()
        server.begin_stop()
        assert not Path(f"{path}{SUFFIX}").exists()
        Path(f"{path}{SUFFIX}").touch()
        server._inode = Path(f"{path}{SUFFIX}").stat().st_ino
        server.stop(1)
        assert Path(f"{path}{SUFFIX}").exists()


def test_more_connections_than_may_be_are_served_by_grpc(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.host_calls.server._IDLE_CONNECTIONS", 0)
    with serving(path, threads=2, waiting_calls=0) as (service, _), open_channel(path) as channel:
        callers = [RawCaller(path) for _ in range(2)]
        assert outcome(unary(channel, "echo"), b"more") == b"more"
        assert list(stream(channel, "count")(b"2", timeout=SECONDS)) == [b"0", b"1"]
        callers.pop().close()
        with host_alone(path) as alone:
            eventually(lambda: outcome(unary(alone, "echo"), b"again") == b"again")
        callers.pop().close()
        assert service.begun["more"] == 1


def test_a_service_without_a_free_descriptor_waits_for_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than to ask the kernel again and again, while its calls want the processor."""
    refused: list[float] = []

    def refuse(server: socketserver.BaseServer) -> None:
        refused.append(time.monotonic())
        raise OSError(errno.EMFILE, "too many open files")

    with serving(path), open_channel(path) as channel:
        with monkeypatch.context() as patched:
            patched.setattr(socketserver.UnixStreamServer, "get_request", refuse)
            assert outcome(unary(channel, "echo"), b"by grpc") == b"by grpc"
        assert 0 < len(refused) < 50
        with closing(RawCaller(path)) as raw:
            raw.send("echo", b"by the host's socket")
            assert raw.receive()[1] == b"by the host's socket"


def test_a_service_that_may_make_no_socket_serves_by_grpc(path: Path) -> None:
    Path(f"{path}{SUFFIX}").touch()
    with serving(path), open_channel(path) as channel:
        assert outcome(unary(channel, "echo"), b"one") == b"one"
        assert Path(f"{path}{SUFFIX}").is_file()


def test_a_call_that_waits_for_its_turn_leaves_at_its_deadline(path: Path) -> None:
    with serving(path, threads=2, waiting_calls=2) as (service, server), host_alone(path) as channel:
        with ThreadPoolExecutor(2) as pool:
            served = [pool.submit(outcome, unary(channel, "wait_silently"), b"served") for _ in range(2)]
            eventually(lambda: service.begun["served"] == 2)
            for _ in range(5):
                assert outcome(unary(channel, "echo"), b"waiting", 0.05) == Code.DEADLINE_EXCEEDED
            eventually(lambda: server._turns._places._value == 2)
            service.release.set()
            assert [each.result(SECONDS) for each in served] == [b"served"] * 2
        time.sleep(0.05)
        assert service.begun == {"served": 2}


def test_old_and_new_services_answer_alike(path: Path) -> None:
    with old_service(path), open_channel(path) as channel:
        old = [outcome(unary(channel, method), b"ABORTED") for method in ("abort", "set_code", "nothing")]
    path = path.with_name("new")
    with serving(path), host_alone(path) as channel:
        assert [outcome(unary(channel, method), b"ABORTED") for method in ("abort", "set_code", "nothing")] == old
    assert os.listdir(path.parent) == []
