"""Requests that are aborted at random moments, engines and agents that are killed: what is left of them afterwards.

A real store, two agents, an engine on each. Killed processes are started again. When all is over the store must hold
no lease, no reserved and no quarantined byte, and clearing it must give back the whole arena.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import grpc

from benchmarks.common.processes import ROOT, environment
from benchmarks.common.screen import Screen
from benchmarks.common.targets import Target, at_least, at_most
from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2, store_pb2_grpc

_ARENA_BYTES = 4 << 20
_REQUESTS, _QUICK_REQUESTS = 10_000, 1_000
# Each engine is killed so often, the second agent so often, at even distances.
_ENGINE_KILLS, _AGENT_KILLS = 4, 2
_QUIET_SECONDS = 60.0
_POLL_SECONDS = 0.05


class Services:
    """A store and its agents in one directory of shared memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._channel = grpc.insecure_channel(self.target("store"))
        self._store: Any = store_pb2_grpc.StoreServiceStub(self._channel)  # type: ignore[no-untyped-call]
        size = ["--arena-bytes", str(_ARENA_BYTES), "--slab-bytes", str(_ARENA_BYTES // 4), "--chunk-tokens", "16"]
        # What a lease's time limit frees was left over.
        no_limit = ["--lease-ttl-seconds", "3600"]
        self._start("store", "services.store", "--arena-dir", str(directory / "arena"), *size, *no_limit)
        self.stats(wait=True)

    def target(self, name: str) -> str:
        return f"unix:{self._directory}/{name}.sock"

    def _start(self, name: str, *command: str) -> None:
        flags = ["--listen", self.target(name), "--drain-seconds", "0", "--log-level", "error"]
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *command, *flags], stderr=log, stdout=log, cwd=ROOT, env=environment()
            )

    def start_agent(self, name: str) -> None:
        self._start(name, "services.gpu_agent", "--store", self.target("store"), "--name", name)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def stats(self, *, wait: bool = False) -> store_pb2.GetStoreStatsResponse:
        answer: store_pb2.GetStoreStatsResponse = self._store.GetStoreStats(
            store_pb2.GetStoreStatsRequest(), timeout=30, wait_for_ready=wait
        )
        return answer

    def clear(self) -> None:
        request = store_pb2.ClearRequest(scope=pb.ClearScope(everything=True))
        self._store.Clear(request, timeout=30)

    def close(self) -> None:
        self._channel.close()
        for process in self._processes.values():
            process.kill()
            process.wait()


@contextmanager
def services() -> Iterator[Services]:
    directory = Path(tempfile.mkdtemp(prefix="kvb-", dir="/dev/shm"))
    running = Services(directory)
    try:
        for name in ("one", "two"):
            running.start_agent(name)
        yield running
    finally:
        running.close()
        shutil.rmtree(directory, ignore_errors=True)


class _Engine:
    """An engine process that is started again until it has done its requests."""

    def __init__(self, target: str, name: str, requests: int, kills: int) -> None:
        self._target, self._name = target, name
        self._wanted = requests
        self._kill_every = requests // (kills + 1)
        self._kills = kills
        self.done = self.killed = 0
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "benchmarks.store.aborting_engine"]
        # Another name: an engine that was killed may be there for a moment yet.
        command += [self._target, f"{self._name}-{self.killed}", str(self.killed), str(self._wanted - self.done)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment())

    def advance(self) -> bool:
        """One request more; False: all are done."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self._process.wait()
            if self._process.returncode and self.done < self._wanted:
                raise RuntimeError(f"engine {self._name} failed after {self.done} requests")
            return False
        self.done += 1
        if self.killed < self._kills and self.done >= self._kill_every * (self.killed + 1):
            self.kill()
            self.killed += 1
            self._process = self._start()
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    """Requests, kills, seconds, and what was left."""
    wanted = _QUICK_REQUESTS if quick else _REQUESTS
    kills = 1 if quick else _ENGINE_KILLS
    with services() as running:
        start = time.monotonic()
        engines = [_Engine(running.target(name), name, wanted // 2, kills) for name in ("one", "two")]
        try:
            agent_kills = _abort_all(running, engines, wanted, 1 if quick else _AGENT_KILLS)
        finally:
            for engine in engines:
                engine.kill()
        seconds = time.monotonic() - start
        left = _wait_until_quiet(running)
        figures: dict[str, Any] = {
            "requests": sum(engine.done for engine in engines),
            "engine_kills": sum(engine.killed for engine in engines),
            "agent_kills": agent_kills,
            "seconds": seconds,
            "quiet_after_seconds": time.monotonic() - start - seconds,
            **{name: getattr(running.stats(), name) for name in ("lookups", "stored_chunks", "evicted_chunks")},
            **left,
        }
        running.clear()
        figures["used_bytes_after_clear"] = running.stats().tiers[0].used_bytes
    screen.line(
        f"{figures['requests']} aborted requests in {seconds:.1f} s; left: {left['leases']} leases, "
        f"{left['reserved_bytes']} reserved, {left['quarantined_bytes']} quarantined bytes"
    )
    return figures


def _abort_all(running: Services, engines: list[_Engine], wanted: int, kills: int) -> int:
    """How often the second agent was killed."""
    killed = done = 0
    open_engines = list(engines)
    while open_engines:
        for engine in list(open_engines):
            if not engine.advance():
                open_engines.remove(engine)
            done += 1
            if killed < kills and done >= wanted * (killed + 1) // (kills + 1):
                running.kill("two")
                running.start_agent("two")
                killed += 1
    return killed


def _wait_until_quiet(running: Services) -> dict[str, int]:
    """What is left when nothing is, or when the time is up."""
    limit = time.monotonic() + _QUIET_SECONDS
    while True:
        stats = running.stats()
        left = {
            "leases": stats.held_leases + stats.busy_leases,
            "reserved_bytes": stats.reserved_bytes,
            "quarantined_bytes": stats.quarantined_bytes,
        }
        if not any(left.values()) or time.monotonic() > limit:
            return left
        time.sleep(_POLL_SECONDS)


def targets(section: dict[str, Any]) -> list[Target]:
    del section
    left = ("leases", "reserved_bytes", "quarantined_bytes", "used_bytes_after_clear")
    return [
        at_least("requests aborted at random", _REQUESTS, itemgetter("requests")),
        *(at_most(f"{name} left by them", 0, itemgetter(name)) for name in left),
    ]
