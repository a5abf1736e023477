"""The Redis bench, run small: everybody has figures, what comes back is what was sent, no target is judged."""

import io
import shutil

import pytest
from rich.console import Console

from benchmarks.common.screen import Screen
from benchmarks.common.targets import entry
from benchmarks.store import redis


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server to measure")
def test_a_small_run_has_a_figure_for_everybody_and_judges_nothing() -> None:
    section = redis.run(True, Screen(Console(file=io.StringIO())))
    contenders = {(row["contender"], row["transport"]) for row in section["rows"]}
    for name in ("kvblend", "redis-py with hiredis"):
        assert {(name, "unix"), (name, "tcp")} <= contenders
    assert all(row["set_gb_s"] > 0 and row["get_gb_s"] > 0 for row in section["rows"])
    judged = [entry(target, section) for target in redis.targets(section)]
    assert len(judged) == 4
    assert all(target["passed"] is None for target in judged)


def test_a_target_is_judged_by_its_worst_size() -> None:
    def row(contender: str, rate: float, **more: object) -> dict[str, object]:
        return {"contender": contender, "transport": "unix", "set_gb_s": rate, "get_gb_s": rate, **more}

    peer = "redis-py with hiredis"
    rows = [row(peer, 1.0 / count, value_mib=part, together=count) for part in (1, 2) for count in (8, 1)]
    for size, part in ((1, 1), (4, 2), (8, 2), (32, 2)):
        for together, rate in ((1, 9.0), (8, 1.9 if size == 8 else 3.0)):
            rows.append(row("kvblend", rate, object_mib=size, part_mib=part, callers=1, together=together))
    section = {"quick": False, "rows": rows}
    judged = {target["name"]: target for target in (entry(one, section) for one in redis.targets(section))}
    worst = judged["Redis SET over redis-py with hiredis, unix"]
    assert worst["value"]["8 MiB"] == 1.9
    assert worst["passed"] is False
    assert judged["Redis SET over LMCache's connector, TCP"]["passed"] is None
