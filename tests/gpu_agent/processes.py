"""Matcher, store and agents as processes of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from agent_rig import Rig
from containers import CONTAINER, process_in
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvblend.client import KvblendClient
from kvblend.layouts import KvShape
from kvblend.memory import SHM_DIR
from kvblend.v1 import store_pb2 as store
from kvblend.v1 import store_pb2_grpc

AGENT = "services.gpu_agent"
_SERVING = health_pb2.HealthCheckResponse.SERVING


class Stack:
    """Sockets, arena and logs in one directory. `arena_mib` is the size of L1."""

    def __init__(self, directory: Path, arena_mib: int) -> None:
        self.directory = directory
        # Names of those that are started in containers.
        self.contained: set[str] = set()
        # Where engines on the CPU have their KV.
        self.shm_dir = SHM_DIR
        self._arena_bytes = arena_mib << 20
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._rigs: list[Rig] = []
        self._channel = grpc.insecure_channel(self.target("store"), options=[("grpc.max_reconnect_backoff_ms", 200)])
        self._store = store_pb2_grpc.StoreServiceStub(self._channel)

    def target(self, name: str) -> str:
        return f"unix:{self.directory}/{name}.sock"

    def start(self, name: str, program: str | Sequence[str], *flags: str, **environment: str) -> None:
        """`program`: a module, or what follows `python`."""
        container = CONTAINER if name in self.contained else []
        run = ["-m", program] if isinstance(program, str) else program
        command = [*container, sys.executable, *run, "--listen", self.target(name), "--drain-seconds", "0", *flags]
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def start_matcher(self) -> None:
        """Returns when it is ready: it may have to compile first."""
        log = ["--log", f"sqlite:{self.directory}/matcher.db", "--memory-limit-bytes", str(64 << 20)]
        self.start("matcher", "services.matcher", *log)
        readiness = health_pb2.HealthCheckRequest(service="readiness")
        give_up_at = time.monotonic() + 150
        with grpc.insecure_channel(self.target("matcher")) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while health.Check(readiness, timeout=150, wait_for_ready=True).status != _SERVING:
                assert time.monotonic() < give_up_at, "the matcher is not ready"
                time.sleep(0.02)

    def start_store(self, *more: str) -> None:
        size = str(self._arena_bytes)
        arena = ["--arena-dir", f"{self.directory}/arena", "--arena-bytes", size, "--slab-bytes", size]
        times = ["--reservation-ttl-seconds", "1", "--session-grace-seconds", "0.5"]
        self.start("store", "services.store", *arena, *times, "--matcher", self.target("matcher"), *more)

    def start_agent(
        self, name: str = "agent", *more: str, program: str | Sequence[str] = AGENT, **environment: str
    ) -> None:
        flags = ["--store", self.target("store"), "--name", name, "--heartbeat-seconds", "0.2"]
        self.start(name, program, *flags, *more, **environment)

    def wait_agent(self, name: str = "agent") -> None:
        """Until the agent has a session with the store."""
        client = KvblendClient(self.target(name), "waiting")
        give_up_at = time.monotonic() + 90
        while not any(ready for _, ready, _ in client.ping().dependencies):
            assert self._processes[name].poll() is None, self.log(name).read_text()[-3000:]
            assert time.monotonic() < give_up_at, self.log(name).read_text()[-3000:]
            time.sleep(0.1)
        client.close()

    def wait_end(self, name: str, seconds: float = 30.0) -> int:
        """Until the process has ended by itself; its status."""
        return self._processes[name].wait(seconds)

    def rig(self, name: str, shape: KvShape, seed: int = 0) -> Rig:
        """An engine that the running agent `name` knows, its rope proven."""
        rig = Rig(self.target(name), shape=shape, seed=seed, shm_dir=self.shm_dir)
        self._rigs.append(rig)
        rig.wait_for(rig._ready, 30)
        rig.register()
        rig.hold_session()
        rig.prove_rope()
        return rig

    def stats(self) -> store.GetStoreStatsResponse:
        return self._store.GetStoreStats(store.GetStoreStatsRequest(), timeout=10, wait_for_ready=True)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def maps(self, name: str) -> str:
        """What it has mapped, as the kernel lists it."""
        return Path(f"/proc/{self.pid(name)}/maps").read_text()

    def pid(self, name: str) -> int:
        pid = self._processes[name].pid
        return process_in(pid) if name in self.contained else pid

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def close(self) -> None:
        for rig in self._rigs:
            rig.close()
        self._channel.close()
        for process in self._processes.values():
            process.kill()
            process.wait()
