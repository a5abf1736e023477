"""The GPU agent as a child of the engine: in the engine's own container it sees the same GPUs, and needs no rights.

One agent serves a GPU, however many engines use it: whoever holds the lock file has started it, the others find it by
its socket, and one of them starts the next when that one ends with its engine. The agent holds the lock as well, so
that there are never two, and it ends by itself within two seconds when its engine is killed.
"""

import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

_log = logging.getLogger("kvblend")

# A unix socket's path has at most 107 bytes, and there is a second one with ".fds" behind its name.
_MOST_PATH_BYTES = 103
_LOOK_SECONDS = 0.2
_FIRST_PAUSE_SECONDS = 0.2
_LAST_PAUSE_SECONDS = 5.0
# It has run well if it did for so long.
_WELL_SECONDS = 10.0
# Above the grace that the agent gives running calls.
_STOP_SECONDS = 8.0
# A process that was killed is gone at once, but one that the kernel does not let go.
_KILLED_SECONDS = 2.0
_CLOSE_SECONDS = _LOOK_SECONDS + _STOP_SECONDS + 2 * _KILLED_SECONDS


class ChildAgent:
    """Keeps an agent for one GPU running while it is open; `target` is what a `KvblendClient` connects to.

    A client needs nothing else: while no agent answers it says "not cached", and it connects by itself to the next.
    """

    def __init__(
        self,
        folder: Path | str,
        store: str,
        *,
        device: str = "cuda",
        gpu: str = "",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it, or finds one that runs; returns at once.

        Args:
            folder: for the socket and the lock, on a local file system; the same for all engines of a container.
            store: the store's gRPC target.
            device: cuda or cpu, as the agent's setting.
            gpu: UUID of the GPU (nvidia-smi -L); empty: the only visible one.
            settings: further settings of the agent by name, such as {"staging_mib": "64"}.

        Raises:
            ValueError: the folder's path is too long for a socket.
            OSError: nothing can be made in the folder.
        """
        name = f"agent-{hashlib.blake2b(f'{device}:{gpu}'.encode(), digest_size=6).hexdigest()}"
        socket = Path(folder).absolute() / f"{name}.sock"
        if len(os.fsencode(socket)) > _MOST_PATH_BYTES:
            raise ValueError(f"{socket} is too long for a unix socket: {_MOST_PATH_BYTES} bytes at most")
        self.target = f"unix:{socket}"
        # Why the agent that this process last started has ended; empty while none has.
        self.problem = ""
        self._lock = socket.with_suffix(".lock").open("wb")
        # Nobody balances over it: there is nothing to drain.
        options = {"listen": self.target, "store": store, "device": device, "gpu": gpu, "drain_seconds": "0"}
        options.update(settings or {})
        self._command = [sys.executable, "-m", "services.gpu_agent"]
        for option, value in options.items():
            self._command += [f"--{option.replace('_', '-')}", value]
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="kvblend-agent", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the agent, while this process has started it and it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def close(self) -> None:
        """Stops the agent if this process started it, within seconds. Idempotent."""
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep(self) -> None:
        with self._lock:
            while not self._closing.is_set():
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._closing.wait(_LOOK_SECONDS)
                    continue
                self._run()
                return

    def _run(self) -> None:
        """Starts the agent again whenever it ends, less and less soon."""
        pause = _FIRST_PAUSE_SECONDS
        while not self._closing.is_set():
            ran_well = self._run_once()
            if self._closing.is_set():
                return
            pause = _FIRST_PAUSE_SECONDS if ran_well else min(2 * pause, _LAST_PAUSE_SECONDS)
            _log.warning("kvblend: %s; it is started again in %.1f s", self.problem, pause)
            self._closing.wait(pause)

    def _run_once(self) -> bool:
        """Whether it ran well. Tells what ended it."""
        # The agent looks whether this process is still its parent (services/common/lifecycle.py).
        environment = {**os.environ, "KVBLEND_SUPERVISED": str(os.getpid())}
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[self._lock.fileno()]
            )
        except OSError as error:
            self.problem = f"the agent cannot be started: {error}"
            return False
        ran_well = self._watch(self._process)
        self.problem = f"the agent ended with exit code {self._process.returncode}"
        return ran_well

    def _watch(self, process: "subprocess.Popen[bytes]") -> bool:
        """Until it ends or has been stopped. Whether it ran well."""
        waited = 0.0
        while process.poll() is None and not self._closing.wait(_LOOK_SECONDS):
            waited += _LOOK_SECONDS
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                try:
                    process.wait(_KILLED_SECONDS)
                except subprocess.TimeoutExpired:
                    # In the driver, most likely. It holds the lock until the system lets it go.
                    _log.error("kvblend: the agent, pid %d, does not end though it was killed", process.pid)
        return waited >= _WELL_SECONDS
