"""The bench's way to L2, small: whatever the wire does, lookups are answered, with the bytes that were stored."""

import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.common.processes import piped
from benchmarks.common.screen import Screen
from benchmarks.common.targets import entry
from benchmarks.store import throttled

MIB = 1 << 20


def test_l2_at_any_speed_or_stopped_answers_every_lookup() -> None:
    """The engine of the bench compares what it copies with what it had stored."""
    figures = throttled.run(quick=True, screen=Screen(Console(quiet=True)))
    rows = {row["wire"]: row for row in figures["rows"]}
    assert set(rows) == {"unlimited", "1 MB/s", "stopped", "slow in the middle"}
    for name in ("1 MB/s", "stopped"):
        assert rows[name]["reused_median"] == 0.0
        assert rows[name]["lookup_ms_worst"] < 1e3 * throttled.DEADLINE / 2, "nobody waits for the deadline"
    assert all(entry(target, figures)["passed"] is None for target in throttled.targets(figures)), "only at full size"


def test_the_wire_is_as_fast_as_it_was_told_and_stops(shm_dir: Path) -> None:
    upstream, path = socket.socket(socket.AF_UNIX), shm_dir / "wire"
    upstream.bind(str(shm_dir / "up"))
    upstream.listen()
    arguments = ["benchmarks.store.throttle", str(path), str(shm_dir / "up")]
    with upstream, piped({"wire": (sys.executable, arguments)}) as workers, socket.socket(socket.AF_UNIX) as client:
        wire = workers["wire"]
        wire.ask("set", bytes_per_second=20e6, latency=0.0)
        client.connect(str(path))
        server, _ = upstream.accept()
        with server:
            begun = time.monotonic()
            threading.Thread(target=server.sendall, args=(bytes(2 * MIB),), daemon=True).start()
            received = 0
            while received < 2 * MIB:
                received += len(client.recv(MIB))
            assert time.monotonic() - begun >= 2 * MIB / 20e6 * 0.9, "no faster than told"
            wire.ask("set", bytes_per_second=0, latency=0.0)
            client.sendall(b"x")
            server.settimeout(0.2)
            with pytest.raises(TimeoutError):
                server.recv(1)
            wire.ask("set", bytes_per_second=None, latency=0.0)
            server.settimeout(20)
            assert server.recv(1) == b"x", "what was held back comes"
