"""RedisTier on every kind of server, and a slow obvious tier, keep the contract; broken tiers are found out."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from redis_server import RedisServer, find_valkey, redis_server
from redis_tls import tls_server
from redis_topologies import client_of, cluster, sentinel_set
from tier_contract import CHECKS, Check

from kvblend.v1 import object_pb2
from services.common.checksums import checksum_of
from services.store.objects import ObjectKey
from services.store.tiers.base import Read, TierHealth, Write
from services.store.tiers.redis import RedisTier
from services.store.tiers.redis_format import describes


class MemoryTier:
    """The contract in its simplest form; `flaw` names the one thing it does wrong."""

    tier_id = "memory"

    def __init__(self, flaw: str = "") -> None:
        self._flaw = flaw
        self._objects: dict[object, tuple[object_pb2.ObjectMeta, bytes]] = {}
        self._closed = False
        self._unfinished = False

    def _name(self, key: ObjectKey) -> object:
        return (key.chunk.chain_hash, key.group) if self._flaw == "ignores rank and domain" else key

    def _refuses(self, timeout: float) -> bool:
        return (timeout <= 0 and self._flaw != "ignores the timeout") or self._closed

    def find(self, keys: Sequence[ObjectKey], timeout: float) -> list[object_pb2.ObjectMeta | None]:
        found: list[object_pb2.ObjectMeta | None] = []
        for key in keys:
            meta, _ = self._objects.get(self._name(key), (None, b""))
            expired = meta is not None and 0 < meta.expires_at <= time.time() and self._flaw != "serves the expired"
            found.append(None if meta is None or expired or self._refuses(timeout) else meta)
        if self._flaw == "forgets the order":
            return sorted(found, key=lambda meta: meta is None)
        return found

    def read_into(self, reads: Sequence[Read], timeout: float) -> list[bool]:
        outcomes = [self._read(*read, timeout) for read in reads]
        if self._flaw == "fails all with one":
            return [all(outcomes)] * len(outcomes)
        if self._flaw == "answers as reads end":
            return sorted(outcomes, reverse=True)
        return outcomes

    def _read(self, key: ObjectKey, meta: object_pb2.ObjectMeta, target: memoryview, timeout: float) -> bool:
        held, data = self._objects.get(self._name(key), (None, b""))
        if held is None or self._refuses(timeout) or not describes(key, meta) or len(target) != meta.payload_bytes:
            return False
        if held.checksum != meta.checksum and self._flaw != "mixes writes":
            return False
        wrong = checksum_of(data) != meta.checksum
        if wrong and self._flaw not in ("trusts the checksum", "mixes writes"):
            if self._flaw == "deletes all with one":
                self._objects.clear()
            self._objects.pop(self._name(key), None)
            return False
        target[:] = data
        return True

    def write(self, writes: Sequence[Write], timeout: float) -> list[bool]:
        outcomes = []
        for item in writes:
            outcomes.append(self._write(*item, timeout))
            if self._flaw == "stops at the first that fails" and not outcomes[-1]:
                return outcomes + [False] * (len(writes) - len(outcomes))
        if self._flaw == "says yes for all":
            return [any(outcomes)] * len(outcomes)
        return outcomes

    def _write(self, key: ObjectKey, meta: object_pb2.ObjectMeta, payload: memoryview, timeout: float) -> bool:
        if self._refuses(timeout) or not describes(key, meta):
            return False
        if len(payload) != meta.payload_bytes and self._flaw != "takes any length":
            return False
        if self._flaw != "loses writes" and not (self._flaw == "never replaces" and self._name(key) in self._objects):
            kept = object_pb2.ObjectMeta()
            kept.CopyFrom(meta)
            if self._flaw == "drops the document":
                del kept.documents[:]
            self._objects[self._name(key)] = (kept, bytes(payload))
        return True

    def delete(self, keys: Sequence[ObjectKey], timeout: float) -> int:
        if self._refuses(timeout):
            return 0
        gone = [key for key in keys if self._objects.pop(self._name(key), None) is not None]
        return len(keys) if self._flaw == "counts what was not there" else len(gone)

    def delete_where(self, matches: Callable[[object_pb2.ObjectMeta], bool], timeout: float) -> int:
        if self._refuses(timeout):
            self._unfinished = True
            return 0
        gone = [name for name, (meta, _) in self._objects.items() if matches(meta) or self._flaw == "clears too much"]
        for name in gone[1:] if self._flaw == "clears too little" else gone:
            del self._objects[name]
        return len(gone)

    def health(self) -> TierHealth:
        fine = not (self._closed or self._unfinished) or self._flaw == "is always fine"
        return TierHealth(fine, "" if fine else "closed, or a clear did not finish")

    def close(self) -> None:
        self._closed = True


FLAWS = [
    "loses writes",
    "ignores rank and domain",
    "ignores the timeout",
    "serves the expired",
    "forgets the order",
    "mixes writes",
    "trusts the checksum",
    "takes any length",
    "never replaces",
    "fails all with one",
    "answers as reads end",
    "deletes all with one",
    "stops at the first that fails",
    "says yes for all",
    "drops the document",
    "counts what was not there",
    "clears too much",
    "clears too little",
    "is always fine",
]


@contextmanager
def places(kind: str) -> Iterator[tuple[str, list[RedisServer]]]:
    """URL of a tier of that kind, and the servers that hold what it holds."""
    if kind == "sentinel":
        with sentinel_set() as found:
            yield found.url, [found.primary]
    elif kind == "cluster":
        with cluster(b"any", replicas=3) as nodes:
            yield nodes.url, nodes.primaries
    elif kind == "tls":
        with tls_server() as tls:
            yield tls.url, [tls.server]
    else:
        with redis_server(binary=find_valkey() if kind == "valkey" else "") as server:
            yield server.tcp_url if kind == "tcp" else server.unix_url, [server]


@pytest.fixture(scope="module", params=["unix", "tcp", "tls", "valkey", "sentinel", "cluster"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[RedisServer]]]:
    with places(request.param) as found:
        yield found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_redis_tier_keeps_the_contract(place: tuple[str, list[RedisServer]], check: Check) -> None:
    url, servers = place
    for server in servers:
        with client_of(server) as client:
            client.flushall()
    tier = RedisTier(url)
    try:
        check(tier)
    finally:
        tier.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_obvious_tier_keeps_the_contract(check: Check) -> None:
    check(MemoryTier())


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_contract_finds_a_broken_tier(flaw: str) -> None:
    failed = []
    for check in CHECKS:
        try:
            check(MemoryTier(flaw))
        except AssertionError:
            failed.append(check.__name__)
    assert failed, f"no check noticed a tier that {flaw}"
