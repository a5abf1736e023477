"""Objects in Redis: the commands that find, read, write and delete them (redis_format.py: how they lie there).

The header is written last, once every part is acknowledged, so an object is found only when all of
it was there. Whatever Redis evicts, loses or damages later is noticed while reading: lengths and an
xxh3-64 of the whole payload must agree with the header, or the object is deleted. Deadlines are
monotonic seconds. Every method uses one server, and raises LinkError if there is no answer, ResponseError if Redis
refuses: MovedError if another server has the object. A slot that is being moved is followed to both of its servers.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeAlias

import xxhash
from redis.exceptions import AskError, MovedError, ResponseError

from kvblend.v1 import object_pb2
from services.common.metrics import counter
from services.common.redis_connection import Argument, BoundedConnection, LinkError
from services.store.objects import ObjectKey
from services.store.tiers.redis_format import Names, cut, decode_header, encode_header
from services.store.tiers.redis_node import RedisNode
from services.store.tiers.redis_parts import PartReader, WrongLength, send_parts
from services.store.tiers.redis_servers import RedisServers

DAMAGED = counter("kvblend_l2_redis_damaged_objects", "Objects in Redis found damaged or incomplete.", ("damage",))

KEYS_A_COMMAND = 256
# Parts outlive their header, so that expiry never leaves a header without parts.
_PART_EXTRA_SECONDS = 60

Command = Sequence[Argument]
# Of one object: its meta, None if it is not there, or the error that says who else is to be asked.
Found: TypeAlias = object_pb2.ObjectMeta | MovedError | None


class _DamagedObject(Exception):
    """`args[0]` names the damage."""


class RedisObjects:
    def __init__(self, servers: RedisServers, names: Names, ttl_seconds: int, part_bytes: int) -> None:
        self._servers = servers
        self._names = names
        self._ttl_seconds = ttl_seconds
        self._part_bytes = part_bytes

    def find(self, node: RedisNode, keys: Sequence[ObjectKey], deadline: float) -> list[Found]:
        """In order; None also for what has expired, or has a header not to be believed."""

        def work(connection: BoundedConnection) -> list[Found]:
            found: list[Found] = []
            damaged = []
            now = time.time()
            for key, value in zip(keys, self._headers(connection, node, keys, deadline), strict=True):
                meta = decode_header(key, value) if isinstance(value, bytes) else None
                if isinstance(value, bytes) and meta is None:
                    DAMAGED.labels("header").inc()
                    damaged.append(key)
                expired = meta is not None and 0 < meta.expires_at <= now
                moved = value if isinstance(value, MovedError) else None
                found.append(moved if expired or meta is None else meta)
            self._forget(connection, [[self._names.header(key)] for key in damaged])
            return found

        return node.use("find", deadline, work)

    def read(
        self, node: RedisNode, key: ObjectKey, meta: object_pb2.ObjectMeta, target: memoryview, deadline: float
    ) -> bool:
        """Payload into `target`; false, and the object deleted, if it is not whole."""
        damage = ""

        def work(connection: BoundedConnection) -> bool:
            nonlocal damage
            with node.spare_connection(deadline) if meta.parts > 1 else nullcontext() as other:
                lanes = [connection, other] if other is not None else [connection]
                try:
                    return self._receive(node, key, meta, target, lanes, deadline)
                except _DamagedObject as found:
                    damage = found.args[0]
                    return False

        whole = node.use("read", deadline, work)
        if damage:
            DAMAGED.labels(damage).inc()
            node.use("delete", deadline, lambda connection: self._discard(connection, key, meta))
        return whole

    def _receive(
        self,
        node: RedisNode,
        key: ObjectKey,
        meta: object_pb2.ObjectMeta,
        target: memoryview,
        lanes: Sequence[BoundedConnection],
        deadline: float,
    ) -> bool:
        names = self._names.parts(key, meta)
        places = cut(target, meta.parts)
        reader = PartReader(names, places)
        try:
            reader.run(lanes, deadline)
        except WrongLength:
            raise _DamagedObject("length") from None
        refusals = [error for error in reader.outcomes if isinstance(error, ResponseError)]
        for error in refusals:
            if isinstance(error, MovedError) or not isinstance(error, AskError):
                raise error
        if refusals:
            # On its way to another server: some parts are here, some there already.
            return self._gather(node, meta, target, names, places, reader.outcomes, deadline)
        if any(reader.outcomes):
            raise _DamagedObject("missing_part")
        if reader.digest.intdigest() != meta.checksum:
            raise _DamagedObject("checksum")
        return True

    def _gather(
        self,
        node: RedisNode,
        meta: object_pb2.ObjectMeta,
        target: memoryview,
        names: Sequence[bytes],
        places: Sequence[memoryview],
        outcomes: Sequence[Exception | None],
        deadline: float,
    ) -> bool:
        """False if it is not whole; then nothing is deleted, as what is missing may just be between two servers."""
        for name, place, outcome in zip(names, places, outcomes, strict=True):
            if isinstance(outcome, AskError):
                part = self._servers.ask(outcome, node, ("GET", name), deadline)
                if not isinstance(part, bytes) or len(part) != len(place):
                    return False
                place[:] = part
            elif outcome is not None:
                return False
        return bool(xxhash.xxh3_64_intdigest(target) == meta.checksum)

    def _discard(self, connection: BoundedConnection, key: ObjectKey, meta: object_pb2.ObjectMeta) -> None:
        """Deletes that write of the object, but not a newer one."""
        header = self._names.header(key)
        value = connection.call("GET", header)
        current = decode_header(key, value) if value is not None else None
        ours = current is None or current.write_id == meta.write_id
        self._forget(connection, [[*([header] if ours else []), *self._names.parts(key, meta)]])

    def write(
        self, node: RedisNode, key: ObjectKey, meta: object_pb2.ObjectMeta, payload: memoryview, deadline: float
    ) -> bool:
        """False only for an object that has expired already."""
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
        parts = [
            ("SET", name, place, "EX", ttl + _PART_EXTRA_SECONDS)
            for name, place in zip(names, cut(data, stored.parts), strict=True)
        ]
        header = ("SET", self._names.header(key), encode_header(key, stored), "EX", ttl, "GET")

        def work(connection: BoundedConnection) -> None:
            try:
                _refuse_errors(self._settled(node, parts, send_parts(connection, parts), deadline))
                (previous,) = _refuse_errors(self._settled(node, [header], connection.exchange([header]), deadline))
            except ResponseError:
                self._forget(connection, [names])
                raise
            replaced = decode_header(key, previous) if previous is not None else None
            if replaced is not None:
                self._forget(connection, [self._names.parts(key, replaced)])

        node.use("write", deadline, work)
        return True

    def delete(self, node: RedisNode, keys: Sequence[ObjectKey], deadline: float) -> list[bool | MovedError]:
        """Whether each was there; headers go first."""

        def work(connection: BoundedConnection) -> list[bool | MovedError]:
            values = self._headers(connection, node, keys, deadline)
            outcomes: list[bool | MovedError] = [value if isinstance(value, MovedError) else False for value in values]
            present = {index: value for index, value in enumerate(values) if isinstance(value, bytes)}
            commands: list[Command] = [("UNLINK", self._names.header(keys[index])) for index in present]
            gone = _refuse_errors(self._settled(node, commands, connection.exchange(commands), deadline))
            for index, count in zip(present, gone, strict=True):
                outcomes[index] = count > 0
            metas = [(keys[index], decode_header(keys[index], value)) for index, value in present.items()]
            self._forget(connection, [self._names.parts(key, meta) for key, meta in metas if meta is not None])
            return outcomes

        return node.use("delete", deadline, work)

    def delete_page(
        self, node: RedisNode, cursor: bytes, matches: Callable[[object_pb2.ObjectMeta], bool], deadline: float
    ) -> tuple[bytes, int]:
        """One step of a walk over a server's objects, from cursor b"0" until it is b"0" again: (next cursor, deleted).

        A header that cannot be read goes too: nobody can tell any more whose object it was.
        """

        def work(connection: BoundedConnection) -> tuple[bytes, list[ObjectKey]]:
            pattern = self._names.header_pattern()
            following, headers = connection.call("SCAN", cursor, "MATCH", pattern, "COUNT", KEYS_A_COMMAND)
            keys = [key for key in map(self._names.key_of, headers) if key is not None]
            chosen = []
            for key, value in zip(keys, self._headers(connection, node, keys, deadline), strict=True):
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
            _refuse_errors(outcomes)
            gone += sum(outcome is True for outcome in outcomes)
        return following, gone

    def _headers(
        self, connection: BoundedConnection, node: RedisNode, keys: Sequence[ObjectKey], deadline: float
    ) -> list[bytes | MovedError | None]:
        """Values in order; MovedError where another server is to be asked. Other refusals are raised."""
        names = [self._names.header(key) for key in keys]
        if not names:
            return []
        if not self._servers.clustered:
            values: list[bytes | MovedError | None] = connection.call("MGET", *names)
            return values
        commands = [("GET", name) for name in names]
        replies = self._settled(node, commands, connection.exchange(commands), deadline)
        _refuse_errors([reply for reply in replies if not isinstance(reply, MovedError)])
        return replies

    def _settled(
        self, node: RedisNode, commands: Sequence[Command], replies: Sequence[Any], deadline: float
    ) -> list[Any]:
        """The replies; where a key is on its way to another server, that one's."""
        return [
            self._servers.ask(reply, node, command, deadline)
            if isinstance(reply, AskError) and not isinstance(reply, MovedError)
            else reply
            for command, reply in zip(commands, replies, strict=False)
        ]

    def _forget(self, connection: BoundedConnection, groups: Sequence[Sequence[bytes]]) -> None:
        """Deletes what no header speaks of any more, by groups of one slot. It would expire anyway, so no failure
        matters."""
        with suppress(LinkError):
            connection.exchange([("UNLINK", *names) for names in groups])


def _refuse_errors(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
    return replies
