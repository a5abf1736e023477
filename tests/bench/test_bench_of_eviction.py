"""The eviction and sustained sections of the store's bench, run small: figures, and no target judged by them."""

import io

import pytest
from rich.console import Console

from benchmarks.common.screen import Screen
from benchmarks.common.targets import entry
from benchmarks.store import eviction, sustained
from cli.bench.eviction import OPTIMUM
from services.store.eviction import POLICIES

SCREEN = Screen(Console(file=io.StringIO()))


def row(policy: str, rate: float) -> dict[str, object]:
    return {"trace": eviction.TRACES[0], "percent": 5.0, "policy": policy, "blocks": rate, "prefix": rate}


@pytest.mark.skipif(not eviction._FOLDER.exists(), reason="the shared data folder is absent")
def test_no_policy_beats_the_optimum_and_small_runs_are_not_judged() -> None:
    section = eviction.run(True, SCREEN)
    for trace in eviction.TRACES:
        for percent in (1.0, 25.0):
            rates = {
                row["policy"]: row["blocks"]
                for row in section["rows"]
                if (row["trace"], row["percent"]) == (trace, percent)
            }
            assert set(POLICIES) < set(rates)
            assert max(rates.values()) == rates[OPTIMUM]
    assert {entry(target, section)["passed"] for target in eviction.targets(section)} == {None}


def test_the_default_is_judged_by_the_best_of_the_others_and_only_beside_those_of_libcachesim() -> None:
    name = f"eviction: {eviction.TRACES[0]}, 5 %, blocks"
    alone = [row("density", 0.3), row("lru", 0.2), row(OPTIMUM, 0.5)]
    for rows, passed in (
        (alone, None),
        ([*alone, row("lru*", 0.2)], True),
        ([*alone, row("lru*", 0.3)], False),
        ([*alone, row("lru*", 0.4)], False),
    ):
        section = {"quick": False, "rows": rows}
        (found,) = [entry(target, section) for target in eviction.targets(section) if target.name == name]
        assert found["passed"] is passed


def test_reuse_lasts_through_two_hundred_orders() -> None:
    section = sustained.run(True, SCREEN)
    assert section["prompts"] == 200
    judged = {found["name"]: found for target in sustained.targets(section) for found in [entry(target, section)]}
    assert judged
    assert all(found["passed"] is not True for found in judged.values()), "ten thousand are needed"
