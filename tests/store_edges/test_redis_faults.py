"""What a store sees of a Redis that loses, damages, refuses, hangs or goes away (the server is real)."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import redis
from redis_server import RedisServer, free_port, redis_server
from tier_contract import SECONDS, get, get_all, key_for, meta_for, payload_of, put, put_all, read_into, write

from services.common.redis_socket import BoundedSocket
from services.store.tiers.redis import RedisTier
from services.store.tiers.redis_transfers import DAMAGED

MIB = 1 << 20
KEY = key_for(1)
PAYLOAD = payload_of(1, 3 * MIB + 5)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


@pytest.fixture
def raw(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.unix_url) as client:
        yield client


@contextmanager
def tier_on(url: str, half_open_seconds: float = 0.2) -> Iterator[RedisTier]:
    tier = RedisTier(url, part_bytes=MIB, half_open_seconds=half_open_seconds)
    try:
        yield tier
    finally:
        tier.close()


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    with tier_on(server.unix_url) as made:
        yield made


def part_names(raw: redis.Redis) -> list[bytes]:
    return sorted(name for name in raw.keys("kvblend:*") if not name.endswith(b":h"))


def header_name(raw: redis.Redis) -> bytes:
    (name,) = raw.keys("kvblend:*:h")
    return bytes(name)


def damage_count(kind: str) -> float:
    value: float = DAMAGED.labels(kind)._value.get()
    return value


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at, "it never came true"
        time.sleep(0.005)


def assert_read_fails_and_cleans_up(tier: RedisTier, raw: redis.Redis, damage: str, hurt: Callable[[], object]) -> None:
    """Finds the object, hurts it, reads it: False, counted, nothing left; written again it works."""
    meta = tier.find([KEY], SECONDS)[0]
    assert meta is not None
    hurt()
    before = damage_count(damage)
    assert not read_into(tier, KEY, meta, bytearray(len(PAYLOAD)))
    assert damage_count(damage) == before + 1
    assert raw.keys("kvblend:*") == []
    assert tier.find([KEY], SECONDS) == [None]
    assert put(tier, KEY, PAYLOAD)
    assert get(tier, KEY) == PAYLOAD


@pytest.mark.parametrize("index", [0, 1, 3])
def test_case_26_a_part_evicted_between_find_and_read_is_a_miss(tier: RedisTier, raw: redis.Redis, index: int) -> None:
    assert put(tier, KEY, PAYLOAD)
    name = part_names(raw)[index]
    assert_read_fails_and_cleans_up(tier, raw, "missing_part", lambda: raw.delete(name))


def test_case_26_everything_evicted_between_find_and_read_is_a_miss(tier: RedisTier, raw: redis.Redis) -> None:
    assert put(tier, KEY, PAYLOAD)
    assert_read_fails_and_cleans_up(tier, raw, "missing_part", raw.flushall)


@pytest.mark.parametrize(
    ("index", "change"), [(0, -1), (3, -4), (3, 7), (1, 1)], ids=["shorter", "one byte", "longer at the end", "longer"]
)
def test_a_part_of_another_length_is_a_miss(tier: RedisTier, raw: redis.Redis, index: int, change: int) -> None:
    assert put(tier, KEY, PAYLOAD)
    name = part_names(raw)[index]
    part = raw.get(name)
    hurt = part[:change] if change < 0 else part + b"x" * change
    assert_read_fails_and_cleans_up(tier, raw, "length", lambda: raw.set(name, hurt))


def test_parts_that_only_add_up_to_the_length_are_a_miss(tier: RedisTier, raw: redis.Redis) -> None:
    assert put(tier, KEY, PAYLOAD)
    first, second = part_names(raw)[:2]

    def swap() -> None:
        a, b = raw.get(first), raw.get(second)
        raw.mset({first: b, second: a})

    assert_read_fails_and_cleans_up(tier, raw, "checksum", swap)


@pytest.mark.parametrize("damage", ["missing_part", "length", "checksum"])
def test_damage_costs_only_the_objects_it_is_in(tier: RedisTier, raw: redis.Redis, damage: str) -> None:
    """Also what was asked for behind a part of the wrong length, on a connection that is of no use any more."""
    payloads = {key_for(number): payload_of(number, MIB + MIB // 2 + number) for number in range(8)}
    assert put_all(tier, payloads) == [True] * 8
    hurt = [key_for(number) for number in (0, 3, 4)]
    for key in hurt:
        (name, *_) = (name for name in part_names(raw) if key.text().encode() in name)
        part = raw.get(name)
        value = {"missing_part": None, "length": part[:-7], "checksum": part[:-1] + bytes([part[-1] ^ 1])}[damage]
        raw.delete(name) if value is None else raw.set(name, value)
    before = damage_count(damage)
    expected = [None if key in hurt else data for key, data in payloads.items()]
    assert get_all(tier, list(payloads)) == expected
    assert damage_count(damage) == before + len(hurt)
    left = raw.keys("kvblend:*")
    assert not any(key.text().encode() in name for key in hurt for name in left)
    assert len(left) == 3 * 5, "headers and parts of the others"
    assert get_all(tier, list(payloads)) == expected


def test_one_flipped_bit_is_a_miss(tier: RedisTier, raw: redis.Redis) -> None:
    assert put(tier, KEY, PAYLOAD)
    name = part_names(raw)[2]
    assert_read_fails_and_cleans_up(tier, raw, "checksum", lambda: raw.setbit(name, 4001, 1 - raw.getbit(name, 4001)))


def test_a_header_with_any_flipped_byte_is_never_believed(tier: RedisTier, raw: redis.Redis) -> None:
    payload = payload_of(2, 100)
    assert put(tier, KEY, payload)
    name = header_name(raw)
    header = raw.get(name)
    before = damage_count("header")
    damaged = [header[:index] + bytes([header[index] ^ 4]) + header[index + 1 :] for index in range(len(header))]
    damaged += [header[:length] for length in range(len(header))] + [header + b"\0"]
    for value in damaged:
        raw.set(name, value)
        assert tier.find([KEY], SECONDS) == [None]
        assert not raw.exists(name)
    assert damage_count("header") == before + len(damaged)


def test_a_header_under_another_objects_name_is_never_believed(tier: RedisTier, raw: redis.Redis) -> None:
    """Even where only the dense rank differs, which the meta itself does not hold."""
    assert put(tier, key_for(1, rank=0), PAYLOAD)
    name = header_name(raw)
    raw.copy(name, name.replace(b":0:0}", b":0:1}"))
    assert tier.find([key_for(1, rank=1)], SECONDS) == [None]
    assert get(tier, key_for(1, rank=0)) == PAYLOAD


def test_a_damaged_old_write_does_not_take_the_new_one_with_it(tier: RedisTier, raw: redis.Redis) -> None:
    assert put(tier, KEY, PAYLOAD)
    old = tier.find([KEY], SECONDS)[0]
    assert old is not None
    newer = payload_of(9, len(PAYLOAD))
    assert put(tier, KEY, newer)
    assert len(part_names(raw)) == 4, "the replaced write's parts are gone"
    assert not read_into(tier, KEY, old, bytearray(len(PAYLOAD)))
    assert get(tier, KEY) == newer


def test_everything_expires_and_parts_outlive_their_header(server: RedisServer, raw: redis.Redis) -> None:
    tier = RedisTier(server.unix_url, ttl_seconds=100, part_bytes=MIB)
    assert put(tier, KEY, PAYLOAD)
    meta = meta_for(key_for(2), PAYLOAD)
    meta.expires_at = time.time() + 50
    assert write(tier, key_for(2), meta, PAYLOAD)
    tier.close()
    header_ttls = sorted(raw.ttl(name) for name in raw.keys("kvblend:*:h"))
    assert 0 < header_ttls[0] <= 50 < header_ttls[1] <= 100
    part_ttls = [raw.ttl(name) for name in part_names(raw)]
    assert min(part_ttls) > header_ttls[0]
    assert max(part_ttls) > header_ttls[1]


def test_delete_leaves_no_part_behind(tier: RedisTier, raw: redis.Redis) -> None:
    assert put(tier, KEY, PAYLOAD)
    assert put(tier, key_for(2), PAYLOAD)
    assert tier.delete([KEY, key_for(3)], SECONDS) == 1
    assert len(raw.keys("kvblend:*")) == 5
    assert get(tier, key_for(2)) == PAYLOAD


def test_a_clear_takes_parts_and_unreadable_headers_too_and_nothing_of_others(
    server: RedisServer, raw: redis.Redis
) -> None:
    strangers = {b"other:{x}:h": b"1", b"kv*[x]": b"2", b"kv*[{bad}:h": b"3"}
    raw.mset(strangers)
    other = RedisTier(server.unix_url, key_prefix="kvx[")
    tier = RedisTier(server.unix_url, key_prefix="kv*[", part_bytes=4 * MIB)
    for number in range(300):
        assert put(tier, key_for(number), b"payload")
    assert put(tier, KEY, PAYLOAD)
    assert put(other, KEY, PAYLOAD)
    (some_header,) = [
        name for name in raw.keys("*:h") if name.startswith(b"kv*[") and key_for(7).text().encode() in name
    ]
    raw.set(some_header, b"damaged")
    assert tier.delete_where(lambda _: True, SECONDS) == 300
    assert set(strangers) <= set(raw.keys("*"))
    # What is left of ours is the one part that only the damaged header knew.
    assert len([name for name in raw.keys("*") if name.startswith(b"kv*[{") and name not in strangers]) == 1
    assert get(other, KEY) == PAYLOAD
    tier.close()
    other.close()


def test_a_clear_that_could_not_finish_is_shown(server: RedisServer, tier: RedisTier) -> None:
    assert put(tier, KEY, PAYLOAD)
    assert tier.health().ready
    server.freeze()
    assert tier.delete_where(lambda _: True, 0.2) == 0
    assert not tier.health().ready
    server.thaw()
    eventually(lambda: tier.health().ready)
    assert tier.delete_where(lambda _: True, SECONDS) == 1


def test_a_meta_without_its_write_is_no_way_to_read(tier: RedisTier) -> None:
    assert put(tier, KEY, PAYLOAD)
    assert not read_into(tier, KEY, meta_for(KEY, PAYLOAD), bytearray(len(PAYLOAD)))
    assert get(tier, KEY) == PAYLOAD


def test_case_23_a_write_refused_half_way_leaves_nothing(tier: RedisTier, raw: redis.Redis) -> None:
    small = payload_of(3, 1000)
    assert put(tier, key_for(2), small)
    raw.config_set("maxmemory-policy", "noeviction")
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + 12 * MIB)
    big = payload_of(4, 40 * MIB)
    for _ in range(4):
        assert not put(tier, KEY, big)
    assert tier.find([KEY], SECONDS) == [None]
    assert len(raw.keys("kvblend:*")) == 2, "only the small object's header and part"
    assert get(tier, key_for(2)) == small, "a full server still serves what it holds"
    raw.config_set("maxmemory", 0)
    assert put(tier, KEY, big)


def test_case_23_a_full_server_keeps_what_it_took_of_one_call(tier: RedisTier, raw: redis.Redis) -> None:
    raw.config_set("maxmemory-policy", "noeviction")
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + 12 * MIB)
    payloads = {key_for(number): payload_of(number, 2 * MIB) for number in range(12)}
    written = put_all(tier, payloads)
    assert 0 < sum(written) < 12
    assert [meta is not None for meta in tier.find(list(payloads), SECONDS)] == written
    assert len(raw.keys("kvblend:*")) == 3 * sum(written), "nothing is left of what was refused"
    taken = [data if done else None for data, done in zip(payloads.values(), written, strict=True)]
    assert get_all(tier, list(payloads)) == taken


def test_case_23_a_server_that_hangs_half_way_leaves_nothing_to_find(server: RedisServer, raw: redis.Redis) -> None:
    big = payload_of(5, 64 * MIB)
    with tier_on(server.unix_url) as tier:
        outcome: list[bool] = []
        writer = threading.Thread(target=lambda: outcome.append(write(tier, KEY, meta_for(KEY, big), big, 1.0)))
        writer.start()
        eventually(lambda: len(part_names(raw)) > 8)
        server.freeze()
        writer.join()
        server.thaw()
        # Where only the very last reply was lost the object is there, and whole.
        found = get(tier, KEY)
        assert found in (None, big)
        assert found == big or outcome == [False]


def test_case_23_a_server_killed_half_way_leaves_nothing_to_find(server: RedisServer, raw: redis.Redis) -> None:
    big = payload_of(6, 64 * MIB)
    with tier_on(server.unix_url) as tier:
        outcome: list[bool] = []
        writer = threading.Thread(target=lambda: outcome.append(put(tier, KEY, big)))
        writer.start()
        eventually(lambda: len(part_names(raw)) > 8)
        server.kill()
        writer.join()
        assert outcome == [False]
        assert tier.find([KEY], SECONDS) == [None]
        server.start()
        eventually(lambda: put(tier, KEY, big))
        assert get(tier, KEY) == big


def assert_comes_back(tier: RedisTier) -> None:
    """Keys are written and read again by calls alone, without anybody's help, and health says so."""
    eventually(lambda: put(tier, KEY, PAYLOAD))
    assert get(tier, KEY) == PAYLOAD
    assert tier.health().ready


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_case_29_and_68_a_hanging_server_holds_nobody_beyond_the_timeout(server: RedisServer, transport: str) -> None:
    with tier_on(server.unix_url if transport == "unix" else server.tcp_url) as tier:
        assert put(tier, KEY, PAYLOAD)
        meta = tier.find([KEY], SECONDS)[0]
        assert meta is not None
        server.freeze()
        # That these calls return at all, while it hangs, is the point.
        assert tier.find([KEY], 0.1) == [None]
        assert not read_into(tier, KEY, meta, bytearray(len(PAYLOAD)), 0.1)
        assert not write(tier, KEY, meta_for(KEY, PAYLOAD), PAYLOAD, 0.1)
        assert tier.delete([KEY], 0.1) == 0
        health = tier.health()
        assert not health.ready
        assert health.detail
        server.thaw()
        assert_comes_back(tier)


