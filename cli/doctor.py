"""`kvblend doctor`: what this machine lacks, and how to get it."""

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from cli.checks import FAIL, OK, WARN, Finding, all_findings
from cli.console import make_console

_STYLES = {OK: "green", WARN: "yellow", FAIL: "red"}


def run(*, redis_url: str, model: Path, as_json: bool) -> int:
    """1 if something that kvblend needs is missing."""
    findings = all_findings(redis_url, model)
    failed = sum(finding.level == FAIL for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(findings, failed)
    return 1 if failed else 0


def _print(findings: list[Finding], failed: int) -> None:
    console = make_console()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style="bold")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.subject, text)
    console.print(table)
    warned = sum(finding.level == WARN for finding in findings)
    if failed:
        console.print(f"[red]{failed} missing[/]: kvblend does not run here yet")
    else:
        console.print("ready to run" + (f", {warned} to look at" if warned else ""))
