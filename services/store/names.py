"""Further names of a stored text, behind the meta of its block: records that are only ever appended.

A record is its name's length (u16), the low half of the name's xxh3-64 (u32), the name; little-endian. The length
0xFFFF ends them. It is overwritten last, so a store that is killed in the middle has the record or has not; the
name was not promised yet then. Where there is no room for another name the empty name is written
(room for it is always left): the text has names that nobody knows, so clearing any document clears it.
"""

import struct

import xxhash

from services.common.failpoints import passage

# Stands for names that are not known one by one.
ANY = ""
MAX_NAMES = 16
# Room behind a meta for further names; what a block has anyway to the end of its page comes on top.
ROOM_BYTES = 256

_END = 0xFFFF
_LENGTH = struct.Struct("<H")
_CHECK = struct.Struct("<I")
_RECORD_BYTES = _LENGTH.size + _CHECK.size
# A record without a name, and the end behind it.
_LAST_BYTES = _RECORD_BYTES + _LENGTH.size


def erase(area: memoryview) -> None:
    """No names yet, whatever the block held before."""
    _LENGTH.pack_into(area, 0, _END)


def read(area: memoryview) -> list[str]:
    """The names in order. A record that cannot be what was written stands for any name."""
    return _scan(area)[0]


def append(area: memoryview, name: str) -> str:
    """Adds a name, or ANY if there is no room for it: which of them it is now."""
    names, end = _scan(area)
    if name in names or ANY in names:
        return name if name in names else ANY
    data = name.encode()
    if len(names) >= MAX_NAMES or end + _RECORD_BYTES + len(data) + _LAST_BYTES > len(area):
        name, data = ANY, b""
    start = end + _RECORD_BYTES
    _CHECK.pack_into(area, end + _LENGTH.size, _check(data))
    area[start : start + len(data)] = data
    _LENGTH.pack_into(area, start + len(data), _END)
    passage("name.write")
    _LENGTH.pack_into(area, end, len(data))
    return name


def _check(data: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(data)) & 0xFFFFFFFF


def _scan(area: memoryview) -> tuple[list[str], int]:
    """(names, where the next record would begin)."""
    names: list[str] = []
    at = 0
    while at + _LENGTH.size <= len(area):
        (length,) = _LENGTH.unpack_from(area, at)
        if length == _END:
            return names, at
        start = at + _RECORD_BYTES
        end = start + length
        if end + _LENGTH.size > len(area):
            break
        data = bytes(area[start:end])
        (check,) = _CHECK.unpack_from(area, at + _LENGTH.size)
        if check != _check(data):
            break
        names.append(data.decode(errors="replace"))
        at = end
    return [*names, ANY], len(area)
