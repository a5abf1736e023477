"""Compiled loops over queries and entries: fingerprints, filter, probe, token comparison, links. All without the GIL.

A window's fingerprint is a pair of polynomial hashes modulo the prime 2^31 - 1 with bases drawn at random for each
process. It is only a filter: `find_windows` compares the tokens of every candidate. A query is hashed once
(`hash_prefixes`); the window of any class at any position follows from two of its prefixes.

Kernels call only kernels of this file: compiled code is cached by file, and a cached caller would not notice
a change of a callee elsewhere.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

PRIME = (1 << 31) - 1
NONE = -1
_MIX = 0x9E3779B97F4A7C15
_ENTRY_BITS = 32
ENTRY_MASK = (1 << _ENTRY_BITS) - 1
# Tokens compared before `find_windows` returns for a look at the clock: about a millisecond.
_COMPARED_AT_MOST = 1 << 21

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class Columns(NamedTuple):
    """All entries of a table, by id; their tokens lie in `pool`. Links are ids, NONE where there is none.

    following, preceding: the chain of one bucket. before: the chunk that this one continues; first_behind:
    head of the list of chunks that continue this one, linked by next_sibling and prior_sibling.
    owners: [capacity, words], one bit an owner.
    """

    pool: U32
    offsets: I64
    lengths: I32
    fingerprints: U64
    following: I32
    preceding: I32
    before: I32
    first_behind: I32
    next_sibling: I32
    prior_sibling: I32
    owners: U64
    classes: U8


class Buckets(NamedTuple):
    """One window class: a bit filter and the bucket heads, both powers of two long."""

    bits: U64
    heads: I32


class Reader(NamedTuple):
    """Who asks: bits of the owners that can serve it, and a bit for each context class that may."""

    owners: U64
    classes: int


class Text(NamedTuple):
    """A query: tokens [n], and both hashes of all its prefixes, [2, n + 1]."""

    tokens: U32
    prefixes: I64


class Output(NamedTuple):
    """Pairs found, [capacity] each: position << 32 | entry, and how many tokens agree.

    counts: [pairs, candidates].
    """

    keys: I64
    agreed: I32
    counts: I64


class Links(NamedTuple):
    """Occurrences joined to runs, [occurrences]: parent is the occurrence before, NONE at a run's first.

    starts: query position where the run through this occurrence begins; NONE if the reader may not have it.
    classes: the worst context class from there to here.
    """

    parents: I32
    starts: I64
    classes: U8


class RawRuns(NamedTuple):
    """The longest runs, [runs]: query range, last whole occurrence, chunk behind it that goes on (or NONE), class."""

    starts: I64
    ends: I64
    leaves: I32
    tails: I32
    classes: U8


@njit(nogil=True, cache=True)
def _reduced(value: int) -> int:
    """`value` modulo PRIME, for 0 <= value < 2^63."""
    value = (value & PRIME) + (value >> 31)
    value = (value & PRIME) + (value >> 31)
    return value - PRIME if value >= PRIME else value


@njit(nogil=True, cache=True)
def _power(base: int, exponent: int) -> int:
    result = 1
    for _ in range(exponent):
        result = _reduced(result * base)
    return result


@njit(nogil=True, cache=True)
def _combined(first: int, second: int, keep: np.uint64) -> np.uint64:
    return np.uint64(np.uint64((first << 31) | second) & keep)


@njit(nogil=True, cache=True)
def _slot_of(fingerprint: np.uint64, mask: np.uint64) -> np.uint64:
    """Index into a power-of-two table."""
    return np.uint64(((fingerprint * np.uint64(_MIX)) >> np.uint64(24)) & mask)


@njit(nogil=True, cache=True)
def fingerprint(tokens: U32, bases: I64, keep: np.uint64) -> np.uint64:
    """62 bits over all of `tokens`. `keep` masks it: tests force collisions with a small mask."""
    first = 0
    second = 0
    for token in tokens:
        first = _reduced(first * bases[0] + np.int64(token))
        second = _reduced(second * bases[1] + np.int64(token))
    return np.uint64(_combined(first, second, keep))


@njit(nogil=True, cache=True)
def hash_prefixes(tokens: U32, bases: I64) -> I64:
    """[2, n + 1]: both hashes of the first i tokens."""
    prefixes = np.empty((2, len(tokens) + 1), dtype=np.int64)
    first = 0
    second = 0
    prefixes[0, 0] = prefixes[1, 0] = 0
    for index in range(len(tokens)):
        token = np.int64(tokens[index])
        first = _reduced(first * bases[0] + token)
        second = _reduced(second * bases[1] + token)
        prefixes[0, index + 1] = first
        prefixes[1, index + 1] = second
    return prefixes


@njit(nogil=True, cache=True)
def _window_hash(prefixes: I64, position: int, window: int, drop: int) -> int:
    """`drop`: the base to the power of `window`."""
    value = int(prefixes[position + window]) - _reduced(int(prefixes[position]) * drop)
    return int(value + PRIME if value < 0 else value)


@njit(nogil=True, cache=True)
def link_bucket(entry: int, buckets: Buckets, columns: Columns) -> None:
    value = columns.fingerprints[entry]
    slot = _slot_of(value, np.uint64(len(buckets.heads) - 1))
    head = buckets.heads[slot]
    columns.following[entry] = head
    columns.preceding[entry] = NONE
    if head != NONE:
        columns.preceding[head] = entry
    buckets.heads[slot] = entry
    bit = _slot_of(value >> np.uint64(31), np.uint64(len(buckets.bits) * 64 - 1))
    buckets.bits[bit >> np.uint64(6)] |= np.uint64(1) << (bit & np.uint64(63))


@njit(nogil=True, cache=True)
def unlink_bucket(entry: int, buckets: Buckets, columns: Columns) -> None:
    """The filter's bit stays set: another entry may share it."""
    following = columns.following[entry]
    preceding = columns.preceding[entry]
    if following != NONE:
        columns.preceding[following] = preceding
    if preceding != NONE:
        columns.following[preceding] = following
    else:
        buckets.heads[_slot_of(columns.fingerprints[entry], np.uint64(len(buckets.heads) - 1))] = following


