"""Objects in Redis: the commands that find, read, write and delete them (redis_format.py: how they lie there).

The header is written last, once every part is acknowledged, so an object is found only when all of
it was there. Whatever Redis evicts, loses or damages later is noticed while reading: lengths and an
xxh3-64 of the whole payload must agree with the header, or the object is deleted. Deadlines are
monotonic seconds. Every method raises LinkError if there is no answer, ResponseError if Redis refuses.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import xxhash
from redis.exceptions import ResponseError

from kvblend.v1 import object_pb2
from services.common.metrics import counter
from services.store.objects import ObjectKey
from services.store.tiers.redis_format import Names, decode_header, encode_header
from services.store.tiers.redis_link import Argument, LinkError, RedisLink, pack

DAMAGED = counter("kvblend_l2_redis_damaged_objects", "Objects in Redis found damaged or incomplete.", ("damage",))

# Sent or received at once: enough to be fast, little enough to look at the clock now and then.
_BATCH_BYTES = 8 << 20
KEYS_A_COMMAND = 256
# Parts outlive their header, so that expiry never leaves a header without parts.
_PART_EXTRA_SECONDS = 60


class _DamagedObject(Exception):
    """`args[0]` names the damage."""


class RedisObjects:
    def __init__(self, link: RedisLink, key_prefix: str, ttl_seconds: int, part_bytes: int) -> None:
        self._link = link
        self._names = Names(key_prefix)
        self._ttl_seconds = ttl_seconds
        self._part_bytes = part_bytes

    def _ask(self, commands: Sequence[list[Argument]], deadline: float) -> list[Any]:
        """Replies; an error among them is raised."""
        replies = self._link.exchange(commands, deadline)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
        return replies

    def find(self, keys: Sequence[ObjectKey], deadline: float) -> list[object_pb2.ObjectMeta | None]:
        """Metas in order; None for what is not there, has expired, or has a header not to be believed."""
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

    def lacking(self, objects: Sequence[tuple[ObjectKey, object_pb2.ObjectMeta]], deadline: float) -> list[bool]:
        """Whether parts are gone, in order."""
        commands = [pack("EXISTS", *self._names.parts(key, meta)) for key, meta in objects]
        counts = self._ask(commands, deadline)
        return [count < meta.parts for count, (_, meta) in zip(counts, objects, strict=True)]

    def read(self, key: ObjectKey, meta: object_pb2.ObjectMeta, target: memoryview, deadline: float) -> bool:
        """Payload into `target`; false, and the object deleted, if it is not whole."""
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

    def write(self, key: ObjectKey, meta: object_pb2.ObjectMeta, payload: memoryview, deadline: float) -> bool:
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
        with suppress(LinkError):
            self._link.exchange([pack("UNLINK", *names)], deadline)

    def delete(self, keys: Sequence[ObjectKey], deadline: float) -> int:
        """How many were there; headers go first. At most KEYS_A_COMMAND keys."""
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
        for first in range(0, len(parts), KEYS_A_COMMAND):
            commands.append(pack("UNLINK", *parts[first : first + KEYS_A_COMMAND]))
        gone: int = self._ask(commands, deadline)[0]
        return gone

    def delete_page(
        self, cursor: bytes, matches: Callable[[object_pb2.ObjectMeta], bool], deadline: float
    ) -> tuple[bytes, int]:
        """One step of a walk over all objects, from cursor b"0" until it is b"0" again: (next cursor, deleted).

        A header that cannot be read goes too: nobody can tell any more whose object it was.
        """
        command = pack("SCAN", cursor, "MATCH", self._names.header_pattern(), "COUNT", KEYS_A_COMMAND)
        following, headers = self._ask([command], deadline)[0]
        keys = [key for key in map(self._names.key_of, headers) if key is not None]
        gone = 0
        for first in range(0, len(keys), KEYS_A_COMMAND):
            some = keys[first : first + KEYS_A_COMMAND]
            values = self._ask([pack("MGET", *map(self._names.header, some))], deadline)[0]
            metas = [
                decode_header(key, value) if value is not None else None
                for key, value in zip(some, values, strict=True)
            ]
            chosen = [key for key, meta in zip(some, metas, strict=True) if meta is None or matches(meta)]
            gone += self.delete(chosen, deadline) if chosen else 0
        return following, gone
