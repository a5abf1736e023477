"""Fingerprints: polynomial hashes of windows modulo the prime 2^31 - 1, in block form.

A text's terms t[i] * b^i are independent of each other, so they are computed side by side (SIMD), and so are the
differences of two prefix sums that a window's hash is, scaled back by b^-i. Exponents count from the block's start:
tables of a few thousand powers, which stay in the cache, serve texts of any length. Sums of terms stay far below
2^63, so only products are reduced.

The base is drawn at random for each process. A fingerprint is only a filter: `scanning` compares tokens.
"""

import secrets

import numpy as np
from numba import njit

from services.matcher.kernels.types import I32, U32, U64, Hashing

PRIME = (1 << 31) - 1
_P = np.uint64(PRIME)
_SHIFT = np.uint64(31)
# Query positions hashed at a time; with the longest window behind them.
BLOCK = 4096
LONGEST_WINDOW = 1024
FINGERPRINT_BITS = 31


def random_hashing(keep: int = PRIME) -> Hashing:
    """A base that nobody outside knows, so that nobody can construct collisions. Tests make `keep` small."""
    base = secrets.randbelow(PRIME - 3) + 2
    size = BLOCK + LONGEST_WINDOW
    return Hashing(_powers(base, size), _powers(pow(base, -1, PRIME), size), np.uint32(keep))


def _powers(base: int, count: int) -> U32:
    powers = np.empty(count, dtype=np.uint32)
    value = 1
    for exponent in range(count):
        powers[exponent] = value
        value = value * base % PRIME
    return powers


@njit(nogil=True, cache=True, inline="always")
def _folded(value: np.uint64) -> np.uint64:
    """Congruent to `value` modulo the prime, and smaller."""
    return (value & _P) + (value >> _SHIFT)


@njit(nogil=True, cache=True, inline="always")
def _scaled(sum_: np.uint64, inverse: np.uint32) -> np.uint32:
    """A window's hash out of the sum of its terms, which is below 2^46."""
    value = _folded(_folded(np.uint64(np.uint32(_folded(sum_))) * np.uint64(inverse)))
    return np.uint32(min(value, value - _P))


@njit(nogil=True, cache=True)
def sum_terms(tokens: U32, hashing: Hashing, sums: U64) -> None:
    """sums[i]: of the first i terms, for i up to and with len(tokens)."""
    size = tokens.shape[0]
    powers = hashing.powers
    for index in range(size):
        sums[index] = _folded(np.uint64(tokens[index]) * np.uint64(powers[index]))
    total = np.uint64(0)
    for index in range(size):
        term = sums[index]
        sums[index] = total
        total += term
    sums[size] = total


@njit(nogil=True, cache=True)
def hash_windows(sums: U64, window: int, hashing: Hashing, hashes: U32) -> None:
    """hashes[i]: of the window that begins at term i."""
    size = hashes.shape[0]
    low = sums[:size]
    high = sums[window : window + size]
    inverses = hashing.inverses
    keep = hashing.keep
    for index in range(size):
        hashes[index] = _scaled(high[index] - low[index], inverses[index]) & keep


@njit(nogil=True, cache=True)
def hash_places(sums: U64, window: int, places: I32, hashing: Hashing, hashes: U32) -> None:
    """hashes[i]: of the window that begins at term places[i]."""
    inverses = hashing.inverses
    keep = hashing.keep
    for index in range(len(places)):
        place = np.int64(places[index])
        hashes[index] = _scaled(sums[place + window] - sums[place], inverses[place]) & keep


@njit(nogil=True, cache=True)
def hash_text(tokens: U32, powers: U32, keep: np.uint32) -> np.uint32:
    """The fingerprint of all of `tokens`, one window."""
    total = np.uint64(0)
    for index in range(tokens.shape[0]):
        total += _folded(np.uint64(tokens[index]) * np.uint64(powers[index]))
    value = _folded(_folded(_folded(total)))
    return np.uint32(np.uint32(min(value, value - _P)) & keep)
