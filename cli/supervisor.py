"""Runs several processes as one: starts them in order, waits until all are ready, stops them in reverse order."""

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from cli.keeper import Backoff, Change, Keeper, Spec, State

# Longer than the drain and grace times that supervised services get.
STOP_SECONDS = 8.0


class StartFailed(RuntimeError):
    """A process ended before it was ready. The message has its last line."""


class Supervisor:
    """Supervised processes; a context manager that starts and stops them."""

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        backoff: Backoff | None = None,
        on_change: Callable[[Change], None] | None = None,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self._on_change = on_change
        self._stop_seconds = stop_seconds
        self._changed = threading.Condition()
        self._failures: dict[str, str] = {}
        self._keepers = {spec.name: Keeper(spec, backoff or Backoff(), self._note) for spec in specs}

    def _note(self, change: Change) -> None:
        with self._changed:
            if change.state is State.FAILED:
                self._failures[change.name] = change.detail
            else:
                self._failures.pop(change.name, None)
            if self._on_change is not None:
                self._on_change(change)
            self._changed.notify_all()

    def __enter__(self) -> Self:
        for keeper in self._keepers.values():
            keeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """The last started is stopped first. Idempotent."""
        for keeper in reversed(self._keepers.values()):
            keeper.stop(self._stop_seconds)

    def hurry(self) -> None:
        """Kills what still runs; `stop` then returns at once."""
        for keeper in self._keepers.values():
            keeper.kill(restart=False)

    def wait_ready(self, timeout: float) -> None:
        """Until every process that was not stopped on purpose is ready.

        Raises:
            StartFailed: one ended before it was ever ready.
            TimeoutError: names what is not ready after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for name, reason in self._failures.items():
                    raise StartFailed(reason if reason.startswith("kvblend ") else f"{name}: {reason}")
                waiting = [n for n, k in self._keepers.items() if k.state not in (State.READY, State.STOPPED)]
                left = deadline - time.monotonic()
                if not waiting:
                    return
                if left <= 0:
                    logs = ", ".join(str(self._keepers[name].spec.log) for name in waiting)
                    raise TimeoutError(f"not ready after {timeout:g} s: {', '.join(waiting)}; see {logs}")
                self._changed.wait(left)

    def states(self) -> dict[str, State]:
        return {name: keeper.state for name, keeper in self._keepers.items()}

    def pid(self, name: str) -> int | None:
        """The running process; None while there is none."""
        return self._keepers[name].pid

    def kill(self, name: str, *, restart: bool = True) -> None:
        """SIGKILL. Started again by itself, after the backoff, unless `restart` is False."""
        self._keepers[name].kill(restart=restart)

    def start(self, name: str) -> None:
        """Starts one that was killed with restart=False."""
        self._keepers[name].start()
