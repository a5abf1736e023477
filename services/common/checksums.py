"""The checksum of KV bytes: one 64-bit function, with the same value on a CPU and in a GPU's kernels.

The bytes are read as little-endian words of 64 bits, the last one filled up with zeros and numbered from 1; the
length in bytes is word 0. The checksum is the sum of all terms mod 2**64, whoever adds them in whatever order:

    term(number, word) = mix(word ^ (number * STEP mod 2**64))

`mix` is the finaliser of SplitMix64: a bijection that turns any difference of its argument into one that looks
random. What that means for errors:

- A change inside one word is always seen: exactly one term differs.
- Words that are exchanged, moved, repeated, zeroed, or flipped alike (also by the same bit in many places) are seen
  but for 1 in 2**64: number and word meet before the mixing, so that the terms of two places, and their differences,
  have nothing to do with each other. A sum of words, or of products with their numbers, would cancel there.
- Cut off or appended zeros are seen, as the length is a term.

It guards against accidents. Whoever wants a collision makes one in no time.
"""

import numpy as np
import numpy.typing as npt
from numba import njit, types

Bytes = npt.NDArray[np.uint8]
# Contiguous memory.
Data = bytes | bytearray | memoryview

STEP = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SHIFTS = 32, 29, 32

WORD_BYTES = 8
_MASK = (1 << 64) - 1

_STEP = np.uint64(STEP)
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = map(np.uint64, MULTIPLIERS)
_FIRST_SHIFT, _SECOND_SHIFT, _THIRD_SHIFT = map(np.uint64, SHIFTS)

# Any memory: at no particular address, and perhaps not to be written.
_SOURCE = types.Array(types.uint64, 1, "C", readonly=True, aligned=False)
_TARGET = types.Array(types.uint64, 1, "C", aligned=False)


@njit(nogil=True, cache=True, inline="always")
def _mix(word: np.uint64) -> np.uint64:
    word = (word ^ (word >> _FIRST_SHIFT)) * _FIRST_MULTIPLIER
    word = (word ^ (word >> _SECOND_SHIFT)) * _SECOND_MULTIPLIER
    return word ^ (word >> _THIRD_SHIFT)


@njit(types.uint64(_SOURCE, types.uint64), nogil=True, cache=True)
def _terms(words: npt.NDArray[np.uint64], number: np.uint64) -> np.uint64:
    """Sum of the terms of words [n], the first of which has this number."""
    total, key = np.uint64(0), number * _STEP
    for index in range(len(words)):
        total += _mix(words[index] ^ key)
        key += _STEP
    return total


@njit(types.uint64(_TARGET, _SOURCE, types.uint64), nogil=True, cache=True)
def _copy_terms(target: npt.NDArray[np.uint64], source: npt.NDArray[np.uint64], number: np.uint64) -> np.uint64:
    """As `_terms`, of words that are copied on the way: the arithmetic hides behind the memory."""
    total, key = np.uint64(0), number * _STEP
    for index in range(len(source)):
        word = source[index]
        target[index] = word
        total += _mix(word ^ key)
        key += _STEP
    return total


def with_length(terms: int, nbytes: int) -> int:
    """The checksum of `nbytes` bytes, from the sum of their words' terms."""
    return (terms + int(_terms(np.array([nbytes], np.uint64), 0))) & _MASK


class Checksum:
    """The checksum of bytes that come in order, piece by piece."""

    def __init__(self) -> None:
        self._terms = 0
        self._words = 0
        # Bytes that are no whole word yet.
        self._rest = b""

    def update(self, data: Data) -> None:
        if not len(data):
            return
        piece = memoryview(data).cast("B")
        if self._rest:
            missing = WORD_BYTES - len(self._rest)
            self._rest += piece[:missing]
            piece = piece[missing:]
            if len(self._rest) == WORD_BYTES:
                self._add(self._rest)
                self._rest = b""
        whole = len(piece) - len(piece) % WORD_BYTES
        if whole:
            self._add(piece[:whole])
        self._rest += piece[whole:]

    def _add(self, data: Data) -> None:
        words = np.frombuffer(data, np.uint64)
        self._terms += int(_terms(words, self._words + 1))
        self._words += len(words)

    def value(self) -> int:
        terms = self._terms
        if self._rest:
            last = np.frombuffer(self._rest.ljust(WORD_BYTES, b"\0"), np.uint64)
            terms += int(_terms(last, self._words + 1))
        return with_length(terms, self._words * WORD_BYTES + len(self._rest))


def checksum_of(data: Data) -> int:
    """The checksum of all of it."""
    whole = Checksum()
    whole.update(data)
    return whole.value()


def copy_with_checksum(target: Bytes, source: Bytes) -> int:
    """Copies `source` to `target`, both [n] uint8 and contiguous; the checksum of what was read and written."""
    whole = len(source) - len(source) % WORD_BYTES
    terms = int(_copy_terms(target[:whole].view(np.uint64), source[:whole].view(np.uint64), 1))
    rest = source[whole:]
    target[whole:] = rest
    if len(rest):
        last = np.zeros(WORD_BYTES, np.uint8)
        last[: len(rest)] = rest
        terms += int(_terms(last.view(np.uint64), 1 + whole // WORD_BYTES))
    return with_length(terms, len(source))
