"""Sentinels and clusters under a tier: servers that die, hang, and hand their keys over. Never a wrong byte."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from redis_server import RedisServer, free_port
from redis_topologies import (
    Cluster,
    client_of,
    cluster,
    finish_moving,
    info,
    move_key,
    move_slot,
    sentinel_set,
    start_moving,
    wait_for_master,
    wait_until,
)
from tier_contract import SECONDS, get, get_all, key_for, meta_for, name_of, payload_of, put
from tier_contract import put_all as put_together

from services.store.objects import ObjectKey
from services.store.tiers.base import Read, Write
from services.store.tiers.redis import RedisTier

MIB = 1 << 20
KEYS = [key_for(number) for number in range(40)]
KEY = KEYS[0]


def payload(key: ObjectKey) -> bytes:
    """What this key must contain."""
    number = int.from_bytes(key.chunk.chain_hash)
    return payload_of(number, 2 * MIB + 1 + number)


@contextmanager
def tier_on(url: str, half_open_seconds: float = 30.0, **options: float) -> Iterator[RedisTier]:
    tier = RedisTier(url, part_bytes=MIB, half_open_seconds=half_open_seconds, **options)  # type: ignore[arg-type]
    try:
        yield tier
    finally:
        tier.close()


class Load:
    """Writers and readers until it ends; `wrong` counts reads that brought something else than they must."""

    def __init__(self, tier: RedisTier) -> None:
        self._tier = tier
        self._stop = threading.Event()
        self.reads = 0
        self.misses = 0
        self.wrong = 0
        works: list[Callable[[list[ObjectKey]], None]] = [self._write, self._read, self._read, self._read]
        self._threads = [threading.Thread(target=self._run, args=(seed, work)) for seed, work in enumerate(works)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int, work: Callable[[list[ObjectKey]], None]) -> None:
        choose = random.Random(seed)
        while not self._stop.is_set():
            work(choose.sample(KEYS, choose.randint(1, 4)))

    def _write(self, keys: list[ObjectKey]) -> None:
        writes = [Write(key, meta_for(key, data), memoryview(data)) for key in keys if (data := payload(key))]
        self._tier.write(writes, 1.0)

    def _read(self, keys: list[ObjectKey]) -> None:
        for key, found in zip(keys, get_all(self._tier, keys), strict=True):
            self.reads += 1
            self.misses += found is None
            self.wrong += found not in (None, payload(key))


def comes_back(tier: RedisTier, keys: list[ObjectKey]) -> bool:
    return all(put(tier, key, payload(key)) and get(tier, key) == payload(key) for key in keys)


def put_all(tier: RedisTier) -> None:
    for key in KEYS:
        assert put(tier, key, payload(key))


def owned(nodes: Cluster, server: RedisServer) -> list[ObjectKey]:
    return [key for key in KEYS if nodes.owner_of(name_of(key)) is server]


def test_a_cluster_of_six_loses_a_master_during_load_without_a_wrong_byte() -> None:
    with cluster(name_of(KEY), replicas=3) as nodes, tier_on(nodes.url) as tier:
        put_all(tier)
        with Load(tier) as load:
            wait_until(lambda: load.reads > 50)
            victim = nodes.owner
            victim.kill()
            lost = owned(nodes, victim)
            wait_for_master(nodes.replicas[victim])
            promoted = time.monotonic()
            wait_until(lambda: comes_back(tier, lost))
            # Half a minute: one that waited for the breaker of the dead server would not be here yet.
            assert time.monotonic() - promoted < 30
            before = load.reads
            wait_until(lambda: load.reads > before + 50)
        assert load.wrong == 0
        wait_until(lambda: tier.health().ready)


def test_sentinels_replace_the_master_during_load() -> None:
    with sentinel_set() as servers, tier_on(servers.url) as tier:
        put_all(tier)
        wait_until(lambda: _offset(servers.replica) == _offset(servers.primary))
        with Load(tier) as load:
            wait_until(lambda: load.reads > 50)
            servers.fail_over()
            wait_until(lambda: comes_back(tier, [KEY]))
            before = load.reads, load.misses
            wait_until(lambda: load.reads > before[0] + 50)
        assert load.wrong == 0
        assert load.misses - before[1] < load.reads - before[0], "what had been replicated is still there"
        wait_until(lambda: tier.health().ready)


def test_a_master_that_hangs_takes_only_its_own_keys_along() -> None:
    with (
        cluster(name_of(KEY), 1, "--cluster-require-full-coverage", "no") as nodes,
        tier_on(nodes.url) as patient,
        tier_on(nodes.url, operation_timeout=1.0) as tier,
    ):
        put_all(patient)
        gone = owned(nodes, nodes.owner)
        metas = [meta for meta in tier.find(KEYS, SECONDS) if meta is not None]
        nodes.replica.freeze()
        nodes.owner.freeze()
        targets = [memoryview(bytearray(meta.payload_bytes)) for meta in metas]
        arrived = tier.read_into(list(map(Read, KEYS, metas, targets)), SECONDS)
        assert [key for key, whole in zip(KEYS, arrived, strict=True) if not whole] == gone
        # Three failures open its breaker; the others answer all the while.
        for _ in range(5):
            found = tier.find(KEYS, SECONDS)
            assert [key for key, meta in zip(KEYS, found, strict=True) if meta is None] == gone
        for key in KEYS:
            assert (get(tier, key) == payload(key)) == (key not in gone)
        health = tier.health()
        assert not health.ready
        assert health.detail.startswith("1 of 3 servers: 127.0.0.1:")
        assert tier.delete_where(lambda _: True, SECONDS) == len(KEYS) - len(gone)
        assert not tier.health().ready, "not everything could be looked at"
        nodes.owner.thaw()
        nodes.replica.thaw()


def test_a_master_that_comes_back_is_used_within_the_half_open_interval() -> None:
    with cluster(name_of(KEY)) as nodes, tier_on(nodes.url, half_open_seconds=0.5) as tier:
        put_all(tier)
        nodes.replica.freeze()
        nodes.owner.freeze()
        for _ in range(4):
            assert tier.find([KEY], 0.1) == [None]
        nodes.owner.thaw()
        wait_until(lambda: get(tier, KEY) == payload(KEY))
        nodes.replica.thaw()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with cluster(name_of(KEY)) as found:
        yield found


@pytest.fixture
def tier(nodes: Cluster) -> Iterator[RedisTier]:
    for node in nodes.primaries:
        with client_of(node) as client:
            client.flushall()
    with tier_on(nodes.url) as made:
        yield made


@contextmanager
def moving(nodes: Cluster) -> Iterator[tuple[RedisServer, RedisServer]]:
    """Between these two servers the slot of KEY is being moved."""
    source = nodes.owner
    target = next(node for node in nodes.primaries if node is not source)
    start_moving(source, target, name_of(KEY))
    try:
        yield source, target
    finally:
        finish_moving(source, target, name_of(KEY))
        move_slot(target, source, name_of(KEY))


def names_in(server: RedisServer, ending: str) -> list[bytes]:
    with client_of(server) as client:
        return sorted(client.keys(f"*{KEY.text()}*{ending}"))


def test_an_object_that_is_half_way_to_another_server_is_read_from_both(nodes: Cluster, tier: RedisTier) -> None:
    assert put(tier, KEY, payload(KEY))
    with moving(nodes) as (source, target):
        names = [*names_in(source, ":1"), *names_in(source, ":h"), *names_in(source, ":0"), *names_in(source, ":2")]
        assert len(names) == 4
        for name in names:
            move_key(source, target, name)
            assert get(tier, KEY) == payload(KEY)
        assert names_in(source, "") == []
    assert get(tier, KEY) == payload(KEY)


def test_a_part_that_is_missing_on_the_way_is_a_miss_and_nothing_is_deleted(nodes: Cluster, tier: RedisTier) -> None:
    assert put(tier, KEY, payload(KEY))
    with moving(nodes) as (source, target):
        move_key(source, target, names_in(source, ":0")[0])
        with client_of(source) as client:
            client.delete(*names_in(source, ":1"))
        assert get(tier, KEY) is None
        assert len(names_in(source, "")) == 2


def test_objects_are_written_and_deleted_while_their_slot_is_moved(nodes: Cluster, tier: RedisTier) -> None:
    with moving(nodes) as (source, target):
        assert put(tier, KEY, payload(KEY))
        assert len(names_in(target, "")) == 4
        assert names_in(source, "") == []
        assert get(tier, KEY) == payload(KEY)
        assert tier.delete([KEY], SECONDS) == 1
        assert get(tier, KEY) is None
        assert names_in(target, ":h") == []


def test_an_object_on_its_way_costs_others_of_the_same_call_nothing(nodes: Cluster, tier: RedisTier) -> None:
    keys = KEYS[:8]
    payloads = {key: payload(key) for key in keys}
    with moving(nodes) as (_, target):
        assert put_together(tier, payloads) == [True] * 8
        assert len(names_in(target, "")) == 4
        assert get_all(tier, keys) == list(payloads.values())
        with client_of(target) as client:
            client.execute_command("ASKING")
            client.delete(*names_in(target, ":1"))
        assert get_all(tier, keys) == [None, *list(payloads.values())[1:]]
        assert put_together(tier, payloads) == [True] * 8
    assert get_all(tier, keys) == list(payloads.values())


def test_a_slot_that_has_moved_is_followed_at_the_first_call(nodes: Cluster, tier: RedisTier) -> None:
    put_all(tier)
    source = nodes.owner
    target = next(node for node in nodes.primaries if node is not source)
    for call in (
        lambda: get(tier, KEY) == payload(KEY),
        lambda: None not in tier.find(KEYS, SECONDS),
        lambda: get_all(tier, KEYS) == [payload(key) for key in KEYS],
        lambda: all(put_together(tier, {key: payload(key) for key in KEYS})),
        lambda: put(tier, KEY, payload(KEY)),
        lambda: tier.delete([KEY], SECONDS) == 1,
    ):
        move_slot(source, target, name_of(KEY))
        source, target = target, source
        assert call()


def test_a_clear_during_a_move_says_that_it_may_have_missed_something(nodes: Cluster, tier: RedisTier) -> None:
    put_all(tier)
    with moving(nodes) as (source, target):
        move_key(source, target, names_in(source, ":h")[0])
        tier.delete_where(lambda _: True, SECONDS)
        assert not tier.health().ready
    wait_until(lambda: tier.health().ready)
    tier.delete_where(lambda _: True, SECONDS)
    assert tier.health().ready
    assert tier.find(KEYS, SECONDS) == [None] * len(KEYS)


@pytest.mark.parametrize("scheme", ["redis+cluster", "redis+sentinel"])
def test_case_69_nobody_there_to_ask_at_the_start_is_shown_and_heals(scheme: str) -> None:
    port = free_port()
    path = "" if scheme == "redis+cluster" else "/kvblend"
    with tier_on(f"{scheme}://127.0.0.1:{port}{path}") as tier:
        assert tier.find([KEY], 5.0) == [None]
        assert not put(tier, KEY, payload(KEY))
        assert tier.delete_where(lambda _: True, 5.0) == 0
        health = tier.health()
        assert not health.ready
        assert health.detail


def test_one_node_that_is_there_is_enough_to_find_the_cluster(nodes: Cluster) -> None:
    url = nodes.url.replace("cluster://", f"cluster://127.0.0.1:{free_port()},")
    with tier_on(url) as tier:
        put_all(tier)
        assert all(get(tier, key) == payload(key) for key in KEYS)


def _offset(server: RedisServer) -> int:
    return int(info(server, "replication")["master_repl_offset"])
