"""What the caller's end does with services that end, answer late or are not there."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from host_service import NAME, SECONDS, Service, eventually, host_alone, serving, stream, unary
from host_wire import ScriptedService, nothing_before, old_service

from kvblend.host_calls import MissingDeadline, host_channel
from kvblend.host_calls.channel import _UnaryCall
from kvblend.host_calls.connections import Connections, Unreachable
from kvblend.host_calls.frames import SUFFIX, Frames
from kvblend.v1 import store_pb2, store_pb2_grpc
from services.common import channels

Code = grpc.StatusCode


def echo(connection: socket.socket, head: bytes, body: bytes) -> None:
    Frames(connection).send(b"", body)


def end(connection: socket.socket, head: bytes, body: bytes) -> None:
    raise EOFError


def end_in_lengths(connection: socket.socket, head: bytes, body: bytes) -> None:
    connection.sendall(b"\0\0")
    raise EOFError


def end_in_answer(connection: socket.socket, head: bytes, body: bytes) -> None:
    connection.sendall(b"\0\0\0\0\5\0\0\0abc")
    raise EOFError


def answer_too_large(connection: socket.socket, head: bytes, body: bytes) -> None:
    connection.sendall(b"\xff" * 8)


LOST = [end, end_in_lengths, end_in_answer, answer_too_large]


@contextmanager
def scripted(path: Path, script: Any, **more: Any) -> Iterator[tuple[ScriptedService, Service]]:
    """The host's socket follows the script; gRPC's is of a service that counts."""
    with old_service(path) as service, closing(ScriptedService(path, script, **more)) as fake:
        yield fake, service


def open_channel(path: Path, repeatable: tuple[str, ...] = ()) -> grpc.Channel:
    return host_channel(f"unix:{path}", grpc.insecure_channel(f"unix:{path}"), repeatable)


def outcome(call: Callable[..., Any], request: bytes, timeout: float = SECONDS) -> Code | bytes:
    try:
        answer: bytes = call(request, timeout=timeout)
    except grpc.RpcError as error:
        return error.code()
    return answer


def check_nothing_is_sent_again(path: Path, script: Any) -> None:
    with scripted(path, script) as (fake, service), open_channel(path) as channel:
        assert outcome(unary(channel, "echo"), b"once") == Code.UNAVAILABLE
        assert outcome(lambda request, timeout: list(stream(channel, "count")(request, timeout)), b"3") == (
            Code.UNAVAILABLE
        )
        assert fake.received == [b"once", b"3"]
        assert not service.begun
        assert not service.called_back


@pytest.mark.parametrize("script", LOST)
def test_a_request_that_was_received_is_never_sent_again(shm_dir: Path, script: Any) -> None:
    check_nothing_is_sent_again(shm_dir / "s", script)


def test_a_channel_that_sends_again_is_found_out(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(self: Any, way: Any, grpc_call: Any, *, repeatable: bool) -> None:
        self._way, self._grpc_call, self._repeatable = way, grpc_call, True

    monkeypatch.setattr(_UnaryCall, "__init__", eager)
    with pytest.raises(AssertionError):
        check_nothing_is_sent_again(shm_dir / "s", end)


@pytest.mark.parametrize("script", LOST)
def test_what_is_repeatable_is_asked_for_again_over_grpc(shm_dir: Path, script: Any) -> None:
    with scripted(shm_dir / "s", script) as (fake, service):
        with open_channel(shm_dir / "s", (f"{NAME}/echo",)) as channel:
            assert outcome(unary(channel, "echo"), b"twice") == b"twice"
        assert (fake.received, service.begun["twice"]) == ([b"twice"], 1)


def refuse(connection: socket.socket) -> None:
    raise EOFError


def half_a_greeting(connection: socket.socket) -> None:
    connection.sendall(b"\0\0")
    raise EOFError


def no_greeting(connection: socket.socket) -> None:
    Frames(connection).send(b"", b"hello")


def read_a_part(connection: socket.socket) -> None:
    nothing_before(connection)
    assert connection.recv(1000)
    raise EOFError


@pytest.mark.parametrize("greet", [refuse, half_a_greeting, no_greeting, read_a_part])
def test_what_was_not_received_goes_over_grpc(shm_dir: Path, greet: Any) -> None:
    request = bytes(4 << 20)
    with scripted(shm_dir / "s", echo, greet=greet) as (fake, service), open_channel(shm_dir / "s") as channel:
        assert outcome(unary(channel, "echo"), request) == request
        assert not fake.received
        assert service.begun.total() == 1
        if greet is not read_a_part:
            assert list(stream(channel, "count")(b"2", timeout=SECONDS)) == [b"0", b"1"]


def test_a_service_without_the_socket_is_asked_over_grpc(shm_dir: Path) -> None:
    """As is one that left only the socket of an earlier one."""
    path = shm_dir / "s"
    with old_service(path) as service, open_channel(path) as channel:
        assert outcome(unary(channel, "echo"), b"one") == b"one"
        closing_at_once = ScriptedService(path, end)
        closing_at_once.close()
        assert Path(f"{path}{SUFFIX}").is_socket()
        assert outcome(unary(channel, "echo"), b"two") == b"two"
        assert list(stream(channel, "count")(b"2", timeout=SECONDS)) == [b"0", b"1"]
        assert service.begun == {"one": 1, "two": 1}


def begin_over_grpc(channel: grpc.Channel, service: Service, how: str, timeout: float) -> Any:
    """A call that its service has begun, while there is no other way to it."""
    if how == "stream":
        running = stream(channel, "pause")(b"slow", timeout=timeout)
        next(running)
        return running
    running = unary(channel, "wait").future(b"slow", timeout=timeout)
    eventually(lambda: service.begun["slow"])
    return running


@pytest.mark.parametrize("how", ["stream", "later"])
def test_no_call_overtakes_one_that_was_given_up_on_grpc(shm_dir: Path, how: str) -> None:
    """That one may begin after its caller has given it up: what ends it must come later."""
    path = shm_dir / "s"
    with old_service(path) as service, open_channel(path) as channel:
        running = begin_over_grpc(channel, service, how, timeout=1)
        begun = time.monotonic()
        with closing(ScriptedService(path, echo)) as fake:
            running.cancel()
            while not fake.received:
                assert outcome(unary(channel, "echo"), b"end") == b"end"
            assert time.monotonic() > begun + 0.9
            assert service.begun["end"]


def test_a_call_that_a_service_ended_on_grpc_holds_no_other_back(shm_dir: Path) -> None:
    path = shm_dir / "s"
    with old_service(path) as service, open_channel(path) as channel:
        assert outcome(unary(channel, "abort"), b"it") == Code.ABORTED
        with closing(ScriptedService(path, echo)) as fake:
            assert outcome(unary(channel, "echo"), b"next") == b"next"
            assert fake.received == [b"next"]
            assert not service.begun["next"]


def test_nobody_there_is_unavailable(shm_dir: Path) -> None:
    with open_channel(shm_dir / "s") as channel:
        assert outcome(unary(channel, "echo"), b"one", 5) == Code.UNAVAILABLE


@pytest.mark.parametrize("timeout", [0, -1, 1e-9])
def test_no_time_is_a_deadline_exceeded(shm_dir: Path, timeout: float) -> None:
    with scripted(shm_dir / "s", echo) as (fake, _), open_channel(shm_dir / "s") as channel:
        assert outcome(unary(channel, "echo"), b"kept") == b"kept"
        assert outcome(unary(channel, "echo"), b"one", timeout) == Code.DEADLINE_EXCEEDED
        assert fake.received == [b"kept"]


def test_a_call_without_end_goes_over_grpc(shm_dir: Path) -> None:
    with scripted(shm_dir / "s", echo) as (fake, service), open_channel(shm_dir / "s") as channel:
        assert outcome(unary(channel, "echo"), b"long", 1e6) == b"long"
        assert (len(fake.received), service.begun["long"]) == (0, 1)


def test_a_call_without_a_timeout_is_refused(shm_dir: Path) -> None:
    with open_channel(shm_dir / "s", (f"{NAME}/repeatable",)) as channel:
        calls = [unary(channel, "echo"), unary(channel, "echo").future, unary(channel, "repeatable").future]
        for call in (*calls, stream(channel, "count")):
            with pytest.raises(MissingDeadline):
                call(b"")


def test_a_late_answer_is_for_nobody(shm_dir: Path) -> None:
    """It arrives while the next call waits for its own."""
    next_call = threading.Event()

    def late(connection: socket.socket, head: bytes, body: bytes) -> None:
        if body == b"slow":
            assert next_call.wait(SECONDS)
        echo(connection, head, body)

    with scripted(shm_dir / "s", late) as (fake, _), open_channel(shm_dir / "s") as channel:
        assert outcome(unary(channel, "echo"), b"slow", 0.1) == Code.DEADLINE_EXCEEDED
        threading.Timer(0.05, next_call.set).start()
        assert outcome(unary(channel, "echo"), b"quick", 0.5) == b"quick"
        assert outcome(unary(channel, "echo"), b"more") == b"more"
        assert fake.connections == 2


def test_bytes_that_belong_to_no_call_end_the_connection(shm_dir: Path) -> None:
    def twice(connection: socket.socket, head: bytes, body: bytes) -> None:
        echo(connection, head, body)
        echo(connection, head, b"of the last")

    with scripted(shm_dir / "s", twice) as (fake, _), open_channel(shm_dir / "s") as channel:
        for number in range(5):
            assert outcome(unary(channel, "echo"), b"%d" % number) == b"%d" % number
            time.sleep(0.02)
        assert fake.connections == 5


@pytest.mark.parametrize("head", [b"\xff\xff", b"\x10\xff\xff", b"\x22\x04\x0a\x01k\x12"])
def test_an_unreadable_answer_is_an_internal_error(shm_dir: Path, head: bytes) -> None:
    def garble(connection: socket.socket, _: bytes, body: bytes) -> None:
        Frames(connection).send(b"" if body == b"fine" else head, body)

    with scripted(shm_dir / "s", garble) as (_, service), open_channel(shm_dir / "s") as channel:
        assert outcome(unary(channel, "echo"), b"one") == Code.INTERNAL
        assert outcome(unary(channel, "echo"), b"fine") == b"fine"
        assert not service.begun


def test_a_restarted_service_is_found_by_the_next_call(shm_dir: Path) -> None:
    """Over as many connections as there were before."""
    path = shm_dir / "s"
    with host_alone(path) as channel:
        for number in range(3):
            with serving(path):
                streams = [stream(channel, "endless")(b"many", timeout=SECONDS) for _ in range(4)]
                assert all(next(each) for each in streams)
                for each in streams:
                    each.cancel()
                assert outcome(unary(channel, "echo"), b"%d" % number) == b"%d" % number
                assert list(stream(channel, "count")(b"2", timeout=SECONDS)) == [b"0", b"1"]
            assert not Path(f"{path}{SUFFIX}").exists()


def test_an_exception_of_the_thread_ends_the_stream(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an answer may have been read: what follows is no answer."""
    with serving(shm_dir / "s"), host_alone(shm_dir / "s") as channel:
        answers = stream(channel, "count")(b"100", timeout=SECONDS)
        next(answers)
        with monkeypatch.context() as patched:
            patched.setattr(Frames, "receive", lambda *_: sys.exit())
            with pytest.raises(SystemExit):
                next(answers)
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
        assert caught.value.code() == Code.UNAVAILABLE


