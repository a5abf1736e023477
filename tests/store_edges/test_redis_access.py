"""TLS and users: what a server lets in, and what a tier says of one that does not let it in."""

import time
from collections.abc import Callable, Iterator

import pytest
import redis
from redis_server import RedisServer, redis_server
from redis_tls import TlsServer, tls_server
from tier_contract import SECONDS, get, key_for, payload_of, put

from services.store.tiers.redis import RedisTier

KEY = key_for(1)
PAYLOAD = payload_of(1, 3_000_000)
# All that a tier asks of a single server.
COMMANDS = ("getrange", "get", "mget", "set", "unlink", "scan", "ping", "info")


@pytest.fixture(scope="module")
def tls() -> Iterator[TlsServer]:
    with tls_server() as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as found:
        with redis.Redis.from_url(found.unix_url) as raw:
            raw.acl_setuser(
                "kvblend",
                enabled=True,
                passwords=["+secret"],
                keys=["kvblend:*"],
                commands=[f"+{name}" for name in COMMANDS],
            )
        yield found


def refused(url: str) -> str:
    """What health says of it; no call has an answer, and none waits for its own timeout."""
    start = time.monotonic()
    tier = RedisTier(url, connect_timeout=1.0, operation_timeout=60.0)
    assert tier.find([KEY], 60.0) == [None]
    assert not put(tier, KEY, PAYLOAD)
    assert time.monotonic() - start < 60
    health = tier.health()
    tier.close()
    assert not health.ready
    return health.detail


def test_case_27_a_server_that_speaks_tls_only(tls: TlsServer) -> None:
    tier = RedisTier(tls.url)
    assert put(tier, KEY, PAYLOAD)
    assert get(tier, KEY) == PAYLOAD
    assert tier.health().ready
    tier.close()


URLS: dict[str, Callable[[TlsServer], str]] = {
    "no TLS": lambda tls: tls.plain_url,
    "no client certificate": lambda tls: tls.trusting_url,
    "an authority that it does not know": lambda tls: f"rediss://localhost:{tls.port}",
    "another host's certificate": lambda tls: tls.url.replace("localhost", "127.0.0.2"),
}


@pytest.mark.parametrize("what", URLS)
def test_case_27_a_client_with_the_wrong_means_is_told_at_once(tls: TlsServer, what: str) -> None:
    assert refused(URLS[what](tls))


def test_tls_to_a_server_without_it(server: RedisServer) -> None:
    assert refused(server.tcp_url.replace("redis://", "rediss://"))


def test_a_user_with_no_more_rights_than_needed(server: RedisServer) -> None:
    url = server.tcp_url.replace("redis://", "redis://kvblend:secret@")
    tier = RedisTier(url)
    assert put(tier, KEY, PAYLOAD)
    assert put(tier, KEY, PAYLOAD)
    assert get(tier, KEY) == PAYLOAD
    assert tier.delete([KEY], SECONDS) == 1
    assert put(tier, KEY, PAYLOAD)
    assert tier.delete_where(lambda _: True, SECONDS) == 1
    health = tier.health()
    assert health.ready
    assert health.used_bytes > 0
    tier.close()


def test_a_user_whose_keys_are_others_is_refused(server: RedisServer) -> None:
    tier = RedisTier(server.tcp_url.replace("redis://", "redis://kvblend:secret@"), key_prefix="other:")
    assert not put(tier, KEY, PAYLOAD)
    assert tier.find([KEY], SECONDS) == [None]
    tier.close()
    with redis.Redis.from_url(server.unix_url) as raw:
        assert raw.keys("other:*") == []


def test_a_wrong_password_is_named_and_not_shown(server: RedisServer) -> None:
    detail = refused(server.tcp_url.replace("redis://", "redis://kvblend:hunter2@"))
    assert "password" in detail
    assert "hunter2" not in detail
