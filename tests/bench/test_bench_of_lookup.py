"""The lookup's bench over real services, quickly; and what its targets say of figures."""

import io

import pytest
from rich.console import Console

from benchmarks.common.screen import Screen
from benchmarks.common.targets import Row
from benchmarks.lookup import report, ways
from benchmarks.lookup.plan import PROMPTS, QUICK


def test_a_quick_run_measures_every_prompt_and_says_where_the_time_went() -> None:
    section = ways.run(True, Screen(Console(file=io.StringIO())))
    rows = section["rows"]
    assert {(row["tokens"], row["prompt"], row["engines"]) for row in rows} == {
        (tokens, prompt, engines) for tokens in QUICK.sizes for prompt in PROMPTS for engines in QUICK.engines
    }
    for row in rows:
        found = row["found"]
        assert found["covered_tokens"] + sum(found["shortfalls"].values()) == row["tokens"]
        assert sum(row["where"].values()) == pytest.approx(row["lookup"]["p50_ms"])
    assert all(entry["passed"] is None for entry in report.targets({"lookup": section}, {})), "a quick run is no proof"


def row(tokens: int, lookup: float, end: float) -> Row:
    return {
        "tokens": tokens,
        "prompt": "all shifted",
        "engines": 1,
        "lookup": {"p50_ms": lookup},
        "end": {"p50_ms": end},
        "leases_gone_ms": 40.0,
    }


def test_targets_pass_or_fail_by_the_figures_of_one_engine() -> None:
    section = {"quick": False, "rows": [row(1 << 15, 2.3, 0.6), row(1 << 17, 7.1, 0.5)]}
    passed = [entry["passed"] for entry in report.targets({"lookup": section}, {})]
    assert passed == [True, False, False, True, True]
