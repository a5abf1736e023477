"""Requests with a large field that is sent as it lies in memory.

A message copies what it is given, and is copied again when it is serialised. For a prompt of 128 K tokens these are
several allocations of 512 KiB, which an engine's C heap takes from the system and gives back each time: some 0.7 ms,
nearly all of it for filling pages with zeros.
"""

from typing import Any

_LENGTH_DELIMITED = 2


class Appended:
    """`message`, and `data` for its field `name` (bytes), which the message itself does not have.

    Any channel of `host_channel` takes it for the message.
    """

    def __init__(self, message: Any, name: str, data: memoryview) -> None:
        """`data` has bytes as items and must not change during the call."""
        self._message, self._name, self._data = message, name, data

    def parts(self) -> tuple[bytes, memoryview]:
        """What the message with the field would serialise to: a field may stand behind all others."""
        number = self._message.DESCRIPTOR.fields_by_name[self._name].number
        key = _varint(number << 3 | _LENGTH_DELIMITED)
        return self._message.SerializeToString() + key + _varint(len(self._data)), self._data

    def whole(self) -> Any:
        """The message with the field."""
        message = type(self._message)()
        message.CopyFrom(self._message)
        setattr(message, self._name, self._data.tobytes())
        return message


def whole(request: Any) -> Any:
    """The message that a request is, or stands for."""
    return request.whole() if isinstance(request, Appended) else request


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
