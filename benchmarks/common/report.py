"""A bench's JSON result under `build/bench/`, and its summary for people."""

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

from benchmarks.common.processes import PEERS_PYTHON
from benchmarks.common.targets import Row

_PACKAGES = ("numpy", "numba", "grpcio", "protobuf", "redis", "hiredis")
_WORDS = {True: Text("pass", style="green"), False: Text("FAIL", style="bold red"), None: Text("not measured", "dim")}


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


def write(path: Path, sections: dict[str, Row], facts: Row, targets: list[Row], quick: bool) -> None:
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


def earlier(path: Path) -> dict[str, Row]:
    """Sections of the run before: kept when only some are run again."""
    if not path.exists():
        return {}
    document: dict[str, Any] = json.loads(path.read_text())
    return {name: value for name, value in document.items() if isinstance(value, dict) and "section_made" in value}


def show_targets(console: Console, targets: list[Row]) -> None:
    table = Table(title="Done when", title_justify="left", box=None, pad_edge=False)
    for column in ("target", "wanted", "measured", ""):
        table.add_column(column)
    for target in targets:
        table.add_row(target["name"], target["target"], figure(target["value"]), _WORDS[target["passed"]])
    console.print(table)


def figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {figure(one)}" for name, one in value.items())
    return f"{value:.4g}" if abs(value) < 100 else f"{value:,.0f}"
