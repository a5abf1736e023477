"""A matcher, a store and an agent on this machine: for `kvblend up`, the demo and tests."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from cli.keeper import Backoff, Change, Spec
from cli.probe import Peer
from cli.sockets import socket_in, why_no_sockets
from cli.supervisor import Supervisor
from cli.targets import SERVICES, socket_of, target_of

MODULES = {"matcher": "services.matcher", "store": "services.store", "agent": "services.gpu_agent"}
SHARED_MEMORY = Path("/dev/shm")

# Followed by the owner's pid, so that `kvblend doctor` finds what a killed process left.
ARENA_PREFIX = "kvblend-local-"

# No balancer watches a laptop's services: nothing to drain, short grace.
_STOP_FLAGS = ["--drain-seconds", "0", "--grace-seconds", "2"]
_GIB = 1 << 30
# Of the matcher's table: some 200 000 chunks of 256 tokens.
_TABLE_BYTES = 256 << 20


@dataclass(frozen=True)
class Plan:
    """Settings of the three services. `listen` is by service name; sizes in bytes; `extra`: more flags by service.

    `run_dir`: logs, and the matcher's log. What the matcher knows outlives it there, also from one start of all
    services to the next. Only what is true again is used then: a new arena is a new epoch of its store.
    """

    name: str
    run_dir: Path
    listen: Mapping[str, str]
    arena_dir: Path
    arena_bytes: int
    chunk_tokens: int
    redis_url: str = ""
    device: str = "cpu"
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Where the matcher is, if it is another node's.
    matcher: str = ""

    def target(self, service: str) -> str:
        return self.matcher if service == "matcher" and self.matcher else target_of(self.listen[service])

    def target_within(self, service: str) -> str:
        """Where the others of this host call it: at its socket, if it has one."""
        own = "" if service == "matcher" and self.matcher else socket_of(self.listen[service])
        return own or self.target(service)

    @property
    def services(self) -> list[str]:
        """What runs here, in start order."""
        return [service for service in SERVICES if service != "matcher" or not self.matcher]

    def flags(self, service: str) -> list[str]:
        """What follows `python -m services.X`."""
        flags = ["--listen", self.listen[service], "--log-json", "false", *_STOP_FLAGS]
        if service == "matcher":
            flags += ["--log", f"sqlite:{self.run_dir.resolve() / 'matcher.db'}"]
            flags += ["--memory-limit-bytes", str(_TABLE_BYTES)]
        if service == "store":
            flags += ["--name", self.name, "--matcher", self.target_within("matcher")]
            flags += ["--arena-dir", str(self.arena_dir), "--arena-bytes", str(self.arena_bytes)]
            flags += ["--slab-bytes", str(min(self.arena_bytes, _GIB)), "--chunk-tokens", str(self.chunk_tokens)]
            flags += ["--redis-url", self.redis_url] if self.redis_url else []
        if service == "agent":
            flags += ["--name", self.name, "--store", self.target_within("store"), "--device", self.device]
        return [*flags, *self.extra.get(service, ())]

    def output(self, service: str) -> Path:
        return self.run_dir / "logs" / f"{service}.log"

    def command(self, service: str) -> list[str]:
        return [sys.executable, "-m", MODULES[service], *self.flags(service)]


class LocalServices:
    """The three services, supervised, on unix sockets. When the `with` block ends everything is gone except what is in
    a `run_dir` that was given (see Plan).

    `with LocalServices() as services:` starts them and waits until they are ready. `matcher`: gRPC target of another
    node's matcher, then none is started here.
    The first start of a version compiles its kernels, for up to a minute on two busy cores.
    Raises StartFailed (a setting was refused, say) or TimeoutError.
    """

    def __init__(
        self,
        run_dir: Path | None = None,
        *,
        arena_bytes: int = 1 << 30,
        chunk_tokens: int = 256,
        redis_url: str | None = None,
        name: str | None = None,
        matcher: str = "",
        device: str = "cpu",
        extra: Mapping[str, Sequence[str]] | None = None,
        backoff: Backoff | None = None,
        on_change: Callable[[Change], None] | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        self._start_timeout = start_timeout
        self._own_folders = [Path(tempfile.mkdtemp(prefix=f"{ARENA_PREFIX}{os.getpid()}-", dir=SHARED_MEMORY))]
        sockets = self._socket_folder(run_dir)
        self.run_dir = run_dir or sockets
        self.plan = Plan(
            # The same from one start to the next: what a store of another name had would never be taken back.
            name=name or "local",
            run_dir=self.run_dir,
            listen={service: socket_in(sockets, service) for service in SERVICES},
            arena_dir=self._own_folders[0],
            arena_bytes=arena_bytes,
            chunk_tokens=chunk_tokens,
            redis_url=redis_url or "",
            device=device,
            extra=extra or {},
            matcher=matcher,
        )
        self._peers = {service: Peer(service, self.plan.target(service)) for service in self.plan.services}
        specs = make_specs(self.plan, self._peers)
        self._supervisor = Supervisor(specs, backoff=backoff, on_change=on_change)

    def _socket_folder(self, run_dir: Path | None) -> Path:
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
            if not why_no_sockets(run_dir.resolve()):
                return run_dir.resolve()
        self._own_folders.append(Path(tempfile.mkdtemp(prefix="kvblend-", dir="/tmp")))
        return self._own_folders[-1]

    @property
    def agent_target(self) -> str:
        return self.plan.target("agent")

    @property
    def store_target(self) -> str:
        return self.plan.target("store")

    @property
    def matcher_target(self) -> str:
        return self.plan.target("matcher")

    def __enter__(self) -> Self:
        self._supervisor.__enter__()
        try:
            self.wait_ready(self._start_timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._supervisor.stop()
        for peer in self._peers.values():
            peer.close()
        for folder in self._own_folders:
            shutil.rmtree(folder, ignore_errors=True)

    def pid(self, service: str) -> int | None:
        """The running process of "matcher", "store" or "agent"; None while there is none."""
        return self._supervisor.pid(service)

    def log(self, service: str) -> Path:
        return self.plan.output(service)

    def kill(self, service: str, *, restart: bool = True) -> None:
        """SIGKILL; started again by itself unless `restart` is False (then `start` does)."""
        self._supervisor.kill(service, restart=restart)

    def start(self, service: str) -> None:
        self._supervisor.start(service)

    def wait_ready(self, timeout: float = 60.0) -> None:
        self._supervisor.wait_ready(timeout)


def make_specs(plan: Plan, peers: Mapping[str, Peer]) -> list[Spec]:
    """The processes in start order."""
    is_ready: dict[str, Callable[[], bool]] = {service: peers[service].is_ready for service in plan.services}
    # They start together, and the store is first to look: without this, `ping` right behind "ready" would complain.
    store = peers["store"]
    is_ready["store"] = lambda: store.is_ready() and store.has_met_matcher()
    return [Spec(service, plan.command(service), plan.output(service), is_ready[service]) for service in plan.services]
