"""`kvblend doctor`: each lack is found, with what to do."""

import collections
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from redis_server import redis_server
from redis_topologies import cluster

from cli import checks, doctor
from cli.checks import FAIL, OK, WARN, Finding

Usage = collections.namedtuple("Usage", "total used free")


def test_this_machine_can_run_the_project(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert doctor.run(redis_url="", model=tmp_path, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"]
    by_subject = {check["subject"]: check for check in answer["checks"]}
    assert {"Python", "packages", "CPUs", "memory", "shared memory", "open files", "unix sockets", "ports"} <= set(
        by_subject
    )
    assert by_subject["model"] == {
        "subject": "model",
        "level": "warn",
        "text": f"{tmp_path} is not there",
        "advice": "make model",
    }


def test_something_needed_that_is_missing_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lack = Finding("packages", FAIL, "missing: blake3", "pip install 'kvblend[services]'")
    monkeypatch.setattr(doctor, "all_findings", lambda *_: [lack])
    assert doctor.run(redis_url="", model=tmp_path, as_json=False) == 1
    output = capsys.readouterr().out
    assert "→ pip install 'kvblend[services]'" in output
    assert "does not run here yet" in output


@pytest.mark.parametrize(("free", "level"), [(64 << 20, FAIL), (1 << 30, WARN), (8 << 30, OK)])
def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, level: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(16 << 30, 0, free))
    (finding,) = checks.check_shared_memory(tmp_path)
    assert finding.level == level
    assert bool(finding.advice) == (level != OK)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_NEEDED", ("numpy", "a-package-that-is-not-there"))
    needed, _ = checks.check_packages()
    assert needed.level == FAIL
    assert needed.text == "missing: a-package-that-is-not-there"


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(checks, "STORE_LISTEN", address)
        (finding,) = checks.check_ports()
    assert finding.level == WARN
    assert address in finding.text


def test_a_redis_that_does_not_answer_fails_without_showing_its_password() -> None:
    (finding,) = checks.check_redis("redis://:secret@127.0.0.1:1/0")
    assert finding.level == FAIL
    assert "secret" not in finding.text + finding.advice


def test_a_redis_that_will_refuse_what_is_new_is_told() -> None:
    with redis_server("--maxmemory", "100mb", "--maxmemory-policy", "noeviction") as server:
        (finding,) = checks.check_redis(server.tcp_url)
    assert finding.level == WARN
    assert "allkeys-lru" in finding.advice


def test_every_master_of_a_cluster_is_asked() -> None:
    with cluster(b"any") as nodes:
        (finding,) = checks.check_redis(nodes.url)
        assert finding.level == OK
        assert "3 masters" in finding.text
        nodes.primaries[0].kill()
        assert checks.check_redis(nodes.url)[0].level == FAIL


def test_a_url_that_is_none_fails() -> None:
    (finding,) = checks.check_redis("nonsense")
    assert finding.level == FAIL


def test_what_a_killed_process_left_in_shared_memory_is_found(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    gone, here = int(done.stdout), os.getpid()
    arena = tmp_path / f"kvblend-local-{gone}-abc"
    for folder in (arena, tmp_path / f"kvblend-local-{here}-abc", tmp_path / "kvblend-up-0-local"):
        folder.mkdir()
        (folder / "slab-0000").write_bytes(bytes(2048))
    engine = tmp_path / f"kvblend-{gone}-0011"
    for file in (engine, tmp_path / f"kvblend-{here}-0011"):
        file.write_bytes(bytes(1024))
    findings = checks.check_left_behind(tmp_path)
    assert [(finding.level, finding.advice) for finding in findings] == [
        (WARN, f"rm -r {engine}"),
        (WARN, f"rm -r {arena}"),
    ]
    assert "2.0 KiB" in findings[1].text


def gpu_finding(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Finding:
    """With a driver's tool that is this script."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    (finding,) = checks.check_gpu()
    return finding


@pytest.mark.parametrize(("triton", "level", "advice"), [(True, OK, "--device cuda"), (False, WARN, "torch for CUDA")])
def test_a_gpu_is_told_with_what_it_takes_to_use_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, triton: bool, level: str, advice: str
) -> None:
    monkeypatch.setattr(checks, "_is_installed", lambda name: triton or name != "triton")
    finding = gpu_finding(monkeypatch, tmp_path, "echo 'NVIDIA H200, 143771 MiB, GPU-1234'")
    assert finding.level == level
    assert "GPU-1234" in finding.text
    assert advice in finding.text + finding.advice


def test_a_tool_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding = gpu_finding(monkeypatch, tmp_path, "echo 'no devices were found' >&2\nexit 6")
    assert finding.level == WARN
    assert "no devices were found" in finding.text
