"""L2 in Redis or Valkey, shared by every store that reaches it. Needs Redis 6.2 or later, or Valkey.

Redis acknowledges a write before its replicas have it: what was written just before a failover may be gone after it.
Replicas receive parts before the header that names them, so the object is gone as a whole: a miss. Where that is too
little, the server's `min-replicas-to-write` makes a write without replicas fail.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import TypeVar

from redis.exceptions import ClusterDownError, MovedError, ResponseError

from kvblend.v1 import object_pb2
from services.common.redis_connection import BoundedConnection, LinkError
from services.common.redis_url import parse_route
from services.store.objects import ObjectKey
from services.store.tiers.base import Read, TierHealth, Write
from services.store.tiers.redis_calls import RedisCalls
from services.store.tiers.redis_format import Names, describes, is_stored
from services.store.tiers.redis_headers import KEYS_A_COMMAND, Headers
from services.store.tiers.redis_node import NodeLimits, RedisNode
from services.store.tiers.redis_servers import RedisServers
from services.store.tiers.redis_transfers import Transfers

MIB = 1 << 20
_PROBE_EVERY = 1.0
_PROBE_SECONDS = 0.25
# How long health tells of a clear that did not finish: its caller asks right after.
_UNFINISHED_SECONDS = 1.0
# Walks over all objects, while keys are moved from one server to another.
_CLEARS = 2

_Object = TypeVar("_Object", Read, Write)


class RedisTier:
    """A `Tier` on Redis or Valkey: one server, one with Sentinels, or a cluster. Methods may be called from several
    threads.

    Every server has a circuit breaker: after 3 failures in a row what it holds is a miss at once; every
    `half_open_seconds` one call is let through to see whether it is back. The other servers of a cluster go on.
    Servers that are away at construction are no error.

    Args:
        url: see `parse_route`.
        key_prefix: in front of every key; stores share objects only under the same prefix.
        ttl_seconds: life of an object in Redis, unless it expires earlier by itself.
        part_bytes: 1 to 4 MiB; larger values are slow in Redis.
        operation_timeout: seconds; an upper bound on the `timeout` that callers pass.
        max_connections: to each server.

    Raises:
        ValueError: an argument that cannot be; says which.
    """

    def __init__(
        self,
        url: str,
        *,
        key_prefix: str = "kvblend:",
        ttl_seconds: int = 86_400,
        part_bytes: int = 2 * MIB,
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
        route = parse_route(url)
        self.tier_id = f"{route.name}#{key_prefix}"
        self._servers = RedisServers(route, NodeLimits(connect_timeout, max_connections, half_open_seconds))
        self._headers = Headers(self._servers, Names(key_prefix))
        self._transfers = Transfers(self._servers, Names(key_prefix), ttl_seconds, part_bytes)
        self._calls = RedisCalls(self._servers)
        self._operation_timeout = operation_timeout
        self._closed = False
        self._health_lock = threading.Lock()
        self._probed_at = float("-inf")
        self._unfinished_until = float("-inf")
        # Bytes used and allowed, by server.
        self._usage: dict[str, tuple[int, int]] = {}

    def find(self, keys: Sequence[ObjectKey], timeout: float) -> list[object_pb2.ObjectMeta | None]:
        """Metas of the objects whose headers are there, in order; one round trip to each server."""
        deadline = self._deadline(timeout)
        return self._calls.on_all(
            keys, deadline, lambda node, places: self._headers.find(node, [keys[place] for place in places], deadline)
        )

    def read_into(self, reads: Sequence[Read], timeout: float) -> list[bool]:
        """See `Tier.read_into`. False also for a meta that is not the key's or not the target's length."""
        sound = [
            describes(key, meta) and is_stored(meta) and target.nbytes == meta.payload_bytes
            for key, meta, target in reads
        ]
        return self._transferred(reads, sound, timeout, self._transfers.read)

    def write(self, writes: Sequence[Write], timeout: float) -> list[bool]:
        """See `Tier.write`. False also for a meta that is not the key's or not the payload's length.

        If the very last reply is lost, the object may nevertheless be there: whole, never torn.
        """
        sound = [describes(key, meta) and 0 < payload.nbytes == meta.payload_bytes for key, meta, payload in writes]
        return self._transferred(writes, sound, timeout, self._transfers.write)

    def _transferred(
        self,
        objects: Sequence[_Object],
        sound: Sequence[bool],
        timeout: float,
        transfer: Callable[[RedisNode, Sequence[_Object], float], list[bool | MovedError]],
    ) -> list[bool]:
        """Whether each was transferred by the server that has it; of those that are sound."""
        deadline, some = self._deadline(timeout), list(compress(objects, sound))
        outcomes = iter(
            self._calls.on_all(
                [item.key for item in some],
                deadline,
                lambda node, places: transfer(node, [some[place] for place in places], deadline),
            )
        )
        return [fine and next(outcomes) is True for fine in sound]

    def lacking(self, objects: Sequence[tuple[ObjectKey, object_pb2.ObjectMeta]], timeout: float) -> list[bool] | None:
        """See `Tier.lacking`."""
        deadline = self._deadline(timeout)
        found: list[bool | None] = self._calls.on_all(
            [key for key, _ in objects],
            deadline,
            lambda node, places: self._headers.lacking(node, [objects[place] for place in places], deadline),
        )
        known = [lacks for lacks in found if lacks is not None]
        return known if len(known) == len(objects) else None

    def delete(self, keys: Sequence[ObjectKey], timeout: float) -> int:
        """How many objects were there and are gone."""
        give_up_at = time.monotonic() + timeout
        gone = 0
        for first in range(0, len(keys), KEYS_A_COMMAND):
            deadline = self._deadline(give_up_at - time.monotonic())
            outcomes = self._calls.on_all(
                keys[first : first + KEYS_A_COMMAND], deadline, partial(self._drop, keys, first, deadline)
            )
            gone += sum(outcome is True for outcome in outcomes)
        return gone

    def _drop(
        self, keys: Sequence[ObjectKey], first: int, deadline: float, node: RedisNode, places: Sequence[int]
    ) -> list[bool | MovedError]:
        return self._headers.delete(node, [keys[first + place] for place in places], deadline)

    def delete_where(self, matches: Callable[[object_pb2.ObjectMeta], bool], timeout: float) -> int:
        """See `Tier.delete_where`. If it could not look at every object, `health` is not ready for a second."""
        give_up_at = time.monotonic() + timeout
        gone = 0
        for _ in range(_CLEARS):
            # The first answer is waited for before changes of it are counted.
            self._servers.masters(give_up_at)
            before = self._servers.changes
            nodes = self._servers.masters(give_up_at)
            walks = self._calls.side_by_side(nodes, give_up_at, lambda node: self._clear(node, matches, give_up_at))
            gone += sum(count for count, _ in walks.values())
            finished = bool(nodes) and len(walks) == len(nodes) and all(done for _, done in walks.values())
            # While keys were moved from one server to another, some may have been at neither when it was looked at.
            if finished and self._servers.changes == before:
                return gone
        self._unfinished_until = time.monotonic() + _UNFINISHED_SECONDS
        return gone

    def _clear(
        self, node: RedisNode, matches: Callable[[object_pb2.ObjectMeta], bool], give_up_at: float
    ) -> tuple[int, bool]:
        """How many objects of one server are gone, and whether all were looked at."""
        cursor, gone = b"0", 0
        while True:
            deadline = self._deadline(give_up_at - time.monotonic())
            try:
                cursor, count = self._headers.delete_page(node, cursor, matches, deadline)
            except (LinkError, ResponseError):
                self._servers.suspect()
                return gone, False
            gone += count
            if cursor == b"0":
                return gone, True

    def health(self) -> TierHealth:
        """What the last calls showed; asks the servers at most once a second, for at most 0.25 s."""
        with self._health_lock:
            due = time.monotonic() - self._probed_at >= _PROBE_EVERY
            if due:
                self._probed_at = time.monotonic()
        deadline = time.monotonic() + _PROBE_SECONDS
        nodes = self._servers.masters(deadline)
        if due:
            self._calls.side_by_side(nodes, deadline, lambda node: self._probe(node, deadline))
        down = [f"{node.name}: {node.error}" for node in nodes if node.error]
        usage = [self._usage.get(node.name, (0, 0)) for node in nodes]
        used, capacity = (sum(column) for column in zip(*usage, strict=True)) if usage else (0, 0)
        detail = "; ".join(down)
        if detail and len(nodes) > 1:
            detail = f"{len(down)} of {len(nodes)} servers: {detail}"
        elif self._closed:
            detail = "closed"
        elif not nodes:
            detail = self._servers.problem or "no server is known yet"
        elif not detail and time.monotonic() < self._unfinished_until:
            detail = "not every object could be looked at to delete what was named"
        return TierHealth(not detail, detail, used, capacity)

    def close(self) -> None:
        """Later calls answer a miss."""
        self._closed = True
        self._servers.close()
        self._calls.close()

    def _probe(self, node: RedisNode, deadline: float) -> None:
        def work(connection: BoundedConnection) -> None:
            commands = [("PING",), ("INFO", "memory"), *([("CLUSTER", "INFO")] if self._servers.clustered else [])]
            pong, memory, *state = connection.exchange(commands)
            if isinstance(pong, ResponseError):
                raise pong
            if state and not isinstance(state[0], ResponseError) and b"cluster_state:ok" not in state[0]:
                raise ClusterDownError("the cluster is down")
            if isinstance(memory, bytes):
                facts = dict(line.split(":", 1) for line in memory.decode().splitlines() if ":" in line)
                self._usage[node.name] = (int(facts.get("used_memory", 0)), int(facts.get("maxmemory", 0)))

        node.use("health", deadline, work)

    def _deadline(self, timeout: float) -> float:
        return time.monotonic() + min(timeout, self._operation_timeout)
