"""Millions of chunks registered and removed again: the table is as fast and as small as before."""

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.common.processes import Piped, cores
from benchmarks.common.screen import Screen
from benchmarks.matcher.plan import Plan
from benchmarks.matcher.processes import contestants

_TOKENS = 1 << 17
_STEPS = 20


def run(plan: Plan, screen: Screen) -> dict[str, Any]:
    """Section `churn`: kvblend alone; lmcache's local matcher never gives an id back, and is full after 2^20 chunks."""
    numbers = itertools.count(1)
    with contestants(cores()[-1], "ours") as workers:
        worker = workers["ours"]
        worker.ask("fill", stop=plan.churn_base)
        before = _look(plan, worker, numbers)
        seconds = 0.0
        step = plan.churn_cycles // _STEPS
        for done in range(0, plan.churn_cycles, step):
            with screen.working(f"churn: {done:,} of {plan.churn_cycles:,} chunks registered and removed"):
                last = done + step >= plan.churn_cycles
                seconds += worker.ask("cycle", first=done, count=step, drain=last)["seconds"]
        after = _look(plan, worker, numbers)
    screen.line(f"{plan.churn_cycles:,} cycles, {plan.churn_cycles / seconds:,.0f} a second")
    for name, unit in (("ms", 1), ("table_bytes", 1_000_000), ("resident", 1_000_000)):
        words = {"ms": "ms of a match", "table_bytes": "MB of the table", "resident": "MB of the process"}[name]
        screen.line(f"{words}: {before[name] / unit:.3f} before, {after[name] / unit:.3f} after")
    return {
        "chunks": plan.churn_base,
        "cycles": plan.churn_cycles,
        "cycles_s": plan.churn_cycles / seconds,
        "before": before,
        "after": after,
    }


def _look(plan: Plan, worker: Piped, numbers: Iterator[int]) -> dict[str, Any]:
    rounds, each = plan.queries[_TOKENS]
    asked = list(itertools.islice(numbers, 3 * rounds * each + 1))
    milliseconds = worker.ask("match", tokens=_TOKENS, coverage=50, numbers=asked)["ms"]
    sizes = worker.ask("table_bytes") | worker.ask("memory")
    return {"tokens": _TOKENS, "coverage": 50, "ms": statistics.median(milliseconds), **sizes}
