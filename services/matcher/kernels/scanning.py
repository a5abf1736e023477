"""The scan: every window class against a query, block by block.

For each block: terms and prefix sums once, and keys of its tokens; then, for each class in use, the positions where a
text's anchor may be (anchors.py; of a small class: all), fingerprints, filter words, and a look at only those windows
that the filter lets pass. The steps are loops of their own without branches, so that they are vectorised and their
cache misses overlap. What a fingerprint leads to is compared token by token.
"""

import numpy as np
from numba import njit

from services.matcher.kernels.anchors import anchor_of, anchors_of, double_span, key_places, span_of, width_of
from services.matcher.kernels.compare import agreeing
from services.matcher.kernels.hashing import BLOCK, hash_places, hash_windows, sum_terms
from services.matcher.kernels.rows import length_of, reaches, start_of
from services.matcher.kernels.texts import FILTER_MIX, next_of, shift_for
from services.matcher.kernels.types import (
    ENTRY_BITS,
    ENTRY_MASK,
    I32,
    I64,
    NEXT_SAME,
    NONE,
    U8,
    U32,
    U64,
    WORD,
    Buckets,
    Hashing,
    Output,
    Reader,
    ReaderColumns,
)

PAIRS, CANDIDATES, VERIFIED, STOPPED = range(4)
# Why a scan stopped before its end.
FULL, BUSY = 1, 2
# Tokens compared before a scan returns for a look at the clock: some hundred microseconds.
_COMPARED_AT_MOST = 1 << 20
_WITHOUT_LIMIT = 1 << 62
# Pairs of a block from which on insertion is not the way to sort them.
_MANY = 64
# Tokens in a cache line.
_LINE = 16


@njit(nogil=True, cache=True)
def _filter(hashes: U32, bits: U32, words: U32, flags: U8) -> None:
    """flags[i]: whether the filter may know window i."""
    size = hashes.shape[0]
    shift = np.uint64(shift_for(len(bits)))
    for index in range(size):
        words[index] = bits[np.uint64(hashes[index]) >> shift]
    for index in range(size):
        value = hashes[index]
        mixed = np.uint32(value * FILTER_MIX)
        word = words[index]
        flags[index] = np.uint8(
            (word >> (mixed >> np.uint32(27)))
            & (word >> ((mixed >> np.uint32(22)) & np.uint32(31)))
            & (word >> ((mixed >> np.uint32(17)) & np.uint32(31)))
            & np.uint32(1)
        )


@njit(nogil=True, cache=True)
def _passed(flags: U64, passed: I32) -> int:
    """Indexes of the flags that are set, eight flags a word."""
    count = 0
    for word in range(flags.shape[0]):
        value = flags[word]
        if value:
            for step in range(8):
                if (value >> np.uint64(8 * step)) & np.uint64(1):
                    passed[count] = 8 * word + step
                    count += 1
    return count


@njit(nogil=True, cache=True)
def _known(hashes: U32, passed: I32, count: int, buckets: Buckets, found: I32, first: U64) -> int:
    """Of windows that passed the filter, keeps in `passed` those whose fingerprint is known, and in `found` the first
    node with it and in `first` what that says; returns how many.

    Heads and nodes are fetched in loops of their own, so that their cache misses overlap.
    """
    heads, nodes = buckets.heads, buckets.nodes
    shift = shift_for(len(heads))
    for index in range(count):
        found[index] = heads[np.int64(hashes[passed[index]]) >> shift]
    for index in range(count):
        first[index] = nodes[max(found[index], 0), WORD]
    known = 0
    for index in range(count):
        node = np.int64(found[index])
        word = first[index]
        value = hashes[passed[index]]
        while node != NONE and np.uint32(word >> np.uint64(ENTRY_BITS)) != value:
            node = next_of(nodes, node)
            word = nodes[max(node, 0), WORD]
        passed[known] = passed[index]
        found[known] = node
        first[known] = word
        known += node != NONE
    return known


