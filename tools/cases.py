"""Writes docs/cases.md: which test holds which public report of a fault, or checks that it is fresh.

Usage: python tools/cases.py [--check]

A test that holds case 23 has `_case_23_` in its name; one that holds several lists their numbers.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cases.md"
HEAD = """# Where each known fault is held

Systems of this kind have failed in public in many ways. Each number is one such report, each test the smallest
one that shows the fault; `tools/cases.py` writes this table from the tests' names.

| case | tests |
|---|---|
"""


def held_cases() -> dict[int, list[str]]:
    """Case number -> tests, as path::name."""
    held: dict[int, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            match = re.match(r"test_case((?:_\d+)+)_", node.name)
            for number in match[1].strip("_").split("_") if match else ():
                held[int(number)].append(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
    return held


def page() -> str:
    rows = [
        f"| {number} | {'<br>'.join(f'`{name}`' for name in sorted(names))} |"
        for number, names in sorted(held_cases().items())
    ]
    return HEAD + "\n".join(rows) + "\n"


def main() -> int:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print("docs/cases.md is stale: run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