def test_case_68_health_alone_notices_a_hanging_server(server: RedisServer, tier: RedisTier) -> None:
    assert tier.health().ready
    server.freeze()
    eventually(lambda: not tier.health().ready)
    server.thaw()
    eventually(lambda: tier.health().ready)


def test_case_28_after_three_failures_the_server_is_left_alone_and_then_used_again(server: RedisServer) -> None:
    with tier_on(server.unix_url, half_open_seconds=1.0) as tier:
        server.kill()
        for number in range(3):
            assert not put(tier, key_for(number), PAYLOAD)
        server.start()
        with redis.Redis.from_url(server.unix_url) as raw:
            before = raw.info("stats")["total_connections_received"]
            assert not put(tier, KEY, PAYLOAD), "the circuit is open"
            assert raw.info("stats")["total_connections_received"] == before
        assert_comes_back(tier)


def test_case_69_unreachable_at_start_is_shown_and_heals_by_itself() -> None:
    with redis_server() as server:
        server.kill()
        with tier_on(server.tcp_url) as tier:
            assert tier.find([KEY], 1.0) == [None]
            assert not put(tier, KEY, PAYLOAD)
            health = tier.health()
            assert not health.ready
            assert health.detail
            server.start()
            assert_comes_back(tier)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_case_69_killed_and_restarted_is_used_again(server: RedisServer, transport: str) -> None:
    with tier_on(server.unix_url if transport == "unix" else server.tcp_url) as tier:
        # Several idle connections, all of which die with the server.
        threads = [threading.Thread(target=put, args=(tier, key_for(number), PAYLOAD)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.kill()
        assert tier.find([KEY], 1.0) == [None]
        assert not put(tier, KEY, PAYLOAD)
        server.start()
        assert_comes_back(tier)


def test_idle_connections_that_died_with_the_server_cost_no_call(server: RedisServer) -> None:
    with tier_on(server.unix_url, half_open_seconds=1000) as tier:
        threads = [threading.Thread(target=put, args=(tier, key_for(number), PAYLOAD)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.kill()
        server.start()
        assert put(tier, KEY, PAYLOAD), "the very first call"


class RecordingSocket:
    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def settimeout(self, seconds: float) -> None:
        self.timeouts.append(seconds)

    def recv(self, size: int) -> bytes:
        return bytes(size)


def test_each_socket_operation_gets_only_what_is_left() -> None:
    inner = RecordingSocket()
    bounded = BoundedSocket(cast(socket.socket, inner), time.monotonic() + 100)
    bounded.recv(1)
    time.sleep(0.001)
    bounded.recv(1)
    assert 100 >= inner.timeouts[0] > inner.timeouts[1] > 0
    bounded.deadline = time.monotonic()
    with pytest.raises(TimeoutError):
        bounded.recv(1)


@contextmanager
def fake_server(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[int]]]:
    """A TCP server of our own; yields its URL and a list that grows by one a connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[int] = []
    open_sockets: list[socket.socket] = []

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            accepted.append(1)
            open_sockets.append(connection)
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}", accepted
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in open_sockets:
            connection.close()


def drip(connection: socket.socket) -> None:
    """Answers forever, a byte at a time, each sooner than any timeout."""
    try:
        connection.sendall(b"*1\r\n$100000000\r\n")
        while True:
            connection.sendall(b"x")
            time.sleep(0.01)
    except OSError:
        return


def test_case_29_a_server_that_drips_holds_nobody_beyond_the_timeout() -> None:
    with fake_server(drip) as (url, _), tier_on(url) as tier:
        for _ in range(4):
            assert tier.find([KEY], 0.2) == [None]


def test_case_27_a_server_that_never_speaks_fails_by_the_timeout_also_with_tls() -> None:
    with fake_server(lambda _: None) as (url, _):
        for scheme in ("redis", "rediss"):
            with tier_on(url.replace("redis", scheme, 1)) as tier:
                assert tier.find([KEY], 0.2) == [None]
                assert not tier.health().ready


def test_an_impatient_caller_does_not_open_the_circuit() -> None:
    with fake_server(lambda _: None) as (url, accepted), tier_on(url, half_open_seconds=1000) as tier:
        for _ in range(6):
            assert tier.find([KEY], 0.01) == [None]
        impatient = len(accepted)
        assert impatient > 3
        for _ in range(3):
            assert tier.find([KEY], 0.1) == [None]
        patient = len(accepted)
        assert tier.find([KEY], 0.1) == [None]
        assert len(accepted) == patient, "now the circuit is open"


def test_a_late_reply_never_answers_the_next_question(server: RedisServer, raw: redis.Redis) -> None:
    with tier_on(server.unix_url) as tier:
        assert put(tier, KEY, PAYLOAD)
        server.freeze()
        assert tier.find([KEY], 0.1) == [None]
        server.thaw()
        raw.ping()
        assert tier.find([key_for(2), key_for(3)], SECONDS) == [None, None]
        assert get(tier, KEY) == PAYLOAD


def test_tier_id_names_the_place_and_no_secret() -> None:
    ids = {}
    for name, url, prefix in [
        ("plain", "redis://redis.example:6380/2", "kvblend:"),
        ("secret", "redis://user:hunter2@Redis.example:6380/2", "kvblend:"),
        ("port", "redis://redis.example:6381/2", "kvblend:"),
        ("database", "redis://redis.example:6380/3", "kvblend:"),
        ("prefix", "redis://redis.example:6380/2", "other:"),
        ("unix", "unix:///run/redis.sock?db=2", "kvblend:"),
    ]:
        tier = RedisTier(url, key_prefix=prefix)
        ids[name] = tier.tier_id
        tier.close()
    assert ids.pop("secret") == ids["plain"]
    assert len(set(ids.values())) == len(ids)
    assert not any("hunter2" in text for text in ids.values())


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("http://localhost", {}),
        ("redis://localhost?no_such_option=1", {}),
        ("redis://localhost", {"part_bytes": 1000}),
        ("redis://localhost", {"part_bytes": 8 * MIB}),
        ("redis://localhost", {"ttl_seconds": 0}),
        ("redis://localhost", {"key_prefix": "a{b"}),
        ("redis://localhost", {"max_connections": 0}),
    ],
)
def test_case_73_a_setting_that_cannot_be_is_refused(url: str, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"allowed|must start|URL"):
        RedisTier(url, **options)


def test_connections_are_bounded_and_shared(server: RedisServer, raw: redis.Redis) -> None:
    tier = RedisTier(server.unix_url, max_connections=2)
    threads = [threading.Thread(target=put, args=(tier, key_for(number), PAYLOAD)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(meta is not None for meta in tier.find([key_for(number) for number in range(12)], SECONDS))
    assert len(raw.client_list()) <= 3
    tier.close()


def test_nothing_listens_there() -> None:
    with tier_on(f"redis://127.0.0.1:{free_port()}") as tier:
        assert tier.find([KEY], 1.0) == [None]
        assert not tier.health().ready
