"""The matchers that are compared, and clients of matchers: each a process that ends with its block."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.processes import PEERS_PYTHON, Piped, cores, piped

PEERS = ("local", "fleet")


@contextmanager
def contestants(core: int, *names: str) -> Iterator[dict[str, Piped]]:
    """Those of the named ones that can be: peers need their environment. All stay on one core.

    Names other than the peers' are kvblend's, each with a table of its own.
    """
    modules: dict[str, tuple[Path | str, Sequence[str]]] = {}
    for name in names:
        if name not in PEERS:
            modules[name] = (sys.executable, ["benchmarks.matcher.ours", str(core)])
        elif PEERS_PYTHON.exists():
            modules[name] = (PEERS_PYTHON, [f"benchmarks.matcher.peer_{name}", str(core)])
    with piped(modules) as started:
        yield started


@contextmanager
def client_processes(count: int) -> Iterator[list[Piped]]:
    """Clients of matchers, on any core."""
    anywhere = ",".join(map(str, cores()))
    with piped({f"c{i}": (sys.executable, ["benchmarks.matcher.client", anywhere]) for i in range(count)}) as started:
        yield list(started.values())
