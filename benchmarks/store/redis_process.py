"""A fresh Redis server without persistence."""

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_SECONDS = 20.0


@contextmanager
def running_redis() -> Iterator[dict[str, str]]:
    """URLs of a fresh server, by transport."""
    with tempfile.TemporaryDirectory(prefix="kvb-bench-") as folder, ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        path = f"{folder}/redis.sock"
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", path]
        command += ["--save", "", "--appendonly", "no", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        give_up_at = time.monotonic() + _SECONDS
        while not Path(path).exists():
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.02)
        yield {"unix": f"unix://{path}", "tcp": f"redis://127.0.0.1:{port}"}
