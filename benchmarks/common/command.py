"""What every bench's command does: some sections or all, a JSON result after each, a summary at the end.

Ends with 0 whatever was measured: it is a benchmark.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console

from benchmarks.common import report
from benchmarks.common.processes import PEERS_PYTHON, ROOT, touch_memory
from benchmarks.common.screen import Screen
from benchmarks.common.targets import Row

Section = Callable[[bool, Screen], Row]


@dataclass(frozen=True)
class Bench:
    """`sections` are run in order: (quick, screen) -> figures. `targets` gets all figures and the machine's facts.

    `memory`: bytes that are touched before (full, quick). `tables` shows figures that are more than targets.
    """

    name: str
    about: str
    sections: dict[str, Section]
    targets: Callable[[dict[str, Row], Row], Iterable[Row]]
    memory: tuple[int, int] = (0, 0)
    tables: Callable[[Console, dict[str, Row]], None] = lambda _console, _sections: None

    def main(self, argv: list[str]) -> None:
        arguments = self._arguments(argv)
        quick: bool = arguments.quick
        path = ROOT / "build/bench" / f"{self.name}{'-quick' if quick else ''}.json"
        console = Console(width=None if sys.stdout.isatty() else 140)
        screen = Screen(console)
        facts = report.machine()
        if size := self.memory[quick]:
            touch_memory(size)
        if not PEERS_PYTHON.exists():
            screen.line("The peers are not installed (make bench-peers): no ratios to them this time.")
        # Sections that are not run now stay as they were; each says when it was made.
        sections = report.earlier(path)
        targets: list[Row] = []
        for name in [name for name in self.sections if name in arguments.only]:
            with screen.section(name):
                made = datetime.now(UTC).isoformat(timespec="seconds")
                sections[name] = {"section_made": made, **self.sections[name](quick, screen)}
            targets = list(self.targets(sections, facts))
            report.write(path, sections, facts, targets, quick)
        self.tables(console, sections)
        report.show_targets(console, targets)
        screen.line(f"written: {path.relative_to(ROOT)}")

    def _arguments(self, argv: list[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"bench-{self.name}", description=self.about)
        parser.add_argument("--quick", action="store_true", help="small sizes; targets need the full ones")
        parser.add_argument(
            "--only",
            type=lambda value: value.split(","),
            default=list(self.sections),
            help=f"of {','.join(self.sections)}",
        )
        arguments = parser.parse_args(argv)
        unknown = set(arguments.only) - set(self.sections)
        if unknown:
            parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(self.sections)}")
        return arguments
