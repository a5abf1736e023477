"""The agent as a child of the engine, with a real store: started, found, started again, and gone with its engine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from cli.local import LocalServices
from kvblend import ChildAgent, KvblendClient
from kvblend.layouts import KvShape, build_layout
from kvblend.memory import SharedBuffer
from kvblend.v1 import agent_pb2, agent_pb2_grpc
from kvblend.v1 import common_pb2 as pb

TOKENS = np.arange(1024, dtype=np.uint32)
SHAPE = KvShape.contiguous(1, 2, 8, 4096, pb.DTYPE_BFLOAT16)

# An engine that does nothing but keep its agent; it says where that is.
_ENGINE = """
import sys, time
from kvblend import ChildAgent
agent = ChildAgent(sys.argv[1], sys.argv[2], device="cpu")
while True:
    print(agent.pid or "", flush=True)
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with LocalServices(arena_bytes=64 << 20) as services:
        yield services.store_target


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.05)


def boot_id(target: str) -> bytes:
    """Of the agent that answers there; empty: none does, or it has no store yet."""
    with grpc.insecure_channel(target) as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer = stub.PingAgent(agent_pb2.PingAgentRequest(), timeout=2)
        except grpc.RpcError:
            return b""
    ready = all(dependency.ready for dependency in answer.liveness.dependencies)
    return bytes(answer.liveness.boot_id) if ready else b""


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that nobody has waited for yet is none any more.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@contextmanager
def closing_by_kill(process: "subprocess.Popen[str]") -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


def model_space() -> pb.ModelSpace:
    rope = pb.Rope(style=pb.ROPE_STYLE_NONE)
    group = pb.LayerGroup(attention=pb.ATTENTION_KIND_FULL, layers=1, kv_heads=2, head_size=8, rope=rope)
    return pb.ModelSpace(
        weights_fingerprint=b"no weights at all, 32 bytes long.."[:32],
        kv_dtype=pb.DTYPE_BFLOAT16,
        groups=[group],
        chunk_tokens=256,
    )


@contextmanager
def engine(target: str) -> Iterator[KvblendClient]:
    """One that has stored a text through the agent at `target`."""
    memory = SharedBuffer(4096 * 2 * 1 * 2 * 8 * 2)
    client = KvblendClient(target, "engine")
    try:
        layout = build_layout("contiguous", SHAPE)
        until(lambda: bool(client.register_kv_cache(model_space(), [memory.handle()], layout)))
        assert client.store(TOKENS, "first")
        yield client
    finally:
        client.close()
        memory.close()


def test_an_engine_starts_its_agent_and_goes_on_with_the_next_when_it_is_killed(shm_dir: Path, store: str) -> None:
    with ChildAgent(shm_dir, store, device="cpu") as agent, engine(agent.target) as client:
        first = agent.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: agent.pid not in (None, first) and bool(boot_id(agent.target)))
        assert "exit code -9" in agent.problem
        until(lambda: client.lookup(TOKENS, "again").prefix_tokens == len(TOKENS) - 1)
        assert client.end_session("again")
    assert agent.pid is None
    assert not boot_id(agent.target)


def test_engines_of_one_gpu_share_an_agent_and_the_next_starts_one_when_its_engine_is_killed(
    shm_dir: Path, store: str
) -> None:
    def started() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", _ENGINE, str(shm_dir), store], stdout=subprocess.PIPE, text=True)

    def agent_of(process: "subprocess.Popen[str]") -> int:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        return int(line) if line else 0

    with started() as first, closing_by_kill(first):
        until(lambda: agent_of(first) > 0)
        agent = agent_of(first)
        with ChildAgent(shm_dir, store, device="cpu") as second:
            until(lambda: bool(boot_id(second.target)))
            before = boot_id(second.target)
            assert second.pid is None, "there is one already"
            first.kill()
            first.wait(30)
            # Never two: the lock is the agent's, too.
            until(lambda: second.pid is not None)
            assert not runs(agent)
            until(lambda: boot_id(second.target) not in (b"", before))
        assert second.pid is None


def test_other_gpus_have_agents_of_their_own(shm_dir: Path) -> None:
    with (
        ChildAgent(shm_dir, "unix:/nowhere", device="cpu", gpu="GPU-1") as one,
        ChildAgent(shm_dir, "unix:/nowhere", device="cpu", gpu="GPU-2") as other,
    ):
        assert one.target != other.target
        until(lambda: one.pid is not None and other.pid is not None)


def test_an_agent_that_cannot_start_is_told_of_and_tried_again(
    shm_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ChildAgent(shm_dir, "unix:/nowhere", device="cpu", settings={"copy_threads": "0"}) as agent:
        until(lambda: bool(agent.problem))
        assert not boot_id(agent.target)
    assert "copy_threads" in capfd.readouterr().err


def test_a_folder_whose_name_is_too_long_for_a_socket_is_refused(shm_dir: Path) -> None:
    with pytest.raises(ValueError, match="too long for a unix socket"):
        ChildAgent(shm_dir / ("x" * 100), "unix:/nowhere", device="cpu")


def test_a_folder_that_is_not_there_is_refused_at_once(shm_dir: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ChildAgent(shm_dir / "missing", "unix:/nowhere", device="cpu")


def test_closing_twice_and_closing_one_that_waits_for_its_turn_ends(shm_dir: Path) -> None:
    with ChildAgent(shm_dir, "unix:/nowhere", device="cpu") as first:
        until(lambda: first.pid is not None)
        second = ChildAgent(shm_dir, "unix:/nowhere", device="cpu")
        second.close()
        second.close()
        assert second.pid is None
        assert first.pid is not None, "it is the other's"
