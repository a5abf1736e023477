"""Canonical bytes of identities: the same for every process, host, language and release.

A record is a sequence of fields sorted by tag: u16 tag, u32 length, value. Fields at their default
are omitted, so that a new field changes no old identity. Integers are u64, floats IEEE-754 binary64,
text UTF-8, all little-endian; lists are a u32 count followed by length-prefixed items. Never a serialized
protobuf: its bytes are not promised to be stable.
"""

import struct

VERSION = 1

Value = int | float | bytes | str | list[bytes]


def _value_bytes(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<Q", int(value))
    if isinstance(value, int):
        return struct.pack("<Q", value)
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, str):
        return value.encode("utf-8")
    if isinstance(value, bytes):
        return value
    items = b"".join(struct.pack("<I", len(item)) + item for item in value)
    return struct.pack("<I", len(value)) + items


def encode_record(fields: dict[int, tuple[Value, Value]]) -> bytes:
    """Bytes of {tag: (value, default)}; a field equal to its default is left out."""
    parts = []
    for tag in sorted(fields):
        value, default = fields[tag]
        if value == default:
            continue
        data = _value_bytes(value)
        parts.append(struct.pack("<HI", tag, len(data)) + data)
    return b"".join(parts)


def encode_versioned(fields: dict[int, tuple[Value, Value]]) -> bytes:
    return bytes([VERSION]) + encode_record(fields)
