"""Limits that keep the code readable: files, functions, and one place for each thing."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for folder in ("kvblend", "services", "cli", "tools", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if path.parent != ROOT / "kvblend" / "v1"
)
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]
FILE_LINES = 600
FUNCTION_LINES = 60
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_case_61_nothing_is_ever_unpickled(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert not imported & FORBIDDEN_MODULES


def test_half_of_the_files_are_short() -> None:
    lengths = sorted(path.read_text(encoding="utf-8").count("\n") for path in SOURCES)
    assert lengths[len(lengths) // 2] <= 150
