"""From occurrences of chunks to runs of neighbouring chunks, and back to the chunks that a piece of a run lies in."""

import numpy as np
from numba import njit

from services.matcher.kernels.compare import agreeing
from services.matcher.kernels.cover import SHORTEST_SEGMENT, best_cover
from services.matcher.kernels.rows import length_of, serves, start_of
from services.matcher.kernels.types import (
    ANY_TOKEN,
    BEFORE,
    CLASS,
    ENTRY_BITS,
    ENTRY_MASK,
    FIRST_BEHIND,
    I32,
    I64,
    NEXT_SIBLING,
    NO_TOKEN,
    NONE,
    TOKEN_BEFORE,
    TOKEN_BEHIND,
    TOUCHED,
    U8,
    U32,
    Links,
    RawRuns,
    Reader,
    ReaderColumns,
)

# Chunks with fewer tokens are not found by themselves, so all inner chunks of a run have as many.
_SHORTEST_CHUNK = 16
# A hundred thousand conversations may go on from one chunk, and nobody looks at the clock meanwhile: some hundred
# microseconds.
_MOST_BEHIND = 4096


@njit(nogil=True, cache=True)
def _agreeing_end(pool: U32, rows: I32, entry: int, query: U32, low: int, end: int) -> int:
    """How many of the entry's tokens, from its last on backwards, stand in query[low:end]."""
    length = length_of(rows, entry)
    last = start_of(rows, entry) + length - 1
    limit = min(length, end - low)
    for index in range(limit):
        if query[end - 1 - index] != pool[last - index]:
            return index
    return limit


@njit(nogil=True, cache=True)
def _find(keys: I64, position: int, entry: int) -> int:
    """Index of an occurrence in sorted keys, or NONE."""
    key = (np.int64(position) << ENTRY_BITS) | np.int64(entry)
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
def link_occurrences(query: U32, low: int, keys: I64, agreed: I32, columns: ReaderColumns, reader: Reader) -> Links:
    """Joins occurrences (keys ascending) with the ones they continue, or with the end of the chunk before them."""
    pool, rows, owners = columns.pool, columns.rows, columns.owners
    count = len(keys)
    parents = np.full(count, NONE, dtype=np.int32)
    starts = np.full(count, NONE, dtype=np.int64)
    befores = np.full(count, NONE, dtype=np.int32)
    classes = np.zeros(count, dtype=np.uint8)
    for index in range(count):
        entry = keys[index] & ENTRY_MASK
        position = keys[index] >> ENTRY_BITS
        if not serves(rows, owners, entry, reader):
            continue
        starts[index] = position
        classes[index] = rows[entry, CLASS]
        before = np.int64(rows[entry, BEFORE])
        if before == NONE or position == low or rows[entry, TOKEN_BEFORE] != np.int32(query[position - 1]):
            continue
        if not serves(rows, owners, before, reader):
            continue
        length = length_of(rows, before)
        parent = _find(keys, position - length, before)
        if parent != NONE and agreed[parent] == length and starts[parent] != NONE:
            parents[index] = parent
            starts[index] = starts[parent]
            classes[index] = max(classes[index], classes[parent])
            continue
        shared = _agreeing_end(pool, rows, before, query, low, position)
        if shared:
            starts[index] = position - shared
            befores[index] = before
            classes[index] = max(classes[index], rows[before, CLASS])
    return Links(parents, starts, befores, classes)


@njit(nogil=True, cache=True)
def _is(token: np.int32, asked: np.uint32) -> bool:
    """Whether the token that a row has of a neighbour may be the one that is asked for."""
    return (token == np.int32(asked) and token != NO_TOKEN) or token == ANY_TOKEN


@njit(nogil=True, cache=True)
def _best_behind(
    query: U32, end: int, high: int, entry: int, pool: U32, rows: I32, owners: U32, reader: Reader
) -> tuple[int, int]:
    """The chunk behind an entry that agrees with the query for longest from `end` on: (id or NONE, tokens).

    Of very many, the latest are looked at.
    """
    best = NONE
    most = 0
    behind = np.int64(rows[entry, FIRST_BEHIND])
    looked_at = 0
    while behind != NONE and looked_at < _MOST_BEHIND:
        looked_at += 1
        if rows[behind, BEFORE] == entry and serves(rows, owners, behind, reader):
            limit = min(length_of(rows, behind), high - end)
            shared = agreeing(pool, start_of(rows, behind), query, end, limit)
            if shared > most:
                best, most = behind, shared
        behind = np.int64(rows[behind, NEXT_SIBLING])
    return best, most


