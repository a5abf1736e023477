"""Keeps one process running: starts it, waits until it answers, restarts it when it dies, stops it."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_PROBE_SECONDS = (0.05, 0.25)
# Ends that a stop is expected to have.
_AS_ASKED = ("exited with code 0", "killed by SIGTERM")


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    # Died; started again after a pause.
    WAITING = "died"
    STOPPED = "stopped"
    # Died before it was ever ready: a wrong setting does not heal by itself.
    FAILED = "failed"


@dataclass(frozen=True)
class Spec:
    """One process: its command line, its log file, and how to ask whether it is ready."""

    name: str
    command: list[str]
    log: Path
    probe: Callable[[], bool]


@dataclass(frozen=True)
class Change:
    """A process entered a state. `detail` is for people."""

    name: str
    state: State
    detail: str = ""


@dataclass(frozen=True)
class Backoff:
    """Seconds between a death and the next start: doubled each time, until a process ran well."""

    first: float = 0.2
    longest: float = 5.0
    well_after: float = 10.0

    def pause(self, deaths: int) -> float:
        return float(min(self.first * 2 ** min(deaths - 1, 30), self.longest))


class Keeper:
    """Keeps the process of `spec` running in a thread of its own; `on_change` is called from there."""

    def __init__(self, spec: Spec, backoff: Backoff, on_change: Callable[[Change], None]) -> None:
        self.spec = spec
        self.state = State.STOPPED
        self._backoff = backoff
        self._on_change = on_change
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._restart = True
        self._killed = False
        self._was_ready = False
        self._log_start = 0
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The running process; None between a death and the next start."""
        with self._lock:
            return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts a stopped or failed process; one that is kept running is left alone."""
        if self._thread is not None:
            if self._thread.is_alive() and self._restart:
                return
            self._thread.join()
        self._stopping.clear()
        self._restart, self._killed, self._was_ready = True, False, False
        self._enter(State.STARTING)
        self._thread = threading.Thread(target=self._run, name=f"keep-{self.spec.name}", daemon=True)
        self._thread.start()

    def kill(self, *, restart: bool) -> None:
        """SIGKILL, as a crash would be; the process is started again only with `restart`."""
        with self._lock:
            self._restart = restart
            if self._process is not None:
                # Nobody may take the dying process for a ready one.
                self.state, self._killed = State.WAITING, True
                self._process.kill()

    def stop(self, seconds: float) -> None:
        """SIGTERM, and SIGKILL after `seconds`. Idempotent."""
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                self._process.terminate()
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            with self._lock:
                if self._process is not None:
                    self._process.kill()
            self._thread.join()

    def _enter(self, state: State, detail: str = "") -> None:
        with self._lock:
            self.state = state
        self._on_change(Change(self.spec.name, state, detail))

    def _run(self) -> None:
        deaths = 0
        while True:
            started = time.monotonic()
            try:
                process = self._spawn()
            except OSError as error:
                return self._enter(State.FAILED, f"cannot start {self.spec.command[0]}: {error.strerror}")
            if process is None:
                return self._enter(State.STOPPED)
            self._await_ready(process, started)
            how = _how_it_ended(process.wait())
            with self._lock:
                self._process = None
                may_restart = self._restart and (self._was_ready or self._killed)
                failed = not self._was_ready and not self._killed
                self._killed = False
            if self._stopping.is_set() or (not failed and not may_restart):
                return self._enter(State.STOPPED, "" if how in _AS_ASKED else how)
            if failed:
                return self._enter(State.FAILED, self._last_words() or how)
            deaths = 1 if time.monotonic() - started >= self._backoff.well_after else deaths + 1
            pause = self._backoff.pause(deaths)
            self._enter(State.WAITING, f"{how}; starting again in {pause:.1f} s")
            self._stopping.wait(pause)

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        """None if it is to stay down. A group of its own: Ctrl-C reaches the supervisor alone, which stops in order."""
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "KVBLEND_SUPERVISED": str(os.getpid())}
        with self.spec.log.open("ab") as log, self._lock:
            if self._stopping.is_set() or not self._restart:
                return None
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.spec.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
            )
            return self._process

    def _await_ready(self, process: subprocess.Popen[bytes], started: float) -> None:
        pause, longest = _PROBE_SECONDS
        while process.poll() is None and not self._stopping.is_set():
            if self.spec.probe():
                with self._lock:
                    if self._killed:
                        return
                    self._was_ready = True
                self._enter(State.READY, f"pid {process.pid}, after {time.monotonic() - started:.1f} s")
                return
            self._stopping.wait(pause)
            pause = min(1.5 * pause, longest)

    def _last_words(self) -> str:
        """The last line of this start's log: a refused setting says why in one line."""
        with self.spec.log.open("rb") as log:
            log.seek(self._log_start)
            lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""


def _how_it_ended(code: int) -> str:
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exited with code {code}"