@njit(nogil=True, cache=True)
def rehash(old: Buckets, new: Buckets, columns: Columns) -> None:
    """Links every entry of `old` into the empty `new`."""
    for head in old.heads:
        entry = head
        while entry != NONE:
            following = columns.following[entry]
            link_bucket(entry, new, columns)
            entry = following


@njit(nogil=True, cache=True)
def _reaches(columns: Columns, entry: int, reader: Reader) -> bool:
    for word in range(len(reader.owners)):  # noqa: SIM110 -- compiled: a generator would be slower
        if columns.owners[entry, word] & reader.owners[word] != np.uint64(0):
            return True
    return False


@njit(nogil=True, cache=True)
def _serves(columns: Columns, entry: int, reader: Reader) -> bool:
    allowed = (reader.classes >> np.int64(columns.classes[entry])) & 1
    return bool(allowed == 1) and _reaches(columns, entry, reader)


@njit(nogil=True, cache=True)
def _agreeing(columns: Columns, entry: int, query: U32, at: int, high: int) -> int:
    """How many of the entry's tokens, from its first on, stand in query[at:high]."""
    offset = columns.offsets[entry]
    limit = min(int(columns.lengths[entry]), high - at)
    for index in range(limit):
        if query[at + index] != columns.pool[offset + index]:
            return index
    return limit


@njit(nogil=True, cache=True)
def _agreeing_end(columns: Columns, entry: int, query: U32, low: int, end: int) -> int:
    """How many of the entry's tokens, from its last on backwards, stand in query[low:end]."""
    last = columns.offsets[entry] + columns.lengths[entry] - 1
    limit = min(int(columns.lengths[entry]), end - low)
    for index in range(limit):
        if query[end - 1 - index] != columns.pool[last - index]:
            return index
    return limit


