"""Forks stores and clients that have imported everything already: processes like others that start at once.

`Zygote` is the parent's side; run as a program this file is the process that forks.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any


class Forked:
    """As much of a Popen as tests use. The zygote reaps it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """None while it runs; why it ended is not known."""
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def _look(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._fd], [], [], timeout)[0]:
            self.returncode = -1
            os.close(self._fd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._fd, number)


class Zygote:
    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    def fork(self, program: Sequence[str], *streams: IO[Any] | int, **environment: str) -> Forked:
        """`program`: "store", "client" or a fault of broken_store.py, and arguments. Streams: stdin, stdout, stderr."""
        message = json.dumps([program, environment]).encode()
        socket.send_fds(self._channel, [message], [s if isinstance(s, int) else s.fileno() for s in streams])
        return Forked(int(self._channel.recv(64)))

    def close(self) -> None:
        self._channel.close()
        self._process.wait(30)


def _serve(channel: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, streams, _, _ = socket.recv_fds(channel, 1 << 16, 3)
        if not message:
            return
        pid = os.fork()
        if not pid:
            channel.close()
            _become(*json.loads(message), streams)
        for stream in streams:
            os.close(stream)
        channel.send(str(pid).encode())


def _become(program: list[str], environment: dict[str, str], streams: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.update(environment)
    code = 1
    try:
        failpoints.arm_from_environment()
        sys.argv = program
        if program[0] == "client":
            lifecycle_client.main()
        else:
            if program[0] != "store":
                broken_store.break_it(program[0])
            store_main()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]
    import broken_store
    import lifecycle_client

    from services.common import failpoints
    from services.store.__main__ import main as store_main

    _serve(socket.socket(fileno=int(sys.argv[1])))
