"""Callers and services of other processes: of other users, stopped and killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from host_service import SECONDS, eventually, host_alone, serving, unary
from host_wire import old_service
from test_host_channel import open_channel, outcome

from kvblend.host_calls.frames import SUFFIX

HERE = Path(__file__).parent
Code = grpc.StatusCode
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may be another user")


@contextmanager
def process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def stop(running: subprocess.Popen[str]) -> None:
    running.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, running.pid, os.WSTOPPED | os.WNOWAIT)


def line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    while (text := running.stdout.readline().strip()).startswith("20"):
        # Of the log.
        continue
    return text


def test_a_killed_service_is_unavailable_until_the_next_one(shm_dir: Path) -> None:
    """The call that it had is lost and not made again; the next one finds its successor."""
    path = shm_dir / "s"
    with open_channel(path) as channel:
        for _ in range(2):
            with process("host_service.py", path) as service:
                assert line(service) == "ready"
                assert outcome(unary(channel, "echo"), b"here") == b"here"
                answers = channel.unary_stream("/kvblend.test.Calls/endless")(b"stream", timeout=SECONDS)
                next(answers)
                service.kill()
                service.wait(SECONDS)
                with pytest.raises(grpc.RpcError) as caught:
                    for _ in answers:
                        pass
                assert caught.value.code() == Code.UNAVAILABLE
            assert Path(f"{path}{SUFFIX}").is_socket()
            assert outcome(unary(channel, "echo"), b"nobody", 3) == Code.UNAVAILABLE


def test_a_stopped_service_costs_its_callers_their_deadlines(shm_dir: Path) -> None:
    """And its late answers reach nobody, whether the connection was old or new."""
    path = shm_dir / "s"
    with process("host_service.py", path) as service, host_alone(path) as channel:
        assert line(service) == "ready"
        assert outcome(unary(channel, "echo"), b"before") == b"before"
        stop(service)
        assert outcome(unary(channel, "echo"), b"old connection", 0.1) == Code.DEADLINE_EXCEEDED
        assert outcome(unary(channel, "echo"), b"new connection", 0.1) == Code.DEADLINE_EXCEEDED
        assert outcome(unary(channel, "echo"), bytes(8 << 20), 0.1) == Code.DEADLINE_EXCEEDED
        service.send_signal(signal.SIGCONT)
        for number in range(20):
            assert outcome(unary(channel, "echo"), b"%d" % number) == b"%d" % number


def test_a_killed_caller_is_gone_at_once(shm_dir: Path) -> None:
    path = shm_dir / "s"
    with serving(path) as (service, _), process("host_peer.py", "self", "call", path, "wait", "killed", 600) as caller:
        eventually(lambda: service.begun["killed"])
        caller.kill()
        eventually(lambda: service.called_back["killed"])
        service.release.set()
        eventually(lambda: service.active == {"killed": False})
        assert service.called_back["killed"] == 1


def test_a_stopped_caller_is_gone_at_its_deadline_and_gets_no_answer(shm_dir: Path) -> None:
    path = shm_dir / "s"
    with serving(path) as (service, _), process("host_peer.py", "self", "call", path, "wait", "stopped", 1) as caller:
        eventually(lambda: service.begun["stopped"])
        stop(caller)
        eventually(lambda: service.called_back["stopped"])
        service.release.set()
        eventually(lambda: service.active == {"stopped": False})
        caller.send_signal(signal.SIGCONT)
        assert line(caller) == "calling"
        assert line(caller) == "DEADLINE_EXCEEDED"
        assert service.called_back["stopped"] == 1


@needs_root
def test_who_may_not_use_grpc_may_not_call(shm_dir: Path) -> None:
    """Its socket's mode counts as it is when the caller comes."""
    path = shm_dir / "s"
    shm_dir.chmod(0o755)
    with serving(path) as (service, _):
        Path(f"{path}{SUFFIX}").chmod(0o777)
        for mode, said in ((0o777, "answer hello"), (0o770, "UNAVAILABLE"), (0o777, "answer hello")):
            path.chmod(mode)
            with process("host_peer.py", "nobody", "call", path, "echo", "hello", 5) as caller:
                assert line(caller) == "calling"
                assert line(caller) == said
        assert service.begun == {"hello": 2}


@needs_root
def test_another_user_cannot_put_a_socket_beside_grpcs(shm_dir: Path) -> None:
    """Where everybody may write, such as /tmp: calls, and tokens with them, go to whom gRPC's socket belongs."""
    path = shm_dir / "s"
    shm_dir.chmod(0o1777)
    with process("host_peer.py", "nobody", "squat", path) as squatter, old_service(path) as service:
        assert line(squatter) == "ready"
        with open_channel(path) as channel:
            assert outcome(unary(channel, "echo"), b"secret") == b"secret"
        assert service.begun == {"secret": 1}
        assert squatter.stdin is not None
        squatter.stdin.close()
        assert line(squatter) == ""
