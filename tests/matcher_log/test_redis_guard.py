"""Servers on which records could vanish are refused: at the start, later on, and anywhere in a cluster."""

import pytest
from log_kit import SECONDS, OpenLog, append_all, drain, page, reason_of
from redis_server import RedisServer, redis_server
from redis_topologies import Cluster, client_of
from structlog.testing import capture_logs

import services.matcher.log.redis_guard as redis_guard
from services.common.errors import KvblendError
from services.matcher.log.redis_guard import refusal_of


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
def test_a_server_that_may_evict_is_refused(policy: str, opened: OpenLog) -> None:
    with redis_server("--maxmemory-policy", policy) as server:
        log = opened(server.unix_url, "kvblend")
        with pytest.raises(ValueError, match=policy) as at_start:
            log.check(SECONDS)
        assert len(str(at_start.value).splitlines()) == 1
        with pytest.raises(KvblendError, match=policy) as caught:
            log.append(page(), SECONDS)
        assert caught.value.reason == "LOG_UNAVAILABLE"
        with client_of(server) as client:
            assert client.dbsize() == 0


@pytest.mark.parametrize("policy", ["noeviction", "volatile-lru", "volatile-ttl"])
def test_policies_that_leave_the_log_alone_are_accepted(policy: str, opened: OpenLog) -> None:
    with redis_server("--maxmemory-policy", policy) as server:
        log = opened(server.unix_url, "kvblend")
        log.check(SECONDS)
        append_all(log, page())


def test_a_policy_set_later_is_noticed_by_readers_and_then_by_all(
    opened: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_guard, "_EVERY_SECONDS", 0.0)
    with redis_server() as server, client_of(server) as client:
        log = opened(server.unix_url, "kvblend")
        end = append_all(log, page("a", 1))
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert reason_of(drain, log, end) == "LOG_UNAVAILABLE"
        assert reason_of(log.append, page("a", 2), SECONDS) == "LOG_UNAVAILABLE"
        client.config_set("maxmemory-policy", "noeviction")
        append_all(log, page("a", 2))


def test_a_server_that_comes_back_with_another_policy_is_refused(
    opened: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_guard, "_EVERY_SECONDS", 0.0)
    with redis_server() as server:
        log = opened(server.unix_url, "kvblend")
        append_all(log, page("a", 1))
        server.kill()
        server.start("--maxmemory-policy", "allkeys-lru")
        reason_of(log.append, page("a", 1), SECONDS)
        assert reason_of(log.append, page("a", 1), SECONDS) == "LOG_UNAVAILABLE"


def test_a_healthy_server_is_not_asked_again_and_again(opened: OpenLog) -> None:
    with redis_server() as server, client_of(server) as client:
        log = opened(server.unix_url, "kvblend")
        append_all(log, *(page("a", number) for number in range(1, 50)))
        drain(log)
        assert client.info("commandstats")["cmdstat_info"]["calls"] <= 2


def test_one_evicting_primary_anywhere_in_the_cluster_is_refused(
    redis_cluster: Cluster, opened: OpenLog, fresh_prefix: str
) -> None:
    for node in redis_cluster.primaries:
        with client_of(node) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
            with pytest.raises(ValueError, match="allkeys-lru"):
                opened(redis_cluster.url, fresh_prefix).check(SECONDS)
            client.config_set("maxmemory-policy", "noeviction")
    opened(redis_cluster.url, fresh_prefix).check(SECONDS)


def test_old_servers_are_refused() -> None:
    assert "too old" in refusal_of({"redis_version": "6.0.16", "maxmemory_policy": "noeviction"})
    assert "too old" in refusal_of({"redis_version": "5.0.14"})
    assert "too old" in refusal_of({})
    for version in ("6.2.0", "7.0.15", "7.2.4", "8.0", "10.1.0-rc1"):
        assert refusal_of({"redis_version": version, "maxmemory_policy": "noeviction"}) == ""


def test_another_format_is_refused(redis_unix: RedisServer, opened: OpenLog, fresh_prefix: str) -> None:
    log = opened(redis_unix.unix_url, fresh_prefix)
    end = append_all(log, page("a", 1))
    with client_of(redis_unix) as client:
        client.hset(f"{{{fresh_prefix}}}:state", "format", "2")
    with pytest.raises(ValueError, match="format"):
        log.check(SECONDS)
    assert reason_of(log.append, page("a", 2), SECONDS) == "LOG_UNAVAILABLE"
    assert reason_of(drain, log, end) == "LOG_UNAVAILABLE"


@pytest.mark.parametrize(("options", "told"), [((), 1), (("--appendonly", "yes"), 0), (("--save", "60 1"), 0)])
def test_a_server_without_persistence_is_told_of_once(options: tuple[str, ...], told: int, opened: OpenLog) -> None:
    with redis_server(*options) as server:
        with capture_logs() as lines:
            log = opened(server.unix_url, "kvblend")
            log.check(SECONDS)
            log.check(SECONDS)
            append_all(log, page())
        assert len([line for line in lines if "nothing on disk" in line["event"]]) == told
        assert {line["log_level"] for line in lines} <= {"warning"}
