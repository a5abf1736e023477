"""Compiled loops: rolling fingerprints of windows, filter, probe, token comparison. All without the GIL.

A window's fingerprint is a pair of polynomial hashes modulo the prime 2^31 - 1 with bases drawn at random for each
process. It is only a filter: `find_windows` compares the tokens of every candidate.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

PRIME = (1 << 31) - 1
_MIX = 0x9E3779B97F4A7C15

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@njit(nogil=True, cache=True)
def _step(value: np.uint64, base: np.uint64, token: np.uint64) -> np.uint64:
    return (value * base + token) % np.uint64(PRIME)


@njit(nogil=True, cache=True)
def slot_of(fingerprint: np.uint64, mask: np.uint64) -> np.uint64:
    """Index into a power-of-two table."""
    return ((fingerprint * np.uint64(_MIX)) >> np.uint64(24)) & mask


@njit(nogil=True, cache=True)
def fingerprint(tokens: U32, bases: U64, keep: np.uint64) -> np.uint64:
    """62 bits over all of `tokens`. `keep` masks it: tests force collisions with a small mask."""
    first = np.uint64(0)
    second = np.uint64(0)
    for token in tokens:
        first = _step(first, bases[0], np.uint64(token))
        second = _step(second, bases[1], np.uint64(token))
    return ((first << np.uint64(31)) | second) & keep


@njit(nogil=True, cache=True)
def _power(base: np.uint64, exponent: int) -> np.uint64:
    result = np.uint64(1)
    for _ in range(exponent):
        result = (result * base) % np.uint64(PRIME)
    return result


@njit(nogil=True, cache=True)
def _same_tokens(query: U32, at: int, pool: U32, offset: int, count: int) -> bool:
    for index in range(count):  # noqa: SIM110 -- compiled: a generator would be slower
        if query[at + index] != pool[offset + index]:
            return False
    return True


class Buckets(NamedTuple):
    """One window class: a bit filter and the bucket heads, both powers of two long."""

    bits: U64
    heads: I32


class Stored(NamedTuple):
    """All entries of a table, by id; tokens lie in `pool` from `offsets` on."""

    following: I32
    fingerprints: U64
    pool: U32
    offsets: I64
    lengths: I32


class Output(NamedTuple):
    """Verified pairs, [capacity] each. counts: [pairs, candidates, verified]."""

    entries: I32
    positions: I32
    counts: I64


@njit(nogil=True, cache=True)
def _collect(query: U32, position: int, value: np.uint64, entry: int, stored: Stored, out: Output) -> bool:
    """Walks one bucket; False if the output is full: then it holds no pair of this position."""
    before = out.counts[0]
    while entry >= 0:
        if stored.fingerprints[entry] == value:
            out.counts[1] += 1
            count = stored.lengths[entry]
            fits = position + count <= len(query)
            if fits and _same_tokens(query, position, stored.pool, stored.offsets[entry], count):
                if out.counts[0] == len(out.entries):
                    out.counts[2] -= out.counts[0] - before
                    out.counts[0] = before
                    return False
                out.entries[out.counts[0]] = entry
                out.positions[out.counts[0]] = position
                out.counts[0] += 1
                out.counts[2] += 1
        entry = stored.following[entry]
    return True


@njit(nogil=True, cache=True)
def find_windows(
    query: U32,
    first: int,
    last: int,
    window: int,
    bases: U64,
    keep: np.uint64,
    buckets: Buckets,
    stored: Stored,
    out: Output,
) -> int:
    """Entries of one window class at query positions [first, last), appended to `out`.

    Returns the position reached: less than `last` only if the output is full; go on from there with a
    larger one.
    """
    size = len(query)
    if first + window > size or first >= last:
        return last
    prime = np.uint64(PRIME)
    drop0 = _power(bases[0], window)
    drop1 = _power(bases[1], window)
    hash0 = np.uint64(0)
    hash1 = np.uint64(0)
    for index in range(first, first + window):
        hash0 = _step(hash0, bases[0], np.uint64(query[index]))
        hash1 = _step(hash1, bases[1], np.uint64(query[index]))
    bit_mask = np.uint64(len(buckets.bits) * 64 - 1)
    head_mask = np.uint64(len(buckets.heads) - 1)
    position = first
    while True:
        value = ((hash0 << np.uint64(31)) | hash1) & keep
        bit = slot_of(value, bit_mask)
        if buckets.bits[bit >> np.uint64(6)] >> (bit & np.uint64(63)) & np.uint64(1):
            head = buckets.heads[slot_of(value, head_mask)]
            if not _collect(query, position, value, head, stored, out):
                return position
        position += 1
        if position >= last or position + window > size:
            return last
        gone = np.uint64(query[position - 1])
        come = np.uint64(query[position + window - 1])
        hash0 = (_step(hash0, bases[0], come) + prime - (gone * drop0) % prime) % prime
        hash1 = (_step(hash1, bases[1], come) + prime - (gone * drop1) % prime) % prime


@njit(nogil=True, cache=True)
def common_prefix(query: U32, at: int, pool: U32, offset: int, count: int) -> int:
    """Tokens from query[at:] that equal the pool's from `offset`, at most `count`."""
    limit = min(count, len(query) - at)
    for index in range(limit):
        if query[at + index] != pool[offset + index]:
            return index
    return limit


@njit(nogil=True, cache=True)
def common_suffix(query: U32, end: int, pool: U32, offset: int, count: int) -> int:
    """Tokens before query[end] that equal the last ones of pool[offset:offset + count]."""
    limit = min(count, end)
    for index in range(limit):
        if query[end - 1 - index] != pool[offset + count - 1 - index]:
            return index
    return limit
