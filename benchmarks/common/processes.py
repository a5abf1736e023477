"""Starting what a bench measures: workers behind pipes. Each ends with its block."""

import json
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PEERS_PYTHON = ROOT / "build/peers/venv/bin/python"
_END_SECONDS = 30.0


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "LMCACHE_LOG_LEVEL": "CRITICAL", "PYTHONWARNINGS": "ignore"}


class Piped:
    """A process that answers JSON lines."""

    def __init__(self, command: Sequence[str], errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                env=environment(),
            )  # fmt: skip
        self.pid = self._process.pid

    def send(self, do: str, **values: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the bench ended: {self._errors.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        self.send(do, **values)
        return self.receive()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def piped(modules: dict[str, tuple[Path | str, Sequence[str]]]) -> Iterator[dict[str, Piped]]:
    """Workers by name: (interpreter, module and its arguments) each. They start at once and are ready when yielded."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb-bench-")))
        started = {}
        for name, (python, arguments) in modules.items():
            started[name] = Piped([str(python), "-m", *arguments], folder / name)
            stack.callback(started[name].close)
        for process in started.values():
            process.receive()
        yield started


def at_once(processes: Sequence[Piped], do: str, **values: Any) -> list[dict[str, Any]]:
    """The answers of several processes that work at the same time."""
    for process in processes:
        process.send(do, **values)
    return [process.receive() for process in processes]


def touch_memory(size: int) -> None:
    """Makes the machine have so much memory at hand: a virtual one fetches what was never used before slowly."""
    with mmap.mmap(-1, size) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, all its threads together."""
    # The kernel's name for another process's CPU clock: clock_getcpuclockid(3).
    return time.clock_gettime((~pid << 3) | 2)
