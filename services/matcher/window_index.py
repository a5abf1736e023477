"""Fingerprint index of one window class: which entries begin with a window of this many tokens."""

import numpy as np

from services.matcher.kernels import I32, U64, slot_of

_SMALLEST = 256
# Filter bits for each entry: about one probe in sixteen of unknown text passes.
_BITS_PER_ENTRY = 16
_END = -1


class WindowIndex:
    """Chained buckets over entry ids, with a bit filter in front. Grows by doubling; never loses an entry.

    `following` and `fingerprints` are the table's arrays by entry id: an entry is in one index only.
    """

    def __init__(self) -> None:
        self.count = 0
        self.heads: I32 = np.full(_SMALLEST, _END, dtype=np.int32)
        self.bits: U64 = np.zeros(_SMALLEST * _BITS_PER_ENTRY // 64, dtype=np.uint64)
        self._stale_bits = 0

    @property
    def bytes(self) -> int:
        return self.heads.nbytes + self.bits.nbytes

    def add(self, entry: int, following: I32, fingerprints: U64) -> None:
        if self.count >= len(self.heads):
            self._rebuild(self._entries(following), len(self.heads) * 2, following, fingerprints)
        self._link(entry, following, fingerprints)
        self.count += 1

    def remove(self, entry: int, following: I32, fingerprints: U64) -> None:
        """Unlinks an entry. Filter bits stay set until enough are stale to be worth a rebuild."""
        slot = self._head_slot(fingerprints[entry])
        previous, current = _END, int(self.heads[slot])
        while current != entry:
            previous, current = current, int(following[current])
        if previous == _END:
            self.heads[slot] = following[entry]
        else:
            following[previous] = following[entry]
        self.count -= 1
        self._stale_bits += 1
        if self._stale_bits > max(_SMALLEST, len(self.heads) // 2):
            size = max(_SMALLEST, 1 << (2 * self.count).bit_length())
            self._rebuild(self._entries(following), size, following, fingerprints)

    def _head_slot(self, fingerprint: np.uint64) -> int:
        return int(slot_of(fingerprint, np.uint64(len(self.heads) - 1)))

    def _link(self, entry: int, following: I32, fingerprints: U64) -> None:
        fingerprint = fingerprints[entry]
        slot = self._head_slot(fingerprint)
        following[entry] = self.heads[slot]
        self.heads[slot] = entry
        bit = int(slot_of(fingerprint, np.uint64(len(self.bits) * 64 - 1)))
        self.bits[bit >> 6] |= np.uint64(1 << (bit & 63))

    def _entries(self, following: I32) -> list[int]:
        entries = []
        for head in self.heads[self.heads != _END]:
            current = int(head)
            while current != _END:
                entries.append(current)
                current = int(following[current])
        return entries

    def _rebuild(self, entries: list[int], size: int, following: I32, fingerprints: U64) -> None:
        self.heads = np.full(size, _END, dtype=np.int32)
        self.bits = np.zeros(size * _BITS_PER_ENTRY // 64, dtype=np.uint64)
        self._stale_bits = 0
        for entry in entries:
            self._link(entry, following, fingerprints)
