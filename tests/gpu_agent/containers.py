"""Containers, as far as the kernel's namespaces make one, and what they may share with what is outside."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")

# Where an agent may run: beside its engines, or in a container.
PLACES = ["beside", pytest.param("container", marks=needs_root)]

# In front of a command: runs it in PID, IPC, network and mount namespaces of its own, with a /dev/shm of its own. It is
# process 1 there.
CONTAINER = [
    *["unshare", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"],
    *["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"],
]


@contextmanager
def volume(place: str) -> Iterator[Path]:
    """A directory in memory that a process in this place sees as well: outside of /dev/shm if that is a container."""
    with TemporaryDirectory(prefix="kvb-", dir="/dev/shm" if place == "beside" else "/tmp") as directory:
        if place == "beside":
            yield Path(directory)
            return
        subprocess.run(["mount", "-t", "tmpfs", "none", directory], check=True)
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "--lazy", directory], check=True)


def process_in(container: int) -> int:
    """Process 1 of the container that was started as this process."""
    (child,) = Path(f"/proc/{container}/task/{container}/children").read_text().split()
    return int(child)
