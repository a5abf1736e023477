"""Servers of every kind, one each for all tests of a session, and logs of every kind on them."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from log_kit import OpenLog
from redis_server import RedisServer, redis_server
from redis_topologies import Cluster, SentinelSet, cluster, sentinel_set

from services.matcher.log.base import Log
from services.matcher.log.open import open_log

KINDS = ("memory", "sqlite", "redis", "sentinel", "cluster")

_numbers = itertools.count()


@pytest.fixture(scope="session")
def redis_unix() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def sentinels() -> Iterator[SentinelSet]:
    with sentinel_set() as found:
        yield found


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[Cluster]:
    with cluster(b"any") as found:
        yield found


@pytest.fixture
def fresh_prefix() -> str:
    """Of a log that nobody else has."""
    return f"kvblend-{next(_numbers)}"


@pytest.fixture
def opened() -> Iterator[OpenLog]:
    """`open_log`, and everything opened is closed at the end."""
    logs: list[Log] = []

    def call(url: str, key_prefix: str) -> Log:
        logs.append(open_log(url, key_prefix))
        return logs[-1]

    yield call
    for log in logs:
        log.close()


@pytest.fixture(params=KINDS)
def log_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a log of each kind."""
    if request.param == "memory":
        return "memory:"
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'log.db'}"
    if request.param == "redis":
        return str(request.getfixturevalue("redis_unix").unix_url)
    return str(request.getfixturevalue("sentinels" if request.param == "sentinel" else "redis_cluster").url)


@pytest.fixture
def log(log_url: str, opened: OpenLog, fresh_prefix: str) -> Log:
    """An empty one of each kind."""
    return opened(log_url, fresh_prefix)