def test_a_fork_leaves_its_parents_calls_alone(shm_dir: Path) -> None:
    """Also when it closes, or makes a call; and it does not hold them open."""
    path = shm_dir / "s"
    gone = threading.Event()

    def slow(connection: socket.socket, head: bytes, body: bytes) -> None:
        if body == b"given up":
            gone.set() if connection.recv(1) == b"" else None
            raise EOFError
        time.sleep(0.2)
        echo(connection, head, body)

    path.touch()
    with closing(ScriptedService(path, slow)):
        connections = Connections(str(path))
        busy = connections.begin(b"", (b"mine",), time.monotonic() + SECONDS)
        child = os.fork()
        if not child:
            connections.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert busy.receive(time.monotonic() + SECONDS) == (b"", b"mine")
        connections.keep(busy)
        busy = connections.begin(b"", (b"given up",), time.monotonic() + SECONDS)
        child = os.fork()
        if not child:
            gone.wait(SECONDS)
            os._exit(0)
        try:
            connections.drop(busy)
            assert gone.wait(SECONDS)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
        connections.close()


def test_no_call_is_begun_after_the_close(shm_dir: Path) -> None:
    path = shm_dir / "s"
    path.touch()
    with closing(ScriptedService(path, echo)) as fake:
        connections = Connections(str(path))
        kept = connections.begin(b"", (b"one",), time.monotonic() + SECONDS)
        kept.receive(time.monotonic() + SECONDS)
        connections.close()
        connections.keep(kept)
        with pytest.raises(Unreachable):
            connections.begin(b"", (b"two",), time.monotonic() + SECONDS)
        eventually(lambda: fake.received == [b"one"])


def test_no_more_connections_than_useful_are_kept(shm_dir: Path) -> None:
    with serving(shm_dir / "s", threads=64) as (_, server), host_alone(shm_dir / "s") as channel:
        streams = [stream(channel, "endless")(b"many", timeout=SECONDS) for _ in range(40)]
        waiting = [unary(channel, "echo")(b"x", timeout=SECONDS) for _ in range(3)]
        assert waiting == [b"x"] * 3
        del streams
        (host,) = server._host_servers
        eventually(lambda: host._callers <= 16)


@pytest.mark.parametrize("target", ["unix:/dev/shm/kvb-nobody/s", "127.0.0.1:1"])
def test_a_closed_channel_refuses_every_call(target: str) -> None:
    """A service stops its threads after their channel: what such a thread asks must not end the process."""
    channel = channels.open_channel(target, repeatable=["kvblend.v1.StoreService/Score"])
    stub = store_pb2_grpc.StoreServiceStub(channel)
    channel.close()
    for call in (stub.PingStore, stub.PingStore.future, stub.Lookup, stub.Score, stub.Score.future):
        with pytest.raises(ValueError, match="closed"):
            call(store_pb2.PingStoreRequest(), timeout=SECONDS)
