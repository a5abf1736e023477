"""What is in Redis: finding and deleting objects by their headers (redis_format.py: how they lie there).

Every method uses one server, by a deadline in monotonic seconds, and raises LinkError if there is no answer,
ResponseError if Redis refuses. A slot that is being moved is followed to both of its servers.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from redis.exceptions import MovedError

from kvblend.v1 import object_pb2
from services.common.redis_connection import BoundedConnection
from services.store.objects import ObjectKey
from services.store.tiers.redis_commands import Commands, refuse_errors
from services.store.tiers.redis_format import Names, decode_header
from services.store.tiers.redis_node import RedisNode
from services.store.tiers.redis_servers import RedisServers
from services.store.tiers.redis_transfers import DAMAGED

KEYS_A_COMMAND = 256
# Of one object: its meta, None if it is not there, or the error that says who else is to be asked.
Found: TypeAlias = object_pb2.ObjectMeta | MovedError | None


class Headers:
    def __init__(self, servers: RedisServers, names: Names) -> None:
        self._servers = servers
        self._names = names

    def find(self, node: RedisNode, keys: Sequence[ObjectKey], deadline: float) -> list[Found]:
        """In order; None also for what has expired, or has a header not to be believed."""

        def work(connection: BoundedConnection) -> list[Found]:
            commands = Commands(self._servers, node, connection, deadline)
            found: list[Found] = []
            damaged = []
            now = time.time()
            for key, value in zip(keys, self._headers(commands, keys), strict=True):
                meta = decode_header(key, value) if isinstance(value, bytes) else None
                if isinstance(value, bytes) and meta is None:
                    DAMAGED.labels("header").inc()
                    damaged.append(key)
                expired = meta is not None and 0 < meta.expires_at <= now
                moved = value if isinstance(value, MovedError) else None
                found.append(moved if expired or meta is None else meta)
            commands.forget([[self._names.header(key)] for key in damaged])
            return found

        return node.use("find", deadline, work)

    def lacking(
        self, node: RedisNode, objects: Sequence[tuple[ObjectKey, object_pb2.ObjectMeta]], deadline: float
    ) -> list[bool | MovedError]:
        """Whether parts of what these headers promise are gone, in order."""

        def work(connection: BoundedConnection) -> list[bool | MovedError]:
            commands = Commands(self._servers, node, connection, deadline)
            counts = commands.exchange([("EXISTS", *self._names.parts(key, meta)) for key, meta in objects])
            refuse_errors([count for count in counts if not isinstance(count, MovedError)])
            return [
                count if isinstance(count, MovedError) else count < meta.parts
                for count, (_, meta) in zip(counts, objects, strict=True)
            ]

        return node.use("find", deadline, work)

    def delete(self, node: RedisNode, keys: Sequence[ObjectKey], deadline: float) -> list[bool | MovedError]:
        """Whether each was there; headers go first."""

        def work(connection: BoundedConnection) -> list[bool | MovedError]:
            commands = Commands(self._servers, node, connection, deadline)
            values = self._headers(commands, keys)
            outcomes: list[bool | MovedError] = [value if isinstance(value, MovedError) else False for value in values]
            present = {index: value for index, value in enumerate(values) if isinstance(value, bytes)}
            gone = refuse_errors(commands.exchange([("UNLINK", self._names.header(keys[index])) for index in present]))
            for index, count in zip(present, gone, strict=True):
                outcomes[index] = count > 0
            metas = [(keys[index], decode_header(keys[index], value)) for index, value in present.items()]
            commands.forget([self._names.parts(key, meta) for key, meta in metas if meta is not None])
            return outcomes

        return node.use("delete", deadline, work)

    def delete_page(
        self, node: RedisNode, cursor: bytes, matches: Callable[[object_pb2.ObjectMeta], bool], deadline: float
    ) -> tuple[bytes, int]:
        """One step of a walk over a server's objects, from cursor b"0" until it is b"0" again: (next cursor, deleted).

        A header that cannot be read goes too: nobody can tell any more whose object it was.
        """

        def work(connection: BoundedConnection) -> tuple[bytes, list[ObjectKey]]:
            commands = Commands(self._servers, node, connection, deadline)
            pattern = self._names.header_pattern()
            following, headers = connection.call("SCAN", cursor, "MATCH", pattern, "COUNT", KEYS_A_COMMAND)
            keys = [key for key in map(self._names.key_of, headers) if key is not None]
            chosen = []
            for key, value in zip(keys, self._headers(commands, keys), strict=True):
                if isinstance(value, MovedError):
                    raise value
                meta = decode_header(key, value) if value is not None else None
                if meta is None or matches(meta):
                    chosen.append(key)
            return following, chosen

        following, chosen = node.use("delete", deadline, work)
        gone = 0
        for first in range(0, len(chosen), KEYS_A_COMMAND):
            outcomes = self.delete(node, chosen[first : first + KEYS_A_COMMAND], deadline)
            refuse_errors(outcomes)
            gone += sum(outcome is True for outcome in outcomes)
        return following, gone

    def _headers(self, commands: Commands, keys: Sequence[ObjectKey]) -> list[bytes | MovedError | None]:
        """Values in order; MovedError where another server is to be asked. Other refusals are raised."""
        names = [self._names.header(key) for key in keys]
        if not names:
            return []
        if not self._servers.clustered:
            values: list[bytes | MovedError | None] = commands.connection.call("MGET", *names)
            return values
        replies = commands.exchange([("GET", name) for name in names])
        refuse_errors([reply for reply in replies if not isinstance(reply, MovedError)])
        return replies
