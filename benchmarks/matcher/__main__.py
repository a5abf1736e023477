"""`python -m benchmarks.matcher`: measures, writes build/bench/matcher.json, says what was reached.

Ends with 0 whatever was measured: it is a benchmark. Some sections again: --only match,rpc.
"""

import argparse
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from benchmarks.matcher import churn, coverage, match, readiness, registration, replicas, report, rpc
from benchmarks.matcher.plan import FULL, QUICK, Plan
from benchmarks.matcher.processes import PEERS_PYTHON, ROOT, touch_memory
from benchmarks.matcher.screen import Screen

SECTIONS: dict[str, Callable[[Plan, Screen], dict[str, Any]]] = {
    "match": match.run,
    "durable": registration.durable,
    "rpc": rpc.run,
    "replicas": replicas.run,
    "readiness": readiness.run,
    "churn": churn.run,
    "coverage": coverage.run,
}


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-matcher", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute; targets need the full ones")
    parser.add_argument(
        "--only", type=lambda value: value.split(","), default=list(SECTIONS), help=f"of {','.join(SECTIONS)}"
    )
    arguments = parser.parse_args(argv)
    unknown = set(arguments.only) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return arguments


def main(argv: list[str]) -> None:
    arguments = _arguments(argv)
    plan = QUICK if arguments.quick else FULL
    path = ROOT / "build/bench" / ("matcher-quick.json" if plan.quick else "matcher.json")
    console = Console(width=None if sys.stdout.isatty() else 140)
    screen = Screen(console)
    facts = report.machine()
    touch_memory(plan.memory)
    if not PEERS_PYTHON.exists():
        screen.line("The peers are not installed (make bench-peers): no ratios this time.")
    # Sections that are not run now stay as they were; each says when it was made.
    sections = report.earlier(path)
    for name in SECTIONS:
        if name in arguments.only:
            with screen.section(name):
                made = datetime.now(UTC).isoformat(timespec="seconds")
                sections[name] = {"section_made": made, **SECTIONS[name](plan, screen)}
            report.write(path, sections, facts, plan.quick)
    report.summary(console, sections, report.write(path, sections, facts, plan.quick))
    screen.line(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
