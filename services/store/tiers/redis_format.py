"""How an object lies in Redis: names of its keys, and a header that proves itself.

    {prefix}{<object>}:h               header: 8 bytes little-endian xxh3-64, then an ObjectMeta
    {prefix}{<object>}:<write_id>:<i>  part i of the payload, written by the write of that id: of n bytes in p parts
                                       those from n*i//p to n*(i+1)//p

The braces keep an object in one Cluster slot. The header's checksum covers the object's name too:
a header that was damaged, or that answers under another name, is never believed. Parts carry the
name of their write, so parts of two writes of one object can never mix.
"""

import re
import struct
from itertools import pairwise
from typing import cast

import xxhash
from google.protobuf.message import DecodeError

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.common.identity import OBJECT_FORMAT_VERSION
from services.store.objects import ChunkKey, ObjectKey

_CHECKSUM = struct.Struct("<Q")


class Names:
    """Keys of objects under one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        name = rb"\{([0-9a-f]{32}:\d{1,3}:[0-9a-f]{64}:\d{1,9}:\d{1,9})\}:h"
        self._header = re.compile(re.escape(prefix.encode()) + name)

    def header(self, key: ObjectKey) -> bytes:
        return f"{self._prefix}{{{key.text()}}}:h".encode()

    def parts(self, key: ObjectKey, meta: object_pb2.ObjectMeta) -> list[bytes]:
        stem = f"{self._prefix}{{{key.text()}}}:{meta.write_id}:"
        return [f"{stem}{index}".encode() for index in range(meta.parts)]

    def header_pattern(self) -> str:
        """Glob of every header under the prefix."""
        return re.sub(r"([*?\[\]\\])", r"\\\1", self._prefix) + "{*}:h"

    def key_of(self, header: bytes) -> ObjectKey | None:
        """The object whose header has this name."""
        match = self._header.fullmatch(header)
        if match is None:
            return None
        space_id, domain, chain_hash, group, rank = match[1].decode().split(":")
        chunk = ChunkKey(bytes.fromhex(space_id), cast(pb.Domain, int(domain)), bytes.fromhex(chain_hash))
        return ObjectKey(chunk, int(group), int(rank))


def cut(payload: memoryview, parts: int) -> list[memoryview]:
    """The parts of a payload of at least so many bytes."""
    bounds = [len(payload) * index // parts for index in range(parts + 1)]
    return [payload[start:end] for start, end in pairwise(bounds)]


def is_stored(meta: object_pb2.ObjectMeta) -> bool:
    """Whether it names a write and its parts, as metas do that `find` returned."""
    return bool(meta.write_id) and 1 <= meta.parts <= meta.payload_bytes


def describes(key: ObjectKey, meta: object_pb2.ObjectMeta) -> bool:
    """Whether this is the meta of that object in today's format. (Its dense rank is only in the name.)"""
    return (
        meta.format_version == OBJECT_FORMAT_VERSION
        and meta.space_id == key.chunk.space_id
        and meta.domain == key.chunk.domain
        and meta.chain_hash == key.chunk.chain_hash
        and meta.group == key.group
    )


def _header_checksum(key: ObjectKey, data: bytes) -> bytes:
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(key.text().encode() + b"\n" + data))


def encode_header(key: ObjectKey, meta: object_pb2.ObjectMeta) -> bytes:
    data = meta.SerializeToString()
    return _header_checksum(key, data) + data


def decode_header(key: ObjectKey, value: bytes) -> object_pb2.ObjectMeta | None:
    """None if the value is not an undamaged header of exactly this object."""
    data = value[_CHECKSUM.size :]
    if value[: _CHECKSUM.size] != _header_checksum(key, data):
        return None
    try:
        meta = object_pb2.ObjectMeta.FromString(data)
    except DecodeError:
        return None
    return meta if describes(key, meta) and is_stored(meta) else None
