"""`kvblend up`: a matcher, a store and an agent as supervised processes, until Ctrl-C."""

import contextlib
import fcntl
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from cli.keeper import Change, State
from cli.local import MODULES, SHARED_MEMORY, Plan, make_specs
from cli.probe import Peer
from cli.sockets import socket_in, why_no_sockets
from cli.supervisor import StartFailed, Supervisor
from cli.targets import SERVICES, is_exposed, is_free, socket_of
from cli.units import format_bytes, parse_bytes

# The first start of a version compiles its kernels, for up to a minute on two busy cores.
_START_SECONDS = 120.0
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_SETTINGS = {"matcher": "MatcherSettings", "store": "StoreSettings", "agent": "AgentSettings"}


@dataclass(frozen=True)
class UpOptions:
    """As given on the command line."""

    name: str
    arena_bytes: str
    chunk_tokens: int
    redis_url: str
    run_dir: Path | None
    listen: Mapping[str, str]
    device: str
    gpu: str


def run(options: UpOptions) -> int:
    """Serves until SIGINT or SIGTERM; 1: refused or failed to start, with one line that says why."""
    plan = _plan(options)
    _refuse_wrong_settings(plan)
    _make_folders(plan)
    by_name = _only_one(_runtime_folder() / f"{plan.name}.lock", "name", plan.name, "running")
    # It has the sockets: gRPC takes a name from whoever listens there.
    by_folder = _only_one(plan.run_dir / "up.lock", "run-dir", str(plan.run_dir), "in use")
    with by_name, by_folder:
        no_sockets = why_no_sockets(plan.run_dir)
        if not no_sockets:
            plan = _with_sockets(plan)
        _refuse_taken_addresses(plan)
        return _serve(plan, no_sockets)


def _plan(options: UpOptions) -> Plan:
    if not _NAME.fullmatch(options.name):
        _refuse("name", options.name, "1 to 32 of a-z, 0-9 and -, not starting with -")
    try:
        arena_bytes = parse_bytes(options.arena_bytes)
    except ValueError as error:
        _refuse("arena-bytes", options.arena_bytes, str(error))
    return Plan(
        name=options.name,
        run_dir=(options.run_dir or _runtime_folder() / options.name).absolute(),
        listen=options.listen,
        arena_dir=SHARED_MEMORY / f"kvblend-up-{os.getuid()}-{options.name}",
        arena_bytes=arena_bytes,
        chunk_tokens=options.chunk_tokens,
        redis_url=options.redis_url,
        device=options.device,
        extra={"agent": ["--gpu", options.gpu]} if options.gpu else {},
    )


def _refuse(setting: str, value: str, allowed: str) -> NoReturn:
    sys.exit(f"kvblend up: --{setting} {value!r} is refused: {allowed}")


def _refuse_wrong_settings(plan: Plan) -> None:
    """The services' own check, before anything is started: exits with its line."""
    from services.common.config import load_settings

    for service in SERVICES:
        settings = importlib.import_module(f"{MODULES[service]}.settings")
        load_settings(getattr(settings, _SETTINGS[service]), plan.flags(service))


def _refuse_taken_addresses(plan: Plan) -> None:
    """Else what answers there would be taken for our own service."""
    for service in SERVICES:
        for address in plan.listen[service].split(","):
            if not is_free(address):
                _refuse(f"{service}-listen", address, "the address is in use or not of this host (try `kvblend ping`)")


def _runtime_folder() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"kvblend-{os.getuid()}"


def _make_folders(plan: Plan) -> None:
    folder = _runtime_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():
            # In /tmp anybody may have made it, and could take the sockets' names.
            sys.exit(f"kvblend up: {folder} belongs to another user; set XDG_RUNTIME_DIR to a folder of your own")
        plan.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"kvblend up: cannot make {error.filename}: {error.strerror}")


@contextlib.contextmanager
def _only_one(path: Path, setting: str, value: str, state: str) -> Iterator[None]:
    """Holds a lock file, which the kernel drops when this process ends."""
    try:
        file = path.open("a+")
    except OSError as error:
        _refuse(setting, value, f"cannot open {path}: {error.strerror}")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            _refuse(setting, value, f"it is {state} already (pid {file.read().strip()}); choose another {setting}")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _with_sockets(plan: Plan) -> Plan:
    """Each service serves a socket as well, unless it was given one."""
    listen = {
        service: given if socket_of(given) else f"{given},{socket_in(plan.run_dir, service)}"
        for service, given in plan.listen.items()
    }
    return replace(plan, listen=listen)


class _Signals:
    """The first SIGINT or SIGTERM asks to stop, the second to stop at once."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.hurry = threading.Event()

    def __enter__(self) -> "_Signals":
        self._before = {number: signal.signal(number, self._on) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        (self.hurry if self.stop.is_set() else self.stop).set()


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _say_change(change: Change) -> None:
    if change.state in (State.READY, State.WAITING, State.STOPPED):
        _say(f"{change.name:<8} {change.state.value:<8} {change.detail}".rstrip())


def _serve(plan: Plan, no_sockets: str) -> int:
    for service in SERVICES:
        for address in filter(is_exposed, plan.listen[service].split(",")):
            _say(f"warning: {service} listens on {address}: other hosts can reach it, without encryption")
    slow = [service for service in SERVICES if not socket_of(plan.listen[service])]
    if slow:
        _say(f"{', '.join(slow)}: TCP alone, slower within this host; no sockets in --run-dir: {no_sockets}")
    _say(f"starting {', '.join(SERVICES)}; logs in {plan.run_dir / 'logs'}")
    peers = {service: Peer(service, plan.target(service)) for service in SERVICES}
    supervisor = Supervisor(make_specs(plan, peers), on_change=_say_change)
    with _Signals() as signals:
        try:
            with supervisor:
                _await(supervisor, signals)
                if not signals.stop.is_set():
                    _say_ready(plan)
                signals.stop.wait()
                _say("stopping (again to stop at once)")
                threading.Thread(target=_hurry_on, args=(signals, supervisor), daemon=True).start()
        except (StartFailed, TimeoutError) as error:
            # A refused setting's line says itself whose it is.
            print(error if str(error).startswith("kvblend ") else f"kvblend up: {error}", file=sys.stderr)
            return 1
        finally:
            for peer in peers.values():
                peer.close()
            shutil.rmtree(plan.arena_dir, ignore_errors=True)
    return 0


def _hurry_on(signals: _Signals, supervisor: Supervisor) -> None:
    signals.hurry.wait()
    supervisor.hurry()


def _await(supervisor: Supervisor, signals: _Signals) -> None:
    """Until all are ready or a signal came."""
    deadline = time.monotonic() + _START_SECONDS
    while not signals.stop.is_set():
        left = deadline - time.monotonic()
        try:
            return supervisor.wait_ready(min(0.2, max(left, 0.0)))
        except TimeoutError:
            if left <= 0:
                raise


def _say_ready(plan: Plan) -> None:
    agent = plan.target("agent")
    at = "" if agent == "127.0.0.1:50053" else f" --agent {agent}"
    _say(f"ready: agent at {agent}, {format_bytes(plan.arena_bytes)} of shared memory, chunks of {plan.chunk_tokens}")
    near = plan.target_within("agent")
    if near != agent:
        _say(f"engines on this host are served faster at {near}")
    _say(f"next: kvblend status{at} | kvblend demo --agent {agent} | Ctrl-C stops all")