@njit(nogil=True, cache=True)
def _collect(
    text: Text,
    position: int,
    high: int,
    window: int,
    entry: int,
    value: np.uint64,
    columns: Columns,
    reader: Reader,
    out: Output,
) -> int:
    """Walks one bucket. Returns the tokens compared, or NONE if the output is full: then nothing was added."""
    pairs = out.counts[0]
    candidates = out.counts[1]
    compared = 0
    while entry != NONE:
        if columns.fingerprints[entry] == value and _reaches(columns, entry, reader):
            candidates += 1
            agreed = _agreeing(columns, entry, text.tokens, position, high)
            compared += agreed + 1
            if agreed >= window:
                if pairs == len(out.keys):
                    return NONE
                out.keys[pairs] = (np.int64(position) << _ENTRY_BITS) | np.int64(entry)
                out.agreed[pairs] = agreed
                pairs += 1
        entry = columns.following[entry]
    out.counts[0] = pairs
    out.counts[1] = candidates
    return compared


@njit(nogil=True, cache=True)
def find_windows(
    text: Text,
    first: int,
    last: int,
    high: int,
    window: int,
    bases: I64,
    keep: np.uint64,
    buckets: Buckets,
    columns: Columns,
    reader: Reader,
    out: Output,
) -> int:
    """Entries of one window class at query positions [first, last), inside query[:high], appended to `out`.

    Returns the position reached: less than `last` if the output is full (then it went not one step, or
    there may be room for no more) or if much was compared; go on from there.
    """
    drop0 = _power(bases[0], window)
    drop1 = _power(bases[1], window)
    keep_first = keep >> np.uint64(31)
    bit_mask = np.uint64(len(buckets.bits) * 64 - 1)
    head_mask = np.uint64(len(buckets.heads) - 1)
    compared = 0
    for position in range(first, min(last, high - window + 1)):
        hash0 = _window_hash(text.prefixes[0], position, window, drop0)
        # Most windows end here; the second hash is worth its while only for the others.
        bit = _slot_of(np.uint64(hash0) & keep_first, bit_mask)
        if buckets.bits[bit >> np.uint64(6)] >> (bit & np.uint64(63)) & np.uint64(1):
            value = _combined(hash0, _window_hash(text.prefixes[1], position, window, drop1), keep)
            head = buckets.heads[_slot_of(value, head_mask)]
            more = _collect(text, position, high, window, head, value, columns, reader, out)
            if more == NONE:
                return position
            compared += more
            if compared > _COMPARED_AT_MOST:
                return position + 1
    return last


@njit(nogil=True, cache=True)
def _find(keys: I64, position: int, entry: int) -> int:
    """Index of an occurrence in sorted keys, or NONE."""
    key = (np.int64(position) << _ENTRY_BITS) | np.int64(entry)
    low = 0
    high = len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low if low < len(keys) and keys[low] == key else NONE


@njit(nogil=True, cache=True)
def link_occurrences(text: Text, low: int, keys: I64, agreed: I32, columns: Columns, reader: Reader) -> Links:
    """Joins occurrences (keys ascending) with the ones they continue, or with the end of the chunk before them."""
    count = len(keys)
    parents = np.full(count, NONE, dtype=np.int32)
    starts = np.full(count, NONE, dtype=np.int64)
    classes = np.zeros(count, dtype=np.uint8)
    for index in range(count):
        entry = keys[index] & ENTRY_MASK
        position = keys[index] >> _ENTRY_BITS
        if not _serves(columns, entry, reader):
            continue
        starts[index] = position
        classes[index] = columns.classes[entry]
        before = columns.before[entry]
        if before == NONE or not _serves(columns, before, reader):
            continue
        parent = _find(keys, position - columns.lengths[before], before)
        if parent != NONE and agreed[parent] == columns.lengths[before]:
            parents[index] = parent
            starts[index] = starts[parent]
            classes[index] = max(classes[index], classes[parent])
            continue
        shared = _agreeing_end(columns, before, text.tokens, low, position)
        if shared:
            starts[index] = position - shared
            classes[index] = max(classes[index], columns.classes[before])
    return Links(parents, starts, classes)


