"""How an object lies in Redis: names of its keys, and a header that proves itself.

    {prefix}{<object>}:h               header: 8 bytes little-endian xxh3-64, then an ObjectMeta
    {prefix}{<object>}:<write_id>:<i>  part i of the payload, written by the write of that id

The braces keep an object in one Cluster slot. The header's checksum covers the object's name too:
a header that was damaged, or that answers under another name, is never believed. Parts carry the
name of their write, so parts of two writes of one object can never mix.
"""

import struct

import xxhash
from google.protobuf.message import DecodeError

from kvblend.v1 import object_pb2
from services.common.identity import OBJECT_FORMAT_VERSION
from services.store.objects import ObjectKey

_CHECKSUM = struct.Struct("<Q")


class Names:
    """Keys of objects under one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def header(self, key: ObjectKey) -> bytes:
        return f"{self._prefix}{{{key.text()}}}:h".encode()

    def parts(self, key: ObjectKey, meta: object_pb2.ObjectMeta) -> list[bytes]:
        stem = f"{self._prefix}{{{key.text()}}}:{meta.write_id}:"
        return [f"{stem}{index}".encode() for index in range(meta.parts)]


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
    if not describes(key, meta) or not meta.write_id or not 1 <= meta.parts <= meta.payload_bytes:
        return None
    return meta
