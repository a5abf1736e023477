"""The servers of the manifests, as a real Redis or Valkey that is started with their arguments."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from manifest_kit import documents, first
from redis_server import RedisServer

from services.matcher.log.base import START, Page
from services.matcher.log.open import open_log
from services.matcher.log.redis import RedisLog

SECONDS = 20.0


@contextmanager
def server_of(folder: str, name: str, directory: Path) -> Iterator[RedisServer]:
    server = RedisServer(directory)
    server.start(*first(documents(folder), name)["args"])
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def log_of(server: RedisServer) -> Iterator[RedisLog]:
    log = open_log(server.tcp_url, "kvblend-log")
    assert isinstance(log, RedisLog)
    try:
        yield log
    finally:
        log.close()


def test_the_log_server_is_admitted_and_a_killed_one_still_has_what_it_acknowledged(tmp_path: Path) -> None:
    page = Page(store="a", epoch=1, first=1, count=1, reset=False, data=b"page")
    with server_of("base", "matcher-log", tmp_path) as server, log_of(server) as log:
        log.check(SECONDS)
        appended = log.append(page, SECONDS)
    with server_of("base", "matcher-log", tmp_path) as server, log_of(server) as log:
        assert log.tail("a", 1, SECONDS) == appended
        assert [record.data for record in log.read(START, 1 << 20, 0.0, SECONDS)] == [b"page"]


def test_the_second_tiers_server_is_refused_as_a_log(tmp_path: Path) -> None:
    with server_of("overlays/with-redis", "redis", tmp_path) as server, log_of(server) as log:
        with pytest.raises(ValueError, match="allkeys-lru evicts"):
            log.check(SECONDS)
