"""`python -m benchmarks.matcher`: measures, writes build/bench/matcher.json, says what was reached.

Some sections again: --only match,rpc.
"""

import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from benchmarks.common.command import Bench, Section
from benchmarks.common.report import figure
from benchmarks.common.screen import Screen
from benchmarks.common.targets import Row
from benchmarks.matcher import churn, coverage, match, readiness, registration, replicas, rpc
from benchmarks.matcher.plan import FULL, QUICK, Plan
from benchmarks.matcher.targets import done_when


def _planned(measure: Callable[[Plan, Screen], Row]) -> Section:
    return lambda quick, screen: measure(QUICK if quick else FULL, screen)


def _tables(console: Console, sections: dict[str, Row]) -> None:
    if "match" not in sections:
        return
    table = Table(title="Match, median ms", title_justify="left", box=None, pad_edge=False)
    columns = ("chunks", "tokens", "covered", "ours", "all classes", "local", "x", "fleet", "x", "recall", "false")
    for column in columns:
        table.add_column(column, justify="right")
    for row in sections["match"]["rows"]:
        table.add_row(
            f"{row['table']:,}", f"{row['tokens']:,}", f"{row['coverage']} %", figure(row["ours_ms"]),
            figure(row["mixed_ms"]), figure(row.get("local_ms")), figure(row["ratio_local"]),
            figure(row.get("fleet_ms")), figure(row["ratio_fleet"]), figure(row["recall"]),
            str(row["false_matches"]),
        )  # fmt: skip
    console.print(table)


BENCH = Bench(
    name="matcher",
    about="The matcher beside lmcache's.",
    sections={
        "match": _planned(match.run),
        "durable": _planned(registration.durable),
        "rpc": _planned(rpc.run),
        "replicas": _planned(replicas.run),
        "readiness": _planned(readiness.run),
        "churn": _planned(churn.run),
        "coverage": _planned(coverage.run),
    },
    targets=lambda sections, facts: done_when(sections, facts["cores"]),
    memory=(FULL.memory, QUICK.memory),
    tables=_tables,
)

if __name__ == "__main__":
    BENCH.main(sys.argv[1:])
