"""L2 in Redis or Valkey, shared by every store that reaches it. Needs Redis 6.2 or later, or Valkey."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from redis.exceptions import ResponseError

from kvblend.v1 import object_pb2
from services.common.logs import get_logger
from services.common.metrics import counter
from services.store.objects import ObjectKey
from services.store.tiers.base import TierHealth
from services.store.tiers.breaker import CircuitBreaker
from services.store.tiers.redis_format import describes, is_stored
from services.store.tiers.redis_link import LinkError, RedisLink, pack
from services.store.tiers.redis_objects import KEYS_A_COMMAND, RedisObjects

FAILURES = counter("kvblend_l2_redis_failures", "Calls to Redis without a result, by operation.", ("operation", "kind"))

MIB = 1 << 20
_PROBE_EVERY = 1.0
_PROBE_SECONDS = 0.25
# How long health tells of a clear that did not finish: its caller asks right after.
_UNFINISHED_SECONDS = 1.0
# A caller in more of a hurry than this proves nothing about the server when it goes without an answer.
_FAIR_SECONDS = 0.05

_log = get_logger("l2")
_T = TypeVar("_T")


class RedisTier:
    """A `Tier` on one Redis or Valkey server. Methods may be called from several threads.

    After 3 failures in a row calls answer a miss at once; every `half_open_seconds` one is let through to
    see whether the server is back. A server that is away at construction is no error.

    Args:
        url: redis://, rediss:// or unix://, with redis-py's options in the query (`?ssl_ca_certs=...`).
        key_prefix: in front of every key; stores share objects only under the same prefix.
        ttl_seconds: life of an object in Redis, unless it expires earlier by itself.
        part_bytes: 1 to 4 MiB.
        operation_timeout: seconds; an upper bound on the `timeout` that callers pass.

    Raises:
        ValueError: an argument that cannot be; says which.
    """

    def __init__(
        self,
        url: str,
        *,
        key_prefix: str = "kvblend:",
        ttl_seconds: int = 86_400,
        part_bytes: int = MIB,
        connect_timeout: float = 1.0,
        operation_timeout: float = 5.0,
        max_connections: int = 16,
        half_open_seconds: float = 5.0,
    ) -> None:
        if not MIB <= part_bytes <= 4 * MIB:
            raise ValueError(f"part_bytes is {part_bytes}; from {MIB} to {4 * MIB} is allowed")
        if ttl_seconds < 1:
            raise ValueError(f"ttl_seconds is {ttl_seconds}; at least 1 is allowed")
        if max_connections < 1:
            raise ValueError(f"max_connections is {max_connections}; at least 1 is allowed")
        if "{" in key_prefix or "}" in key_prefix:
            raise ValueError(f"key_prefix is {key_prefix!r}; braces are not allowed")
        self._link = RedisLink(url, connect_timeout, max_connections)
        self.tier_id = f"{self._link.address}#{key_prefix}"
        self._objects = RedisObjects(self._link, key_prefix, ttl_seconds, part_bytes)
        self._operation_timeout = operation_timeout
        self._breaker = CircuitBreaker(retry_seconds=half_open_seconds)
        self._health_lock = threading.Lock()
        self._probed_at = float("-inf")
        self._error = ""
        self._unfinished_until = float("-inf")
        self._used_bytes = 0
        self._capacity_bytes = 0

    def find(self, keys: Sequence[ObjectKey], timeout: float) -> list[object_pb2.ObjectMeta | None]:
        """Metas of the objects whose headers are there, in order; one round trip."""
        misses: list[object_pb2.ObjectMeta | None] = [None] * len(keys)
        if not keys:
            return misses
        return self._attempt("find", timeout, lambda deadline: self._objects.find(keys, deadline), misses)

    def read_into(self, key: ObjectKey, meta: object_pb2.ObjectMeta, target: memoryview, timeout: float) -> bool:
        """See `Tier.read_into`. False also for a meta that is not the key's or not `target`'s length."""
        if not describes(key, meta) or not is_stored(meta) or target.nbytes != meta.payload_bytes:
            return False
        return self._attempt(
            "read", timeout, lambda deadline: self._objects.read(key, meta, target.cast("B"), deadline), False
        )

    def write(self, key: ObjectKey, meta: object_pb2.ObjectMeta, payload: memoryview, timeout: float) -> bool:
        """See `Tier.write`. False also for a meta that is not the key's or not `payload`'s length.

        If the very last reply is lost, the object may nevertheless be there: whole, never torn.
        """
        if not describes(key, meta) or not 0 < payload.nbytes == meta.payload_bytes:
            return False
        return self._attempt(
            "write", timeout, lambda deadline: self._objects.write(key, meta, payload, deadline), False
        )

    def lacking(self, objects: Sequence[tuple[ObjectKey, object_pb2.ObjectMeta]], timeout: float) -> list[bool] | None:
        """See `Tier.lacking`."""
        nothing: list[bool] | None = None
        return self._attempt("find", timeout, lambda deadline: self._objects.lacking(objects, deadline), nothing)

    def delete(self, keys: Sequence[ObjectKey], timeout: float) -> int:
        """How many objects were there and are gone."""
        give_up_at = time.monotonic() + timeout
        gone = 0
        for first in range(0, len(keys), KEYS_A_COMMAND):
            some = keys[first : first + KEYS_A_COMMAND]
            left = give_up_at - time.monotonic()
            gone += self._attempt("delete", left, lambda deadline, some=some: self._objects.delete(some, deadline), 0)  # type: ignore[misc]
        return gone

    def delete_where(self, matches: Callable[[object_pb2.ObjectMeta], bool], timeout: float) -> int:
        """See `Tier.delete_where`. If it could not look at every object, `health` is not ready for a second."""
        give_up_at = time.monotonic() + timeout
        cursor, gone = b"0", 0
        while True:
            left = give_up_at - time.monotonic()
            page = self._attempt(
                "delete",
                left,
                lambda deadline, cursor=cursor: self._objects.delete_page(cursor, matches, deadline),  # type: ignore[misc]
                None,
            )
            if page is None:
                self._unfinished_until = time.monotonic() + _UNFINISHED_SECONDS
                return gone
            cursor, count = page
            gone += count
            if cursor == b"0":
                return gone

    def health(self) -> TierHealth:
        """What the last calls showed; asks the server at most once a second, for at most 0.25 s."""
        with self._health_lock:
            due = time.monotonic() - self._probed_at >= _PROBE_EVERY
            if due:
                self._probed_at = time.monotonic()
        if due:
            self._attempt("health", _PROBE_SECONDS, self._probe, None)
        error = self._error
        if not error and time.monotonic() < self._unfinished_until:
            error = "not every object could be looked at to delete what was named"
        return TierHealth(not error, error, self._used_bytes, self._capacity_bytes)

    def close(self) -> None:
        """Later calls answer a miss."""
        self._link.close()

    def _attempt(self, operation: str, timeout: float, work: Callable[[float], _T], miss: _T) -> _T:
        """`work(deadline)`, or `miss` if the server is away, slow or refuses."""
        allowed = min(timeout, self._operation_timeout)
        if allowed <= 0 or not self._breaker.allow():
            return miss
        try:
            result = work(time.monotonic() + allowed)
        except LinkError as error:
            FAILURES.labels(operation, error.kind).inc()
            if error.kind == "down" or (error.kind == "late" and allowed >= _FAIR_SECONDS):
                self._failed(str(error))
            return miss
        except ResponseError as error:
            FAILURES.labels(operation, "refused").inc()
            # A server that takes no writes (full, read-only) still serves what it holds.
            if operation != "write":
                self._failed(str(error))
            return miss
        self._error = ""
        if self._breaker.success():
            _log.info("L2 is back", tier=self.tier_id)
        return result

    def _failed(self, error: str) -> None:
        self._error = error
        if self._breaker.failure():
            _log.warning("L2 is down", tier=self.tier_id, error=error)

    def _probe(self, deadline: float) -> None:
        _, memory = self._link.exchange([pack("PING"), pack("INFO", "memory")], deadline)
        if isinstance(memory, ResponseError):
            return
        facts = dict(line.split(":", 1) for line in memory.decode().splitlines() if ":" in line)
        self._used_bytes = int(facts.get("used_memory", 0))
        self._capacity_bytes = int(facts.get("maxmemory", 0))
