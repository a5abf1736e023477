"""`kvblend up` and LocalServices with the real services."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from canned_services import Matcher, serve
from up_process import Up, eventually, kvblend

from cli.local import LocalServices
from cli.probe import Peer
from cli.supervisor import StartFailed


@pytest.fixture
def up(shm_dir: Path) -> Iterator[Up]:
    running = Up(shm_dir, f"t{os.getpid()}")
    yield running
    running.end()


def test_up_serves_refuses_a_second_of_its_name_survives_a_kill_and_stops_all(up: Up) -> None:
    up.await_text("ready: agent at")
    ping = ["ping", *(word for name in ("matcher", "store", "agent") for word in (f"--{name}", up.target(name)))]
    done = kvblend(*ping)
    assert done.returncode == 0, done.stdout + done.stderr

    second = kvblend(*up.arguments(), environment=up.environment())
    assert second.returncode == 1
    assert second.stderr.splitlines() == [
        f"kvblend up: --name '{up.name}' is refused: it is running already (pid {up.process.pid}); choose another name"
    ]
    other = kvblend("up", "--name", f"{up.name}b", *up.listen("store"), environment=up.environment())
    assert other.returncode == 1
    assert "is refused: the address is in use" in other.stderr
    folder = ["--run-dir", str(up.folder / up.name), "--arena-bytes", "64MiB"]
    free = [f"--{service}-listen=unix:{up.folder}/b-{service}.sock" for service in ("matcher", "store", "agent")]
    third = kvblend("up", "--name", f"{up.name}b", *folder, *free, environment=up.environment())
    assert third.returncode == 1
    (line,) = third.stderr.splitlines()
    assert line.startswith(f"kvblend up: --run-dir '{up.folder / up.name}' is refused: it is in use already (pid ")

    store = Peer("store", up.target("store"))
    boot_id = store.ping(5).boot_id
    killed = next(pid for pid in up.pids() if b"services.store" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(killed, signal.SIGKILL)
    up.await_text("store    ready", count=2)
    assert "died     killed by SIGKILL; starting again in 0.2 s" in up.text()
    # The channel may still be waiting to try the address again.
    eventually(lambda: store.probe(5).liveness is not None)
    assert store.ping(5).boot_id != boot_id
    store.close()

    pids = up.pids()
    assert len(pids) == 3
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0, up.text()
    assert up.pids() == []
    assert not up.arena.exists()
    assert (up.folder / up.name / "matcher.db").exists()
    stops = [line.split()[1:] for line in up.text().splitlines() if " stopped" in line]
    # In order, and none by a signal.
    assert stops == [[service, "stopped"] for service in ("agent", "store", "matcher")]
    assert "\x1b" not in up.text()


def test_a_killed_up_leaves_nothing_running(up: Up) -> None:
    up.await_text("ready: agent at")
    assert len(up.pids()) == 3
    up.process.kill()
    up.process.wait()
    eventually(lambda: up.pids() == [])
    # What it left is taken up and removed by the next one of its name.
    assert up.arena.exists()
    again = Up(up.folder, up.name)
    again.await_text("ready: agent at")
    again.end()
    assert not up.arena.exists()


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--chunk-tokens", "0", "power of two from 16 to 1024"),
        ("--chunk-tokens", "300", "power of two from 16 to 1024"),
        ("--arena-bytes", "lots", "such as 2GiB"),
        ("--arena-bytes", "1024", "greater than or equal to 1048576"),
        ("--device", "tpu", "must be cpu or cuda"),
        ("--name", "Not A Name", "a-z, 0-9 and -"),
        ("--redis-url", "http://127.0.0.1", "must start with redis://"),
        ("--agent-listen", "50053", "host:port or unix:/absolute/path"),
        ("--matcher-listen", "192.0.2.1:50051", "not of this host"),
    ],
)
def test_case_73_a_wrong_setting_is_refused_in_one_line(tmp_path: Path, flag: str, value: str, allowed: str) -> None:
    done = kvblend("up", flag, value, environment={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)})
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert value in line
    assert allowed in line
    assert not (tmp_path / f"kvblend-{os.getuid()}" / "local" / "logs").exists()


def test_case_73_more_memory_than_there_is_ends_the_start_with_one_line(shm_dir: Path) -> None:
    up = Up(shm_dir, f"m{os.getpid()}")
    up.end()
    arguments = ["1000TiB" if word == "64MiB" else word for word in up.arguments()]
    done = kvblend(*arguments, environment=up.environment())
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvblend store: setting arena_bytes = 1099511627776000 is refused")
    assert up.pids() == []
    assert not up.arena.exists()


def test_a_gpu_that_is_not_there_ends_the_start_with_one_line(shm_dir: Path) -> None:
    up = Up(shm_dir, f"g{os.getpid()}")
    up.end()
    done = kvblend(*up.arguments(), "--device", "cuda", "--gpu", "GPU-none", environment=up.environment())
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvblend gpu_agent: device = cuda cannot be used: ")
    assert up.pids() == []


def test_local_services_come_back_after_a_kill_and_leave_nothing(tmp_path: Path) -> None:
    with LocalServices(tmp_path / "run", arena_bytes=64 << 20, chunk_tokens=64) as services:
        peers = [
            Peer("agent", services.agent_target),
            Peer("store", services.store_target),
            Peer("matcher", services.matcher_target),
        ]
        assert all(peer.is_ready(5) for peer in peers)
        pids = {name: services.pid(name) for name in ("matcher", "store", "agent")}
        services.kill("agent")
        services.wait_ready(60)
        assert services.pid("agent") not in (None, pids["agent"])
        assert services.pid("store") == pids["store"]
        eventually(lambda: peers[0].is_ready(5))

        services.kill("matcher", restart=False)
        eventually(lambda: services.pid("matcher") is None)
        assert not peers[2].is_ready(0.5)
        services.start("matcher")
        services.wait_ready(60)
        with pytest.raises(grpc.RpcError):
            Peer("matcher", services.store_target).ping(5)
        for peer in peers:
            peer.close()
        arena = services.plan.arena_dir
        assert services.log("store").exists()
        assert arena.exists()
    assert not arena.exists()


def test_a_server_that_answers_before_it_is_ready_is_waited_for() -> None:
    """As a matcher does that still catches up with its log."""
    for serving in (False, True):
        with serve(Matcher(), serving=serving) as target:
            peer = Peer("matcher", target)
            assert peer.ping(5).service == "matcher"
            assert peer.is_ready(5) is serving
            peer.close()


def test_local_services_say_why_a_setting_was_refused(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="chunk_tokens = '48' is refused"):
        with LocalServices(tmp_path, arena_bytes=64 << 20, chunk_tokens=48):
            pass


def test_sockets_of_a_long_run_dir_are_elsewhere(shm_dir: Path) -> None:
    # With room for matcher.sock, and none for matcher.sock.calls.
    run_dir = shm_dir / ("l" * (94 - len(str(shm_dir))))
    services = LocalServices(run_dir)
    try:
        assert not any(str(run_dir) in services.plan.target(name) for name in ("matcher", "store", "agent"))
        assert services.log("store").is_relative_to(run_dir)
    finally:
        services.stop()
