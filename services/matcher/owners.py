"""Who owns entries: a bit for each owner, given again only when nothing is owned under it any more."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from services.common.errors import KvblendError
from services.matcher.kernels.types import U32

PLANES = 128
_WORD = 32


class OwnerName(NamedTuple):
    """A store by its name, or an L2 tier by its id."""

    kind: int
    name: str


class Bit(NamedTuple):
    plane: int
    mask: np.uint32


class Owners:
    """An owner that is voided loses its bit at once; whatever it owned is nobody's from then on."""

    def __init__(self) -> None:
        self._bits: dict[OwnerName, int] = {}
        self._free: list[int] = []
        self._begun = 0
        # Voided, and perhaps still set somewhere.
        self._void: list[int] = []

    @property
    def names(self) -> list[OwnerName]:
        return sorted(self._bits)

    @property
    def planes(self) -> int:
        return max(1, -(-self._begun // _WORD))

    def live(self) -> U32:
        """For each word a mask of the bits that are somebody's."""
        live = np.zeros(self.planes, dtype=np.uint32)
        for number in self._bits.values():
            live[number // _WORD] |= np.uint32(1 << number % _WORD)
        return live

    def find(self, owner: OwnerName) -> Bit | None:
        number = self._bits.get(owner)
        return None if number is None else _bit(number)

    def has_room(self, owner: OwnerName) -> bool:
        """Whether `take` will find a bit."""
        return owner in self._bits or bool(self._free) or self._begun < PLANES * _WORD

    def take(self, owner: OwnerName) -> Bit:
        """The owner's bit, a new one if it has none.

        Raises KvblendError OVERLOADED when there are too many owners.
        """
        if owner not in self._bits:
            if self._free:
                self._bits[owner] = self._free.pop()
            elif self._begun < PLANES * _WORD:
                self._bits[owner] = self._begun
                self._begun += 1
            else:
                raise KvblendError("OVERLOADED", f"there are {PLANES * _WORD} owners already")
        return _bit(self._bits[owner])

    def void(self, owner: OwnerName) -> None:
        number = self._bits.pop(owner, None)
        if number is not None:
            self._void.append(number)

    def forget(self, owner: OwnerName) -> Callable[[], None]:
        """An owner whose bit is set nowhere. Returns what frees the bit, as `cleared` does."""
        number = self._bits.pop(owner)
        return lambda: self._free.append(number)

    def next_void(self) -> Bit | None:
        """A bit that must be cleared wherever it is set."""
        return _bit(self._void[0]) if self._void else None

    def cleared(self) -> Callable[[], None]:
        """`next_void` is set nowhere any more. Returns what frees it, to be called when no reader knows it either."""
        number = self._void.pop(0)
        return lambda: self._free.append(number)

    def items(self) -> list[tuple[OwnerName, Bit]]:
        return [(owner, _bit(number)) for owner, number in self._bits.items()]


def _bit(number: int) -> Bit:
    return Bit(number // _WORD, np.uint32(1 << number % _WORD))
