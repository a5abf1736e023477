"""Hit rates of the default eviction policy, of general ones and of Belady's optimum on public request traces.

What runs is what `kvblend bench eviction` runs: the store's own classes. Scored on each trace's second half with the
cache warm; the default's parameters were found on the first halves.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.common.processes import ROOT
from benchmarks.common.screen import Screen
from benchmarks.common.targets import Row, Target
from cli.bench import cachesim
from cli.bench.eviction import OPTIMUM, known_policies, measure
from services.store.eviction import DEFAULT_POLICY
from services.store.eviction.replay import Trace, read_trace

TRACES = ("mooncake_conversation_trace", "mooncake_synthetic_trace")
_FOLDER = ROOT.parent / "shared/data"
_PERCENTS = (1.0, 5.0, 10.0, 25.0)
_ABOVE_AT = (5.0, 10.0)
_QUICK_REQUESTS = 400
# What is called level.
_MARGIN = 0.005


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    rows = []
    paths = [path for name in TRACES if (path := _FOLDER / f"{name}.jsonl").exists()]
    for path in paths:
        trace = read_trace(path)
        if quick:
            trace = Trace(trace.name, trace.requests[:_QUICK_REQUESTS])
        with screen.working(f"{trace.name}: {len(known_policies())} policies, {len(_PERCENTS)} sizes"):
            rows += [asdict(row) for row in measure([trace], _PERCENTS, known_policies())]
        for percent in _PERCENTS:
            found = compare(rows, trace.name, percent, "blocks")
            screen.line(
                f"{trace.name}, {percent:g} %: {found['default']:.4f}, best general {found['general']:.4f} "
                f"({found['policy']}), optimum {found['optimum']:.4f}"
            )
    if len(paths) < len(TRACES):
        screen.line(f"Traces that are not in {_FOLDER} were left out.")
    return {"quick": quick, "rows": rows}


def compare(rows: list[Row], trace: str, percent: float, rate: str) -> Row:
    """default, general (the best, and which), optimum, and the share of the gap between them that is closed.

    `rate`: blocks or prefix. Raises LookupError where they were not measured.
    """
    here = [row for row in rows if row["trace"] == trace and row["percent"] == percent]
    by_policy = {row["policy"]: row[rate] for row in here}
    default, optimum = by_policy.pop(DEFAULT_POLICY), by_policy.pop(OPTIMUM)
    policy = max(by_policy, key=lambda name: by_policy[name])
    general = by_policy[policy]
    closed = (default - general) / (optimum - general) if optimum > general else 0.0
    return {"default": default, "general": general, "policy": policy, "optimum": optimum, "gap_closed": closed}


def targets(_section: dict[str, Any]) -> list[Target]:
    return [_target(trace, percent, rate) for trace in TRACES for percent in _PERCENTS for rate in ("blocks", "prefix")]


def _target(trace: str, percent: float, rate: str) -> Target:
    above = percent in _ABOVE_AT
    wanted = "above the best general policy" if above else f"within {_MARGIN} of the best general policy"
    bound = 0.0 if above else -_MARGIN
    return Target(
        f"eviction: {trace}, {percent:g} %, {rate}",
        wanted,
        _measured(trace, percent, rate),
        lambda value: value["default"] - value["general"] > bound,
    )


def _measured(trace: str, percent: float, rate: str) -> Callable[[Row], Row]:
    def found(section: Row) -> Row:
        if section["quick"]:
            raise LookupError("run small")
        if not set(cachesim.POLICIES) & {row["policy"] for row in section["rows"]}:
            raise LookupError("without libcachesim the best general policy is not among them")
        return compare(section["rows"], trace, percent, rate)

    return found
