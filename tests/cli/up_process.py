"""`kvblend up` and other commands as processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

KVBLEND = [sys.executable, "-c", "from cli.main import main; main()"]
SHARED_MEMORY = Path("/dev/shm")


class Up:
    """A running `kvblend up` on unix sockets in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.arena = SHARED_MEMORY / f"kvblend-up-{os.getuid()}-{name}"
        self.output = folder / f"{name}.out"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*KVBLEND, *self.arguments()], stdout=output, stderr=subprocess.STDOUT, env=self.environment()
            )

    def environment(self) -> dict[str, str]:
        return {**os.environ, "XDG_RUNTIME_DIR": str(self.folder)}

    def arguments(self) -> list[str]:
        listen = [flag for service in ("matcher", "store", "agent") for flag in self.listen(service)]
        return ["up", "--name", self.name, "--arena-bytes", "64MiB", "--run-dir", str(self.folder / self.name), *listen]

    def listen(self, service: str) -> list[str]:
        return [f"--{service}-listen", self.target(service)]

    def target(self, service: str) -> str:
        return f"unix:{self.folder}/{self.name}-{service}.sock"

    def text(self) -> str:
        return self.output.read_text()

    def await_text(self, wanted: str, count: int = 1) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None, self.text()
            return self.text().count(wanted) >= count

        eventually(is_there)

    def pids(self) -> list[int]:
        """The three services: processes that name sockets of ours, except `up` itself."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != self.process.pid:
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if f"unix:{self.folder}/{self.name}".encode() in command:
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)


def eventually(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.05)


def kvblend(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVBLEND, *arguments], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
