"""`kvblend up` on TCP: within the host calls go over sockets all the same, wherever there can be some."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import numpy as np
import pytest
from tiny_llama import BOS, VOCABULARY, tiny_model
from up_process import Up, eventually, kvblend

from cli.sockets import why_no_sockets
from cli.up import UpOptions, run
from kvblend import KvblendClient
from kvblend.blend import Source
from kvblend.engines.transformers import TransformersEngine
from kvblend.host_calls import host_channel
from kvblend.v1 import store_pb2, store_pb2_grpc

SERVICES = ("matcher", "store", "agent")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class TcpUp(Up):
    """Services on loopback, as they are by default, on ports that are free."""

    def __init__(self, folder: Path, name: str, run_dir: Path | None = None) -> None:
        self.ports = dict(zip(SERVICES, free_ports(3), strict=True))
        self.run_dir = run_dir or folder / name
        super().__init__(folder, name)

    def arguments(self) -> list[str]:
        return [*super().arguments(), "--run-dir", str(self.run_dir), "--chunk-tokens", "16"]

    def target(self, service: str) -> str:
        return f"127.0.0.1:{self.ports[service]}"

    def socket(self, service: str) -> str:
        return f"unix:{self.run_dir / service}.sock"

    def connections(self, service: str) -> int:
        """Of callers within the host that make calls beside gRPC."""
        path = self.socket(service).removeprefix("unix:") + ".calls"
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        return sum(row[5] == "03" and row[-1] == path for row in rows)

    def require_tcp(self) -> None:
        """All are ready there, and have what they need."""
        done = kvblend("ping", *(word for name in SERVICES for word in (f"--{name}", self.target(name))))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as running:
        yield running


def start(stack: ExitStack, folder: Path, name: str, run_dir: Path | None = None) -> TcpUp:
    up = TcpUp(folder, f"{name}{os.getpid()}", run_dir)
    stack.callback(up.end)
    return up


def text(seed: int, length: int) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(2, VOCABULARY, length).astype(np.uint32)
    tokens[0] = BOS
    return tokens


def open_engine(stack: ExitStack, agent: str, name: str) -> TransformersEngine:
    client = stack.enter_context(closing(KvblendClient(agent, name)))
    return stack.enter_context(closing(TransformersEngine(tiny_model(), client, max_tokens=512, name="tiny")))


def reused(engine: TransformersEngine, prompt: np.ndarray) -> int:
    answer = engine.answer(prompt, 1, question_tokens=1)
    return len(prompt) - answer.count(Source.NEW)


def test_within_the_host_calls_go_over_sockets_and_tcp_serves_the_same(shm_dir: Path, stack: ExitStack) -> None:
    up, other = (start(stack, shm_dir, name) for name in ("a", "b"))
    for running in (up, other):
        running.await_text("ready: agent at")
        running.require_tcp()
        assert f" engines on this host are served faster at {running.socket('agent')}\n" in running.text()

    near = open_engine(stack, up.socket("agent"), "near")
    prompt = text(1, 64)
    assert near.store_prompt(prompt)
    eventually(lambda: reused(near, prompt) > 0)
    assert all(up.connections(service) for service in SERVICES)
    assert not other.connections("agent")
    far = open_engine(stack, up.target("agent"), "far")
    assert reused(far, prompt) == reused(near, prompt)

    killed = next(pid for pid in up.pids() if b"services.store" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(killed, signal.SIGKILL)
    up.await_text("store    ready", count=2)
    # Its memory is new.
    eventually(lambda: near.store_prompt(prompt) and reused(near, prompt) > 0)
    assert up.connections("store")
    other.require_tcp()


def test_sockets_that_killed_processes_left_are_taken_over(shm_dir: Path, stack: ExitStack) -> None:
    killed = start(stack, shm_dir, "k")
    killed.await_text("ready: agent at")
    pids = killed.pids()
    assert len(pids) == 3
    for pid in (killed.process.pid, *pids):
        os.kill(pid, signal.SIGKILL)
    killed.process.wait()
    eventually(lambda: killed.pids() == [])
    left = Path(killed.socket("store").removeprefix("unix:"))
    assert left.is_socket()

    up = start(stack, shm_dir, "k")
    up.await_text("ready: agent at")
    with host_channel(up.socket("store"), grpc.insecure_channel(up.socket("store"))) as channel:
        stub = store_pb2_grpc.StoreServiceStub(channel)
        assert stub.PingStore(store_pb2.PingStoreRequest(), timeout=10).liveness.service == "store"
    assert up.connections("store")
    up.end()
    assert not left.exists()


@pytest.mark.parametrize(
    ("folder", "why"),
    [("long" * 30, "bytes, and 107 are allowed"), ("50%20,off#", "its name has one of %#?,")],
)
def test_where_no_socket_can_be_tcp_serves_alone_and_up_says_why(
    shm_dir: Path, stack: ExitStack, folder: str, why: str
) -> None:
    up = start(stack, shm_dir, "f", shm_dir / folder)
    up.await_text("ready: agent at")
    up.require_tcp()
    (line,) = (line for line in up.text().splitlines() if "no sockets" in line)
    assert " matcher, store, agent: TCP alone" in line
    assert line.endswith(why)
    assert "engines on this host" not in up.text()
    assert not list(up.run_dir.glob("*.sock*"))


def test_a_socket_that_was_given_is_the_only_one(shm_dir: Path, stack: ExitStack) -> None:
    given = Up(shm_dir, f"g{os.getpid()}")
    stack.callback(given.end)
    given.await_text("ready: agent at")
    assert not list((shm_dir / given.name).glob("*.sock*"))
    assert "engines on this host" not in given.text()


def test_a_folder_on_a_file_system_without_sockets_is_noticed(shm_dir: Path) -> None:
    assert why_no_sockets(Path("/proc/self"))
    assert not why_no_sockets(shm_dir)
    assert list(shm_dir.iterdir()) == []


def test_a_runtime_folder_of_another_user_is_refused(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp it may be anybody's, who could then put other sockets there."""
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shm_dir))
    listen = {service: f"unix:{shm_dir}/{service}.sock" for service in SERVICES}
    options = UpOptions("local", "64MiB", 256, "", shm_dir / "run", listen, "cpu", "")
    with pytest.raises(SystemExit, match=f"kvblend-{another} belongs to another user; set XDG_RUNTIME_DIR"):
        run(options)
    assert not (shm_dir / "run").exists()