@njit(nogil=True, cache=True)
def _best_behind(text: Text, end: int, high: int, entry: int, columns: Columns, reader: Reader) -> tuple[int, int]:
    """The chunk behind an entry that agrees with the query for longest from `end` on: (id or NONE, tokens)."""
    best = NONE
    most = 0
    behind = columns.first_behind[entry]
    while behind != NONE:
        if _serves(columns, behind, reader):
            shared = _agreeing(columns, behind, text.tokens, end, high)
            if shared > most:
                best, most = behind, shared
        behind = columns.next_sibling[behind]
    return best, most


@njit(nogil=True, cache=True)
def longest_runs(
    text: Text, high: int, keys: I64, agreed: I32, links: Links, columns: Columns, reader: Reader
) -> RawRuns:
    """One run for each occurrence that no better one continues, with the beginning of the chunk behind it."""
    count = len(keys)
    continued = np.zeros(count, dtype=np.bool_)
    for parent in links.parents:
        if parent != NONE:
            continued[parent] = True
    starts = np.empty(count, dtype=np.int64)
    ends = np.empty(count, dtype=np.int64)
    leaves = np.empty(count, dtype=np.int32)
    tails = np.empty(count, dtype=np.int32)
    classes = np.empty(count, dtype=np.uint8)
    runs = 0
    for index in range(count):
        if links.starts[index] == NONE:
            continue
        entry = keys[index] & ENTRY_MASK
        end = (keys[index] >> _ENTRY_BITS) + agreed[index]
        tail, shared = NONE, 0
        if agreed[index] == columns.lengths[entry]:
            tail, shared = _best_behind(text, end, high, entry, columns, reader)
        # A chunk behind that is an occurrence itself has its own, longer run.
        if continued[index] and (tail == NONE or _find(keys, end, tail) != NONE):
            continue
        starts[runs] = links.starts[index]
        ends[runs] = end + shared
        leaves[runs] = index
        tails[runs] = tail
        classes[runs] = links.classes[index]
        if tail != NONE:
            classes[runs] = max(classes[runs], columns.classes[tail])
        runs += 1
    return RawRuns(starts[:runs], ends[:runs], leaves[:runs], tails[:runs], classes[:runs])


@njit(nogil=True, cache=True)
def trace(
    starts: I64, ends: I64, leaves: I32, tails: I32, keys: I64, links: Links, columns: Columns
) -> tuple[I32, U32, I64, I64]:
    """The chunks that pieces [starts, ends) of runs lie in, piece after piece.

    Returns entries [n], the tokens that each contributes [n], and of each piece how many entries it has and
    how many tokens of its first entry lie before it.
    """
    # All but the first and the last chunk of a piece are whole and have at least 16 tokens.
    room = 2 * len(starts)
    for piece in range(len(starts)):
        room += (ends[piece] - starts[piece]) // 16
    entries = np.empty(room, dtype=np.int32)
    lengths = np.empty(room, dtype=np.uint32)
    counts = np.empty(len(starts), dtype=np.int64)
    skips = np.empty(len(starts), dtype=np.int64)
    cursor = room
    for piece in range(len(starts) - 1, -1, -1):
        start, stop, at = starts[piece], ends[piece], leaves[piece]
        before = cursor
        entry = keys[at] & ENTRY_MASK
        position = keys[at] >> _ENTRY_BITS
        in_tail = tails[piece] != NONE and position + columns.lengths[entry] < stop
        if in_tail:
            position += columns.lengths[entry]
            entry = np.int64(tails[piece])
        while True:
            if position < stop:
                cursor -= 1
                entries[cursor] = entry
                lengths[cursor] = stop - max(position, start)
                stop = position
            if position <= start:
                break
            if not in_tail and links.parents[at] == NONE:
                # What is left is the end of the chunk before.
                entry = np.int64(columns.before[entry])
                position -= columns.lengths[entry]
                continue
            if not in_tail:
                at = links.parents[at]
            in_tail = False
            entry = keys[at] & ENTRY_MASK
            position = keys[at] >> _ENTRY_BITS
        counts[piece] = before - cursor
        skips[piece] = start - position
    return entries[cursor:], lengths[cursor:], counts, skips
