"""Logs of every kind against the obvious model, over random histories; and broken ones, which must be noticed."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from broken_logs import BROKEN
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from log_machine import LogMachine
from redis_server import RedisServer
from redis_topologies import Cluster

from services.matcher.log.base import Log
from services.matcher.log.memory import MemoryLog
from services.matcher.log.redis import RedisLog
from services.matcher.log.sqlite import SqliteLog

_QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def check(make_log: Callable[[], Log], examples: int) -> None:
    machine = type("Machine", (LogMachine,), {"make_log": staticmethod(make_log)})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30, **_QUIET))


def test_memory() -> None:
    check(MemoryLog, 100)


def test_sqlite(shm_dir: Path) -> None:
    numbers = itertools.count()
    check(lambda: SqliteLog(shm_dir / f"{next(numbers)}.db"), 30)


def test_redis(redis_unix: RedisServer) -> None:
    numbers = itertools.count()
    check(lambda: RedisLog(redis_unix.unix_url, f"model-{next(numbers)}"), 30)


def test_redis_cluster(redis_cluster: Cluster) -> None:
    numbers = itertools.count()
    check(lambda: RedisLog(redis_cluster.url, f"model-{next(numbers)}"), 10)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_log_is_noticed(broken: Callable[[], Log]) -> None:
    machine = type("Machine", (LogMachine,), {"make_log": staticmethod(broken)})
    searching = settings(
        max_examples=300, stateful_step_count=30, derandomize=True, database=None, phases=[Phase.generate], **_QUIET
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=searching)