@njit(nogil=True, cache=True)
def _fetch(first: U64, count: int, window: int, rows: I32, pool: U32) -> None:
    """Brings the tokens that will be compared into the cache, all at a time instead of one after another."""
    for index in range(count):
        first[index] = np.uint64(start_of(rows, np.int64(first[index] & np.uint64(ENTRY_MASK))))
    seen = np.uint32(0)
    # All texts' first lines, then all second ones: so the page tables are walked for many of them at a time, too.
    for step in range(0, window, _LINE):
        for index in range(count):
            seen ^= pool[np.int64(first[index]) + step]
    first[count] = seen


@njit(nogil=True, cache=True)
def _collect(
    tokens: U32, places: I32, found: I32, low: int, stop: int, high: int, window: int, nodes: U64, pool: U32, rows: I32,
    owners: U32, reader: Reader, keys: I64, agreements: I32, counts: I64, compared: int, at_most: int,
) -> int:  # fmt: skip
    """Texts that begin in [low, stop), of those that have the fingerprint of the window at low + places[i]: found[i] is
    the first node with it, from there on the bucket is walked.

    Returns `compared` and the tokens compared here, not many more than at_most; or NONE if the output is full.
    """
    span = span_of(window)
    for index in range(len(found)):
        node = np.int64(found[index])
        value = np.uint32(nodes[node, WORD] >> np.uint64(ENTRY_BITS))
        while node != NONE:
            word = nodes[node, WORD]
            node = next_of(nodes, node)
            if np.uint32(word >> np.uint64(ENTRY_BITS)) != value:
                continue
            entry = np.int64(word & np.uint64(ENTRY_MASK))
            start = start_of(rows, entry)
            position = low + places[index] - anchor_of(pool, start, span)
            compared += 16
            if position < low or position >= stop:
                continue
            agreed = agreeing(pool, start, tokens, position, min(length_of(rows, entry), high - position))
            compared += agreed
            counts[CANDIDATES] += 1
            if agreed < window:
                continue
            counts[VERIFIED] += 1
            while entry != NONE:
                if reaches(rows, owners, entry, reader):
                    pairs = counts[PAIRS]
                    if pairs == len(keys):
                        return NONE
                    keys[pairs] = (position << ENTRY_BITS) | entry
                    agreements[pairs] = agreed
                    counts[PAIRS] = pairs + 1
                compared += 1
                entry = np.int64(rows[entry, NEXT_SAME])
        if compared > at_most:
            return compared
    return compared


@njit(nogil=True, cache=True)
def _order(keys: I64, agreed: I32) -> None:
    """Sorts a block's pairs: each class has found its own in order, few classes have found much."""
    if len(keys) > _MANY:
        order = np.argsort(keys)
        keys[:] = keys[order]
        agreed[:] = agreed[order]
        return
    for index in range(1, len(keys)):
        key, tokens = keys[index], agreed[index]
        place = index
        while place and keys[place - 1] > key:
            keys[place], agreed[place] = keys[place - 1], agreed[place - 1]
            place -= 1
        keys[place], agreed[place] = key, tokens


@njit(nogil=True, cache=True)
def _widest(windows: tuple[int, ...]) -> int:
    widest = 0
    for window in windows:
        widest = max(widest, window)
    return widest


