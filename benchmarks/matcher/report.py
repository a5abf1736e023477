"""`build/bench/matcher.json`, and a summary for people."""

import json
import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.matcher.processes import PEERS_PYTHON
from benchmarks.matcher.targets import done_when

_PACKAGES = ("numpy", "numba", "grpcio", "protobuf", "redis", "hiredis")
_WORDS = {True: Text("pass", style="green"), False: Text("FAIL", style="bold red"), None: Text("not measured", "dim")}

Row = dict[str, Any]


def machine() -> Row:
    cpu = platform.processor() or platform.machine()
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip()
    except (OSError, IndexError):
        pass
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "load_at_start": os.getloadavg()[0],
    }


def versions() -> Row:
    found = {name: metadata.version(name) for name in ("kvblend", *_PACKAGES)}
    peers = PEERS_PYTHON.parents[1].glob("lib/python*/site-packages/lmcache-*.dist-info")
    lmcache = next((folder.name.removesuffix(".dist-info").partition("-")[2] for folder in peers), None)
    return {"python": platform.python_version(), **found, "lmcache": lmcache}


def write(path: Path, sections: dict[str, Row], facts: Row, quick: bool) -> list[Row]:
    """Writes the file; returns the targets."""
    targets = done_when(sections, facts["cores"])
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": facts,
        "versions": versions(),
        **sections,
        "done_when": targets,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return targets


def earlier(path: Path) -> dict[str, Row]:
    """Sections of the run before: kept when only some are run again."""
    if not path.exists():
        return {}
    document: dict[str, Any] = json.loads(path.read_text())
    return {name: value for name, value in document.items() if isinstance(value, dict) and "section_made" in value}


def summary(console: Console, sections: dict[str, Row], targets: list[Row]) -> None:
    if "match" in sections:
        console.print(_match_table(sections["match"]))
    table = Table(title="Done when", title_justify="left", box=None, pad_edge=False)
    for column in ("target", "wanted", "measured", ""):
        table.add_column(column)
    for target in targets:
        table.add_row(target["name"], target["target"], _figure(target["value"]), _WORDS[target["passed"]])
    console.print(table)
    if not PEERS_PYTHON.exists():
        console.print("Ratios are missing: the peers are not installed. make bench-peers", style="yellow")


def _match_table(section: Row) -> Table:
    table = Table(title="Match, median ms", title_justify="left", box=None, pad_edge=False)
    columns = ("chunks", "tokens", "covered", "ours", "all classes", "local", "x", "fleet", "x", "recall", "false")
    for column in columns:
        table.add_column(column, justify="right")
    for row in section["rows"]:
        table.add_row(
            f"{row['table']:,}", f"{row['tokens']:,}", f"{row['coverage']} %", _figure(row["ours_ms"]),
            _figure(row["mixed_ms"]), _figure(row.get("local_ms")), _figure(row["ratio_local"]),
            _figure(row.get("fleet_ms")), _figure(row["ratio_fleet"]), _figure(row["recall"]),
            str(row["false_matches"]),
        )  # fmt: skip
    return table


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_figure(one)}" for name, one in value.items())
    return f"{value:.4g}" if abs(value) < 100 else f"{value:,.0f}"
