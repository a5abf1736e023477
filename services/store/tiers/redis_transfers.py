"""Payloads to and from Redis.

The header is written once every part is there: by a script behind the parts, which looks, or by a command of its own
where that script is not to be had. Whatever Redis evicts, loses or damages later is noticed while reading: lengths and
the payload's checksum must agree with the header, or the object is deleted. Every method uses one server, by a
deadline in monotonic seconds, and raises LinkError if there is no answer, ResponseError if Redis refuses: MovedError if
another server has the object. A slot that is being moved is followed to both of its servers.
"""

import secrets
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from redis.exceptions import AskError, MovedError, NoScriptError, ResponseError

from kvblend.v1 import object_pb2
from services.common.checksums import checksum_of
from services.common.metrics import counter
from services.common.redis_connection import BoundedConnection, Script
from services.store.objects import ObjectKey
from services.store.tiers.redis_commands import Command, Commands, refuse_errors
from services.store.tiers.redis_format import Names, cut, decode_header, encode_header
from services.store.tiers.redis_node import RedisNode
from services.store.tiers.redis_parts import PartReader, WrongLength, send_parts
from services.store.tiers.redis_servers import RedisServers

DAMAGED = counter("kvblend_l2_redis_damaged_objects", "Objects in Redis found damaged or incomplete.", ("damage",))

# Parts outlive their header, so that expiry never leaves a header without parts.
_PART_EXTRA_SECONDS = 60
# More than this comes over two connections: while one is read from, Redis fills the other.
_ONE_LANE_BYTES = 1 << 20
# KEYS: header, parts. ARGV: the header's value, its life in seconds. Returns the value that was there.
_FINISH = Script("""
if redis.call('EXISTS', unpack(KEYS, 2)) ~= #KEYS - 1 then
    return redis.error_reply('INCOMPLETE not every part is there')
end
return redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2], 'GET')
""")


class _DamagedObject(Exception):
    """`args[0]` names the damage."""


class Transfers:
    def __init__(self, servers: RedisServers, names: Names, ttl_seconds: int, part_bytes: int) -> None:
        self._servers = servers
        self._names = names
        self._ttl_seconds = ttl_seconds
        self._part_bytes = part_bytes

    def read(
        self, node: RedisNode, key: ObjectKey, meta: object_pb2.ObjectMeta, target: memoryview, deadline: float
    ) -> bool:
        """Payload into `target`; false, and the object deleted, if it is not whole."""
        names = self._names.parts(key, meta)
        damage = ""

        def receive(connection: BoundedConnection) -> bool:
            nonlocal damage
            with node.spare_connection(deadline) if len(target) > _ONE_LANE_BYTES else nullcontext() as other:
                lanes = [connection, other] if other is not None else [connection]
                try:
                    return self._receive(
                        Commands(self._servers, node, connection, deadline), lanes, names, meta, target
                    )
                except _DamagedObject as found:
                    damage = found.args[0]
                    return False

        def discard(connection: BoundedConnection) -> None:
            self._discard(Commands(self._servers, node, connection, deadline), key, meta)

        whole = node.use("read", deadline, receive)
        if damage:
            DAMAGED.labels(damage).inc()
            node.use("delete", deadline, discard)
        return whole

    def _receive(
        self,
        commands: Commands,
        lanes: Sequence[BoundedConnection],
        names: Sequence[bytes],
        meta: object_pb2.ObjectMeta,
        target: memoryview,
    ) -> bool:
        places = cut(target, len(names))
        reader = PartReader(names, places)
        try:
            reader.run(lanes, commands.deadline)
        except WrongLength:
            raise _DamagedObject("length") from None
        refusals = [error for error in reader.outcomes if isinstance(error, ResponseError)]
        for error in refusals:
            if isinstance(error, MovedError) or not isinstance(error, AskError):
                raise error
        if refusals:
            # On its way to another server: some parts are here, some there already. What is missing may just be
            # between the two, so nothing is deleted.
            fetched = [
                outcome is None or _copy(commands.followed(("GET", name), outcome), place)
                for name, place, outcome in zip(names, places, reader.outcomes, strict=True)
            ]
            return all(fetched) and checksum_of(target) == meta.checksum
        if any(reader.outcomes):
            raise _DamagedObject("missing_part")
        if reader.checksum.value() != meta.checksum:
            raise _DamagedObject("checksum")
        return True

    def _discard(self, commands: Commands, key: ObjectKey, meta: object_pb2.ObjectMeta) -> None:
        """Deletes that write of the object, but not a newer one."""
        header = self._names.header(key)
        (value,) = refuse_errors(commands.exchange([("GET", header)]))
        current = decode_header(key, value) if value is not None else None
        ours = current is None or current.write_id == meta.write_id
        commands.forget([[*([header] if ours else []), *self._names.parts(key, meta)]])

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
        parts: list[Command] = [
            ("SET", name, place, "EX", ttl + _PART_EXTRA_SECONDS)
            for name, place in zip(names, cut(data, stored.parts), strict=True)
        ]
        header = self._names.header(key)
        value = encode_header(key, stored)
        finish: Command = ("EVALSHA", _FINISH.digest, 1 + len(names), header, *names, value, ttl)

        def send(connection: BoundedConnection) -> None:
            commands = Commands(self._servers, node, connection, deadline)
            try:
                replies = send_parts(connection, [*parts, finish])
                refuse_errors(commands.settled(parts, replies))
                previous = replies[-1]
                if isinstance(previous, ResponseError):
                    previous = self._finish(commands, ("SET", header, value, "EX", ttl, "GET"), previous)
            except ResponseError:
                commands.forget([names])
                raise
            replaced = decode_header(key, previous) if previous is not None else None
            if replaced is not None:
                commands.forget([self._names.parts(key, replaced)])

        node.use("write", deadline, send)
        return True

    def _finish(self, commands: Commands, command: Command, refusal: ResponseError) -> Any:
        """Writes the header behind parts that were acknowledged, where the script did not."""
        load = [("SCRIPT", "LOAD", _FINISH.text)] if isinstance(refusal, NoScriptError) else []
        previous, *_ = commands.exchange([command, *load])
        refuse_errors([previous])
        return previous


def _copy(part: Any, place: memoryview) -> bool:
    if not isinstance(part, bytes) or len(part) != len(place):
        return False
    place[:] = part
    return True