@njit(nogil=True, cache=True)
def _scratch(widest: int) -> tuple[U64, U32, U32, U32, U64, I32, I32, I32, U64]:
    """sums, keys, hashes, words, flags, places, passed, found, starts: room for one block of one class."""
    return (
        np.empty(BLOCK + widest + 1, dtype=np.uint64),
        np.empty((2, BLOCK + span_of(widest)), dtype=np.uint32),
        np.empty(BLOCK, dtype=np.uint32),
        np.empty(BLOCK, dtype=np.uint32),
        np.empty(BLOCK // 8, dtype=np.uint64),
        np.empty(BLOCK, dtype=np.int32),
        np.empty(BLOCK, dtype=np.int32),
        np.empty(BLOCK, dtype=np.int32),
        np.empty(BLOCK + 1, dtype=np.uint64),
    )


@njit(nogil=True, cache=True)
def _hash(sums: U64, least: U32, window: int, span: int, hashing: Hashing, places: I32, hashes: U32) -> int:
    """Fingerprints of the windows that are looked for, and of anchored ones their places; returns how many."""
    if span == 1:
        hash_windows(sums, window, hashing, hashes[: len(least)])
        return len(least)
    count = anchors_of(least, places)
    hash_places(sums, width_of(window), places[:count], hashing, hashes)
    return count


@njit(nogil=True, cache=True)
def _place(passed: I32, places: I32) -> None:
    """From indexes of anchors to their places."""
    for index in range(len(passed)):
        passed[index] = places[passed[index]]


@njit(nogil=True, cache=True)
def scan(
    tokens: U32, first: int, last: int, high: int, block: int, windows: tuple[int, ...], indexes: tuple[Buckets, ...],
    hashing: Hashing, columns: ReaderColumns, reader: Reader, out: Output,
) -> int:  # fmt: skip
    """Entries at query positions [first, last), inside query[:high], appended to `out` with keys ascending.

    windows: token counts of the classes, 0 for a class that is not in use; indexes: their buckets.
    Returns the position reached, where every class is done. Less than `last`: out.counts[STOPPED] says why (FULL:
    there may be room for no more; BUSY: much was compared, look at the clock). The block at hand is then undone, unless
    it is of one position.
    """
    widest = _widest(windows)
    sums, keys, hashes, words, flags, places, passed, found, starts = _scratch(widest)
    pool, rows, owners = columns.pool, columns.rows, columns.owners
    occurrences, agreements, counts = out.keys, out.agreed, out.counts
    compared = 0
    counts[STOPPED] = 0
    position = first
    while position < last:
        size = min(block, last - position)
        at_most = _COMPARED_AT_MOST if size > 1 else _WITHOUT_LIMIT  # One position is never undone for this.
        pairs, candidates, verified = counts[PAIRS], counts[CANDIDATES], counts[VERIFIED]
        sum_terms(tokens[position : min(high, position + size + widest)], hashing, sums)
        span = 1
        keyed = min(high - position, size + span_of(widest) - 1)
        least, other = keys[0], keys[1]
        if span_of(widest) > 1:
            key_places(tokens[position : position + keyed], least)
        for class_ in range(len(windows)):
            window = windows[class_]
            usable = min(size, high - position - window + 1)
            if window == 0 or usable <= 0:
                continue
            buckets = indexes[class_]
            while span < span_of(window):  # Classes ascend.
                keyed -= span
                double_span(least, span, other[:keyed])
                least, other = other, least
                span *= 2
            count = _hash(sums, least[:usable], window, span, hashing, places, hashes)
            flags[(count - 1) // 8] = np.uint64(0)
            _filter(hashes[:count], buckets.bits, words, flags.view(np.uint8))
            known = _known(hashes, passed, _passed(flags[: (count + 7) // 8], passed), buckets, found, starts)
            _fetch(starts, known, window, rows, pool)
            if span > 1:
                _place(passed[:known], places)
            compared = _collect(
                tokens, passed[:known], found[:known], position, position + usable, high, window, buckets.nodes, pool,
                rows, owners, reader, occurrences, agreements, counts, compared, at_most,
            )  # fmt: skip
            if compared == NONE or compared > at_most:
                counts[PAIRS], counts[CANDIDATES], counts[VERIFIED] = pairs, candidates, verified
                counts[STOPPED] = FULL if compared == NONE else BUSY
                return position
        _order(occurrences[pairs : counts[PAIRS]], agreements[pairs : counts[PAIRS]])
        position += size
        if compared > _COMPARED_AT_MOST:
            counts[STOPPED] = BUSY
            break
    return position
