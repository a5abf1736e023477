"""The store's bench runs against a real store: its figures are there and add up."""

import pytest
from rich.console import Console

from benchmarks.common.screen import Screen
from benchmarks.common.targets import entry
from benchmarks.store import control, local


@pytest.fixture
def screen() -> Screen:
    return Screen(Console(quiet=True))


def test_bytes_in_and_out_beside_memcpy(screen: Screen) -> None:
    section = local.run(True, screen)
    assert [row["object_mib"] for row in section["rows"]] == [1, 8, 32]
    for row in section["rows"]:
        assert all(row[f"{name}_gb_s"] > 0 for name in ("write", "read", "memcpy_in", "memcpy_out"))
        assert row["write_of_memcpy"] > 0
    assert all(entry(target, section)["passed"] is None for target in local.targets(section)), (
        "small sizes prove nothing"
    )
    full = section | {"quick": False}
    assert all(entry(target, full)["value"] > 0 for target in local.targets(full))


def test_calls_without_bytes(screen: Screen) -> None:
    section = control.run(True, screen)
    assert [row["clients"] for row in section["rows"]] == [1, 4]
    for row in section["rows"]:
        assert list(row["methods"]) == ["Reserve", "Commit", "Lookup", "BeginCopy", "EndCopy"]
        counts = {method: value["calls"] for method, value in row["methods"].items()}
        assert len(set(counts.values())) == 1
        assert row["calls_per_second"] > 0
