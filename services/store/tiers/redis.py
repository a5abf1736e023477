"""L2 in Redis or Valkey: objects as a header and parts of 1 to 4 MiB, shared by every store that reaches it.

The header is written last, once every part is acknowledged, so an object is found only when all of
it was there. Whatever Redis evicts, loses or damages later is noticed while reading: lengths and an
xxh3-64 of the whole payload must agree with the header, or the object is deleted and answered as a
miss. Needs Redis 6.2 or later, or Valkey.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import xxhash
from redis.exceptions import ResponseError

from kvblend.v1 import object_pb2
from services.common.logs import get_logger
from services.common.metrics import counter
from services.store.objects import ObjectKey
from services.store.tiers.base import TierHealth
from services.store.tiers.breaker import CircuitBreaker
from services.store.tiers.redis_format import Names, decode_header, describes, encode_header
from services.store.tiers.redis_link import Argument, LinkError, RedisLink, pack

FAILURES = counter("kvblend_l2_redis_failures", "Calls to Redis without a result, by operation.", ("operation", "kind"))
DAMAGED = counter("kvblend_l2_redis_damaged_objects", "Objects in Redis found damaged or incomplete.", ("damage",))

MIB = 1 << 20
# Sent or received at once: enough to be fast, little enough to look at the clock now and then.
_BATCH_BYTES = 8 * MIB
_KEYS_A_COMMAND = 256
_PROBE_EVERY = 1.0
_PROBE_SECONDS = 0.25
# A caller in more of a hurry than this proves nothing about the server when it goes without an answer.
_FAIR_SECONDS = 0.05
# Parts outlive their header, so that expiry never leaves a header without parts.
_PART_EXTRA_SECONDS = 60

_log = get_logger("l2")
_T = TypeVar("_T")


class _DamagedObject(Exception):
    """`args[0]` names the damage."""


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
        self._names = Names(key_prefix)
        self._ttl_seconds = ttl_seconds
        self._part_bytes = part_bytes
        self._operation_timeout = operation_timeout
        self._breaker = CircuitBreaker(retry_seconds=half_open_seconds)
        self._health_lock = threading.Lock()
        self._probed_at = float("-inf")
        self._error = ""
        self._used_bytes = 0
        self._capacity_bytes = 0

    def find(self, keys: Sequence[ObjectKey], timeout: float) -> list[object_pb2.ObjectMeta | None]:
        """Metas of the objects whose headers are there, in order; one round trip."""
        misses: list[object_pb2.ObjectMeta | None] = [None] * len(keys)
        if not keys:
            return misses
        return self._attempt("find", timeout, lambda deadline: self._find(keys, deadline), misses)

    def read_into(self, key: ObjectKey, meta: object_pb2.ObjectMeta, target: memoryview, timeout: float) -> bool:
        """See `Tier.read_into`. False also for a meta that is not the key's or not `target`'s length."""
        if not describes(key, meta) or target.nbytes != meta.payload_bytes:
            return False
        return self._attempt("read", timeout, lambda deadline: self._read(key, meta, target.cast("B"), deadline), False)

    def write(self, key: ObjectKey, meta: object_pb2.ObjectMeta, payload: memoryview, timeout: float) -> bool:
        """See `Tier.write`. False also for a meta that is not the key's or not `payload`'s length.

        If the very last reply is lost, the object may nevertheless be there: whole, never torn.
        """
        if not describes(key, meta) or not 0 < payload.nbytes == meta.payload_bytes:
            return False
        return self._attempt("write", timeout, lambda deadline: self._write(key, meta, payload, deadline), False)

    def delete(self, keys: Sequence[ObjectKey], timeout: float) -> int:
        """How many objects were there and are gone."""
        give_up_at = time.monotonic() + timeout
        gone = 0
        for first in range(0, len(keys), _KEYS_A_COMMAND):
            some = keys[first : first + _KEYS_A_COMMAND]
            left = give_up_at - time.monotonic()
            gone += self._attempt("delete", left, lambda deadline, some=some: self._delete(some, deadline), 0)  # type: ignore[misc]
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

    def _ask(self, commands: Sequence[list[Argument]], deadline: float) -> list[Any]:
        """Replies; an error among them is raised."""
        replies = self._link.exchange(commands, deadline)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
        return replies

    def _find(self, keys: Sequence[ObjectKey], deadline: float) -> list[object_pb2.ObjectMeta | None]:
        headers = [self._names.header(key) for key in keys]
        values: list[bytes | None] = self._ask([pack("MGET", *headers)], deadline)[0]
        found: list[object_pb2.ObjectMeta | None] = []
        damaged = []
        now = time.time()
        for key, header, value in zip(keys, headers, values, strict=True):
            meta = decode_header(key, value) if value is not None else None
            if value is not None and meta is None:
                DAMAGED.labels("header").inc()
                damaged.append(header)
            expired = meta is not None and 0 < meta.expires_at <= now
            found.append(None if expired else meta)
        if damaged:
            self._forget(damaged, deadline)
        return found

    def _read(self, key: ObjectKey, meta: object_pb2.ObjectMeta, target: memoryview, deadline: float) -> bool:
        try:
            self._copy_parts(key, meta, target, deadline)
        except _DamagedObject as damage:
            DAMAGED.labels(damage.args[0]).inc()
            self._discard(key, meta, deadline)
            return False
        return True

    def _copy_parts(self, key: ObjectKey, meta: object_pb2.ObjectMeta, target: memoryview, deadline: float) -> None:
        names = self._names.parts(key, meta)
        batch = max(1, _BATCH_BYTES * len(names) // max(1, meta.payload_bytes))
        digest = xxhash.xxh3_64()
        end = 0
        for first in range(0, len(names), batch):
            for part in self._ask([pack("MGET", *names[first : first + batch])], deadline)[0]:
                if part is None:
                    raise _DamagedObject("missing_part")
                start, end = end, end + len(part)
                if end > len(target):
                    raise _DamagedObject("length")
                target[start:end] = part
                digest.update(part)
        if end != len(target):
            raise _DamagedObject("length")
        if digest.intdigest() != meta.checksum:
            raise _DamagedObject("checksum")

    def _discard(self, key: ObjectKey, meta: object_pb2.ObjectMeta, deadline: float) -> None:
        """Deletes that write of the object, but not a newer one."""
        header = self._names.header(key)
        value = self._ask([pack("GET", header)], deadline)[0]
        current = decode_header(key, value) if value is not None else None
        ours = current is None or current.write_id == meta.write_id
        self._forget([*([header] if ours else []), *self._names.parts(key, meta)], deadline)

    def _write(self, key: ObjectKey, meta: object_pb2.ObjectMeta, payload: memoryview, deadline: float) -> bool:
        ttl = self._ttl_seconds
        if meta.expires_at:
            ttl = min(ttl, int(meta.expires_at - time.time()))
            if ttl < 1:
                return False
        data = payload.cast("B")
        stored = object_pb2.ObjectMeta()
        stored.CopyFrom(meta)
        stored.write_id = secrets.token_hex(8)
        stored.parts = -(-len(data) // self._part_bytes)
        names = self._names.parts(key, stored)
        try:
            self._send_parts(names, data, ttl + _PART_EXTRA_SECONDS, deadline)
            command = pack("SET", self._names.header(key), encode_header(key, stored), "EX", ttl, "GET")
            previous = self._ask([command], deadline)[0]
        except ResponseError:
            self._forget(names, deadline)
            raise
        replaced = decode_header(key, previous) if previous is not None else None
        if replaced is not None:
            self._forget(self._names.parts(key, replaced), deadline)
        return True

    def _send_parts(self, names: list[bytes], data: memoryview, ttl: int, deadline: float) -> None:
        size = self._part_bytes
        commands = [
            pack("SET", name, data[size * index : size * (index + 1)], "EX", ttl) for index, name in enumerate(names)
        ]
        batch = _BATCH_BYTES // size
        for first in range(0, len(commands), batch):
            self._ask(commands[first : first + batch], deadline)

    def _forget(self, names: list[bytes], deadline: float) -> None:
        """Deletes what no header speaks of any more. It would expire anyway, so no failure matters."""
        try:
            self._link.exchange([pack("UNLINK", *names)], deadline)
        except LinkError as error:
            FAILURES.labels("forget", error.kind).inc()

    def _delete(self, keys: Sequence[ObjectKey], deadline: float) -> int:
        headers = [self._names.header(key) for key in keys]
        values = self._ask([pack("MGET", *headers)], deadline)[0]
        answers = zip(keys, headers, values, strict=True)
        present = [(key, header, value) for key, header, value in answers if value is not None]
        if not present:
            return 0
        parts: list[bytes] = []
        for key, _, value in present:
            meta = decode_header(key, value)
            parts += self._names.parts(key, meta) if meta is not None else []
        commands = [pack("UNLINK", *(header for _, header, _ in present))]
        for first in range(0, len(parts), _KEYS_A_COMMAND):
            commands.append(pack("UNLINK", *parts[first : first + _KEYS_A_COMMAND]))
        gone: int = self._ask(commands, deadline)[0]
        return gone

    def _probe(self, deadline: float) -> None:
        _, memory = self._link.exchange([pack("PING"), pack("INFO", "memory")], deadline)
        if isinstance(memory, ResponseError):
            return
        facts = dict(line.split(":", 1) for line in memory.decode().splitlines() if ":" in line)
        self._used_bytes = int(facts.get("used_memory", 0))
        self._capacity_bytes = int(facts.get("maxmemory", 0))
