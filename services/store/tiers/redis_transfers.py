"""Payloads to and from Redis, several objects in one call.

An object's header is written once every part of it has been acknowledged. Whatever Redis evicts, loses or damages later
is noticed while reading: lengths and the payload's checksum must agree with the header, or the object is
deleted. Every method uses one server, by a deadline in monotonic seconds, and answers for each object, in order:
MovedError if another server has it. A slot that is being moved is followed to both of its servers.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from redis.exceptions import AskError, MovedError, ResponseError

from kvblend.v1 import object_pb2
from services.common.checksums import checksum_of
from services.common.metrics import counter
from services.common.redis_connection import BoundedConnection, LinkError
from services.store.tiers.base import Read, Write
from services.store.tiers.redis_commands import Commands, refuse_errors
from services.store.tiers.redis_format import Names, cut, decode_header, encode_header
from services.store.tiers.redis_node import RedisNode
from services.store.tiers.redis_receiving import Incoming, WrongLength, receive
from services.store.tiers.redis_sending import Outgoing, send
from services.store.tiers.redis_servers import RedisServers

DAMAGED = counter("kvblend_l2_redis_damaged_objects", "Objects in Redis found damaged or incomplete.", ("damage",))

# Parts outlive their header, so that expiry never leaves a header without parts.
_PART_EXTRA_SECONDS = 60
# Connections for one call, if it is about more than so many bytes. A unix socket is read from best by itself; of others
# one is filled while another is emptied.
_LANE_BYTES = 512 << 10
_READ_LANES = 2
_WRITE_LANES = 4

Outcome: TypeAlias = bool | MovedError


class Transfers:
    def __init__(self, servers: RedisServers, names: Names, ttl_seconds: int, part_bytes: int) -> None:
        self._servers = servers
        self._names = names
        self._ttl_seconds = ttl_seconds
        self._part_bytes = part_bytes

    # Reading.

    def read(self, node: RedisNode, reads: Sequence[Read], deadline: float) -> list[Outcome]:
        """Payloads into their targets; false, and the object deleted, if it is not whole."""
        outcomes: list[Outcome] = [False] * len(reads)
        damaged: list[Read] = []
        todo: Sequence[int] = range(len(reads))
        with self._suspecting():
            while todo:
                todo = node.use(
                    "read", deadline, partial(self._receive, node, deadline, reads, todo, outcomes, damaged)
                )
        if damaged:
            with self._suspecting():
                node.use("delete", deadline, partial(self._discard, node, deadline, damaged))
        return outcomes

    def _receive(
        self,
        node: RedisNode,
        deadline: float,
        reads: Sequence[Read],
        places: Sequence[int],
        outcomes: list[Outcome],
        damaged: list[Read],
        connection: BoundedConnection,
    ) -> list[int]:
        """Tells what became of those at these places; the places of those that have to be asked for again."""
        commands = Commands(self._servers, node, connection, deadline)
        objects: dict[int, Incoming] = {}
        size = sum(reads[place].meta.payload_bytes for place in places)
        try:
            lanes = 1 if node.is_beside else _READ_LANES
            with node.spare_connections(_spares_for(size, lanes), deadline) as spares:
                receive(self._incoming(reads, places, objects), [connection, *spares], deadline)
        finally:
            for place, whole in objects.items():
                if whole.failures or whole.landed:
                    outcomes[place], damage = _judge(commands, whole, reads[place])
                    if damage:
                        DAMAGED.labels(damage).inc()
                        damaged.append(reads[place])
        ended = {place for place, whole in objects.items() if whole.failures or whole.landed}
        _count_refusals(node, "read", [objects[place].failures.values() for place in ended])
        return [place for place in places if place not in ended]

    def _incoming(
        self, reads: Sequence[Read], places: Sequence[int], objects: dict[int, Incoming]
    ) -> Iterator[Incoming]:
        """One after another, while the first are on their way already."""
        for place in places:
            key, meta, target = reads[place]
            objects[place] = Incoming(self._names.parts(key, meta), target.cast("B"))
            yield objects[place]

    def _discard(
        self, node: RedisNode, deadline: float, damaged: Sequence[Read], connection: BoundedConnection
    ) -> None:
        """Deletes those writes of the objects, but no newer ones."""
        commands = Commands(self._servers, node, connection, deadline)
        headers = [self._names.header(read.key) for read in damaged]
        values = refuse_errors(commands.exchange([("GET", header) for header in headers]))
        groups = []
        for read, header, value in zip(damaged, headers, values, strict=True):
            current = decode_header(read.key, value) if value is not None else None
            ours = current is None or current.write_id == read.meta.write_id
            groups.append([*([header] if ours else []), *self._names.parts(read.key, read.meta)])
        commands.forget(groups)

    # Writing.

    def write(self, node: RedisNode, writes: Sequence[Write], deadline: float) -> list[Outcome]:
        """False also for an object that has expired already."""
        outcomes: list[Outcome] = [False] * len(writes)
        with self._suspecting():
            node.use("write", deadline, partial(self._send, node, deadline, writes, outcomes))
        return outcomes

    def _outgoing(self, writes: Sequence[Write], objects: dict[int, Outgoing]) -> Iterator[Outgoing]:
        """One after another, while the first are on their way already; without those whose time is over."""
        for place, write in enumerate(writes):
            ttl = self._ttl_seconds
            if write.meta.expires_at:
                ttl = min(ttl, int(write.meta.expires_at - time.time()))
            if ttl >= 1:
                objects[place] = self._under_a_new_name(write, ttl)
                yield objects[place]

    def _under_a_new_name(self, write: Write, ttl: int) -> Outgoing:
        data = write.payload.cast("B")
        stored = object_pb2.ObjectMeta()
        stored.CopyFrom(write.meta)
        stored.write_id = secrets.token_hex(8)
        stored.parts = -(-len(data) // self._part_bytes)
        names = self._names.parts(write.key, stored)
        parts = [
            ("SET", name, place, "EX", ttl + _PART_EXTRA_SECONDS)
            for name, place in zip(names, cut(data, stored.parts), strict=True)
        ]
        header = ("SET", self._names.header(write.key), encode_header(write.key, stored), "EX", ttl, "GET")
        return Outgoing(names, parts, header)

    def _send(
        self,
        node: RedisNode,
        deadline: float,
        writes: Sequence[Write],
        outcomes: list[Outcome],
        connection: BoundedConnection,
    ) -> None:
        commands = Commands(self._servers, node, connection, deadline)
        objects: dict[int, Outgoing] = {}
        size = sum(write.meta.payload_bytes for write in writes)
        try:
            with node.spare_connections(_spares_for(size, _WRITE_LANES), deadline) as spares:
                send(self._outgoing(writes, objects), [connection, *spares], deadline)
        finally:
            for place, whole in objects.items():
                outcomes[place] = whole.header_replied and not isinstance(whole.header_reply, ResponseError)
        forgotten = []
        for place, whole in objects.items():
            _follow_writes(commands, whole)
            refusal = whole.refusal
            outcomes[place] = refusal if isinstance(refusal, MovedError) else refusal is None
            if refusal is not None:
                forgotten.append(whole.names)
            elif whole.header_reply is not None:
                replaced = decode_header(writes[place].key, whole.header_reply)
                if replaced is not None:
                    forgotten.append(self._names.parts(writes[place].key, replaced))
        commands.forget(forgotten)
        _count_refusals(node, "write", [[whole.refusal] for whole in objects.values()])

    @contextmanager
    def _suspecting(self) -> Iterator[None]:
        """Whoever fails is looked for again; what it did until then stays done."""
        try:
            yield
        except (LinkError, ResponseError):
            self._servers.suspect()


def _spares_for(size: int, lanes: int) -> int:
    """Connections beside the first for so many bytes."""
    return min(lanes, -(-size // _LANE_BYTES)) - 1


def _count_refusals(node: RedisNode, operation: str, failures: Sequence[Iterable[Exception | None]]) -> None:
    """By object. Raises one where nothing else came back: then it is the server that refuses, not the object that
    is refused."""
    refusals = [refusal for some in failures if (refusal := next(filter(_is_refusal, some), None)) is not None]
    if refusals and len(refusals) == len(failures):
        raise refusals[0]
    for _ in refusals:
        node.refused(operation)


def _is_refusal(failure: Exception | None) -> bool:
    return isinstance(failure, ResponseError) and not isinstance(failure, AskError)


def _judge(commands: Commands, whole: Incoming, read: Read) -> tuple[Outcome, str]:
    """What became of an object that has ended; and the damage, if it is damaged."""
    failures = list(whole.failures.values())
    for failure in failures:
        if isinstance(failure, MovedError):
            return failure, ""
    if any(isinstance(failure, WrongLength) for failure in failures):
        return False, "length"
    if any(_is_refusal(failure) for failure in failures):
        return False, ""
    if any(isinstance(failure, AskError) for failure in failures):
        return _follow_reads(commands, whole, read), ""
    if failures:
        return False, "missing_part"
    whole_again = whole.checksum.value() == read.meta.checksum
    return whole_again, "" if whole_again else "checksum"


def _follow_reads(commands: Commands, whole: Incoming, read: Read) -> bool:
    """An object on its way to another server: some parts are here, some there already. What is missing may just be
    between the two, so nothing is deleted."""
    for part, failure in whole.failures.items():
        reply = commands.followed(("GET", whole.names[part]), failure)
        if not isinstance(reply, bytes) or len(reply) != len(whole.places[part]):
            return False
        whole.places[part][:] = reply
    return checksum_of(read.target) == read.meta.checksum


def _follow_writes(commands: Commands, whole: Outgoing) -> None:
    """The same the other way: parts, then the header, go to whoever takes them."""
    if whole.refusals and whole.is_of_use:
        replies = [commands.followed(whole.parts[part], refusal) for part, refusal in whole.refusals.items()]
        whole.refusals = {
            part: reply for part, reply in zip(whole.refusals, replies, strict=True) if isinstance(reply, ResponseError)
        }
        if not whole.refusals:
            (whole.header_reply,) = commands.exchange([whole.header])
    elif whole.header_replied:
        whole.header_reply = commands.followed(whole.header, whole.header_reply)
