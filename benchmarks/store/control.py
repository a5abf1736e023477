"""Calls of agents to their store without the bytes: how many a second, with 1 and with 4 agents.

Each agent stores a prompt of 8 chunks, looks it up, begins to copy all of it and ends: Reserve, Commit, Lookup,
BeginCopy, EndCopy, always in this order, always new text.
"""

import sys
import time
from typing import Any

from benchmarks.common.figures import latencies
from benchmarks.common.processes import at_once, cores, piped
from benchmarks.common.screen import Screen
from benchmarks.common.targets import Row, Target
from benchmarks.store.client import store_process

_MIB = 1 << 20
_CLIENTS = (1, 4)
# (arena, seconds)
_FULL = (1024 * _MIB, 8.0)
_QUICK = (256 * _MIB, 1.0)


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    arena_bytes, seconds = _QUICK if quick else _FULL
    rows: list[Row] = []
    anywhere = ",".join(map(str, cores()))
    worker = (sys.executable, ["benchmarks.store.control_client", anywhere])
    for count in _CLIENTS:
        with (
            store_process(arena_bytes) as (target, directory),
            piped({f"agent {number}": worker for number in range(count)}) as agents,
            screen.working(f"{count} agents"),
        ):
            clients = list(agents.values())
            at_once(clients, "open", target=target, directory=str(directory))
            at_once(clients, "run_for", seconds=seconds / 4)
            start = time.perf_counter()
            answers = at_once(clients, "run_for", seconds=seconds)
            rows.append(_row(count, [answer["ms"] for answer in answers], time.perf_counter() - start))
        screen.line(_line(rows[-1]))
    return {"quick": quick, "rows": rows}


def targets(section: dict[str, Any]) -> list[Target]:
    """None: these figures are to be seen, and not to get worse."""
    del section
    return []


def _row(clients: int, answers: list[dict[str, list[float]]], seconds: float) -> Row:
    methods = {method: latencies([ms for answer in answers for ms in answer[method]]) for method in answers[0]}
    calls = sum(row["calls"] for row in methods.values())
    return {"clients": clients, "calls_per_second": calls / seconds, "methods": methods}


def _line(row: Row) -> str:
    methods = ", ".join(f"{method} {value['p50_ms']:.2f}" for method, value in row["methods"].items())
    agents = "agent" if row["clients"] == 1 else "agents"
    return f"{row['clients']} {agents}: {row['calls_per_second']:,.0f} calls a second; p50 ms: {methods}"