@njit(nogil=True, cache=True)
def longest_runs(
    query: U32, high: int, keys: I64, agreed: I32, links: Links, columns: ReaderColumns, reader: Reader
) -> RawRuns:
    """One run for each occurrence that no better one continues, with the beginning of the chunk behind it."""
    pool, rows, owners = columns.pool, columns.rows, columns.owners
    begun, worst = links.starts, links.classes
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
    number = 0
    for index in range(count):
        if begun[index] == NONE:
            continue
        entry = keys[index] & ENTRY_MASK
        end = (keys[index] >> ENTRY_BITS) + agreed[index]
        tail, shared = NONE, 0
        # Whole, and what stands behind it may be what the query goes on with.
        if agreed[index] == length_of(rows, entry) and end < high and _is(rows[entry, TOKEN_BEHIND], query[end]):
            tail, shared = _best_behind(query, end, high, entry, pool, rows, owners, reader)
        # What goes on into an occurrence of its own is that one's run.
        if continued[index] and (tail == NONE or _find(keys, end, tail) != NONE):
            continue
        starts[number] = begun[index]
        ends[number] = end + shared
        leaves[number] = index
        tails[number] = tail
        classes[number] = worst[index]
        if tail != NONE:
            classes[number] = max(classes[number], rows[tail, CLASS])
        number += 1
    return RawRuns(starts[:number], ends[:number], leaves[:number], tails[:number], classes[:number])


@njit(nogil=True, cache=True)
def trace(
    starts: I64, ends: I64, leaves: I32, tails: I32, keys: I64, links: Links, columns: ReaderColumns
) -> tuple[I64, U32, I64, I64]:
    """The chunks that pieces [starts, ends) of runs lie in, piece after piece.

    Returns entries [n], the tokens that each contributes [n], and of each piece how many entries it has and
    how many tokens of its first entry lie before it.
    """
    rows = columns.rows
    # All but the first and the last chunk of a piece are whole.
    room = 2 * len(starts)
    for piece in range(len(starts)):
        room += (ends[piece] - starts[piece]) // _SHORTEST_CHUNK
    entries = np.empty(room, dtype=np.int64)
    lengths = np.empty(room, dtype=np.uint32)
    counts = np.empty(len(starts), dtype=np.int64)
    skips = np.empty(len(starts), dtype=np.int64)
    cursor = room
    for piece in range(len(starts) - 1, -1, -1):
        start, stop, at = starts[piece], ends[piece], leaves[piece]
        before = cursor
        entry = keys[at] & ENTRY_MASK
        position = keys[at] >> ENTRY_BITS
        in_tail = tails[piece] != NONE and position + length_of(rows, entry) < stop
        if in_tail:
            position += length_of(rows, entry)
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
                # What is left is the end of the chunk before: of the one that was looked at, whatever is there now.
                entry = np.int64(links.befores[at])
                position -= length_of(rows, entry)
                continue
            if not in_tail:
                at = links.parents[at]
            in_tail = False
            entry = keys[at] & ENTRY_MASK
            position = keys[at] >> ENTRY_BITS
        counts[piece] = before - cursor
        skips[piece] = start - position
    return entries[cursor:], lengths[cursor:], counts, skips


@njit(nogil=True, cache=True)
def cover_occurrences(
    query: U32, low: int, high: int, keys: I64, agreed: I32, skip: int, now: int, columns: ReaderColumns, reader: Reader
) -> tuple[I64, I64, U8, I64, I64, I64, U32]:
    """The best cover of query[max(low, skip):high], from occurrences to chunks: the fields of a `Cover` (runs.py).

    now: second that its entries were last matched at, from here on.
    """
    links = link_occurrences(query, low, keys, agreed, columns, reader)
    runs = longest_runs(query, high, keys, agreed, links, columns, reader)
    starts = np.maximum(runs.starts, skip)
    kept = np.flatnonzero(runs.ends - starts >= SHORTEST_SEGMENT)
    firsts, lasts, indices = best_cover(starts[kept], runs.ends[kept], runs.classes[kept])
    served = kept[indices]
    entries, lengths, counts, skips = trace(
        firsts, lasts, runs.leaves[served], runs.tails[served], keys, links, columns
    )
    rows = columns.rows
    # Of the piece: it may leave out its run's worst chunk.
    classes = np.zeros(len(firsts), dtype=np.uint8)
    cursor = 0
    for piece in range(len(firsts)):
        for entry in entries[cursor : cursor + counts[piece]]:
            classes[piece] = max(classes[piece], np.uint8(rows[entry, CLASS]))
            if rows[entry, TOUCHED] != now:
                rows[entry, TOUCHED] = now
        cursor += counts[piece]
    return firsts, lasts, classes, counts, skips, entries, lengths
