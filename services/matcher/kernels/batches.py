"""Whole batches of entries at a time: what the table's one writer calls."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from services.matcher.kernels.anchors import anchor_of, span_of, width_of
from services.matcher.kernels.entries import (
    chain_in,
    fetch_heads,
    find_entry,
    is_alive,
    join_neighbours,
    link_entry,
    unlink_entry,
)
from services.matcher.kernels.hashing import hash_text
from services.matcher.kernels.rows import length_of, owners_of, set_owners, start_of
from services.matcher.kernels.texts import shift_for
from services.matcher.kernels.types import (
    BEFORE,
    CLASS,
    DOCUMENT,
    DOMAIN,
    FIRST_BEHIND,
    I32,
    I64,
    LENGTH,
    NEXT_SAME,
    NEXT_SIBLING,
    NO_TOKEN,
    NONE,
    OFFSET,
    POSITION,
    SPACE,
    TOKEN_BEFORE,
    TOKEN_BEHIND,
    TOUCHED,
    U8,
    U32,
    U64,
    Buckets,
    Columns,
    Hashing,
    NameIndexes,
)


class Chunks(NamedTuple):
    """N chunks of one space and window class, by row. tokens: of all; those of row i begin at starts[i]."""

    names: U64
    previous: U64
    positions: U32
    lengths: I64
    starts: I64
    tokens: U32
    domains: U8
    classes: U8
    matchable: U8
    documents: I32


class Spare(NamedTuple):
    """Free places: ids and index nodes for at most N entries, and for each row a pool offset that fits its length."""

    ids: I64
    offsets: I64
    nodes: I64


class Added(NamedTuple):
    """Of each row: its entry, whether that is new, and whether the spare offset is in use now."""

    entries: I64
    fresh: U8
    held: U8


@njit(nogil=True, cache=True)
def add_entries(
    chunks: Chunks, space: int, window: int, now: int, spare: Spare, hashing: Hashing, buckets: Buckets,
    indexes: NameIndexes, columns: Columns, added: Added,
) -> tuple[int, int]:  # fmt: skip
    """Makes entries of those chunks that are new; of the others the better context class is kept.

    Returns how many spare ids and nodes were used; as many rows as there are spare ids at least are done.
    """
    names, previous, rows, pool = columns.names, columns.previous, columns.rows, columns.pool
    name_next, cohort_next, prior_sibling = columns.name_next, columns.cohort_next, columns.prior_sibling
    name_heads, cohort_heads = indexes.names, indexes.cohorts
    entries, fresh, held, offsets = added.entries, added.fresh, added.held, spare.offsets
    values = _fingerprints(chunks, window, hashing.powers, hashing.keep, buckets.heads)
    # Never so many: what was fetched must be used.
    ids = int(fetch_heads(chunks.names, chunks.previous, space, chunks.domains, name_heads, cohort_heads) == 1 << 40)
    nodes = 0
    for row in range(len(chunks.lengths)):
        entry = find_entry(chunks.names, row, space, chunks.domains[row], name_heads, names, rows, name_next)
        if entry != NONE:
            rows[entry, CLASS] = min(rows[entry, CLASS], np.int32(chunks.classes[row]))
            entries[row] = entry
            continue
        entry = spare.ids[ids]
        ids += 1
        entries[row] = entry
        fresh[row] = 1
        _fill(entry, row, chunks, space, columns)
        columns.windows[entry] = window
        rows[entry, TOUCHED] = now
        chain_in(entry, name_heads, names, rows, name_next)
        if not chunks.matchable[row]:
            continue
        tokens = chunks.tokens[chunks.starts[row] : chunks.starts[row] + chunks.lengths[row]]
        node = spare.nodes[nodes] if nodes < len(spare.nodes) else NONE
        if link_entry(entry, tokens, values[row], window, offsets[row], node, buckets, columns):
            held[row] = 1
            nodes += 1
        join_neighbours(
            entry, name_heads, cohort_heads, names, previous, rows, name_next, cohort_next, prior_sibling, pool
        )
    return ids, nodes


@njit(nogil=True, cache=True)
def _fingerprints(chunks: Chunks, window: int, powers: U32, keep: np.uint32, heads: I32) -> U32:
    """Of each chunk's window that is indexed; their buckets are brought into the cache."""
    tokens, starts, matchable = chunks.tokens, chunks.starts, chunks.matchable
    values = np.zeros(len(starts) + 1, dtype=np.uint32)
    shift = shift_for(len(heads))
    span, width = span_of(window), width_of(window)
    for row in range(len(starts)):
        if matchable[row]:
            start = starts[row] + anchor_of(tokens, starts[row], span)
            values[row] = hash_text(tokens[start : start + width], powers, keep)
    for row in range(len(starts)):
        values[len(starts)] ^= np.uint32(heads[np.int64(values[row]) >> shift])
    return values


@njit(nogil=True, cache=True)
def _fill(entry: int, row: int, chunks: Chunks, space: int, columns: Columns) -> None:
    """A complete row without links; nobody owns it, whoever used its id before."""
    columns.claimed[entry] = 0
    columns.prior_sibling[entry] = NONE
    columns.nodes[entry] = NONE
    columns.prior_same[entry] = NONE
    cells = columns.rows[entry]
    cells[OFFSET] = NONE
    cells[LENGTH] = chunks.lengths[row]
    cells[POSITION] = chunks.positions[row]
    cells[CLASS] = chunks.classes[row]
    cells[DOMAIN] = chunks.domains[row]
    cells[SPACE] = space
    cells[DOCUMENT] = chunks.documents[row]
    cells[BEFORE] = NONE
    cells[FIRST_BEHIND] = NONE
    cells[NEXT_SIBLING] = NONE
    cells[NEXT_SAME] = NONE
    cells[TOKEN_BEFORE] = NO_TOKEN
    cells[TOKEN_BEHIND] = NO_TOKEN
    for word in range(4):
        columns.names[entry, word] = chunks.names[row, word]
        columns.previous[entry, word] = chunks.previous[row, word]


@njit(nogil=True, cache=True)
def own(entries: I64, plane: int, bit: np.uint32, claimed: int, columns: Columns) -> None:
    """From here on readers see the entries. claimed: log position, for an L2 tier's claim; else 0."""
    for entry in entries:
        if entry == NONE:
            continue
        if claimed:
            columns.claimed[entry] = claimed
        set_owners(
            columns.rows, columns.owners, plane, entry, owners_of(columns.rows, columns.owners, plane, entry) | bit
        )


@njit(nogil=True, cache=True)
def disown(entries: I64, plane: int, bit: np.uint32, seen: int, is_tier: bool, live: U32, columns: Columns) -> I64:
    """Takes an owner off entries (NONE: skipped); returns those that nobody has any more.

    seen: log position that a report looked at, 0 if the owner itself says so: a tier's later claim stays.
    """
    orphans = np.empty(len(entries), dtype=np.int64)
    count = 0
    for entry in entries:
        if entry == NONE or owners_of(columns.rows, columns.owners, plane, entry) & bit == np.uint32(0):
            continue
        if is_tier and seen and columns.claimed[entry] > seen:
            continue
        set_owners(
            columns.rows, columns.owners, plane, entry, owners_of(columns.rows, columns.owners, plane, entry) & ~bit
        )
        if not is_alive(entry, live, columns.rows, columns.owners):
            orphans[count] = entry
            count += 1
    return orphans[:count]


@njit(nogil=True, cache=True)
def remove_entries(
    entries: I64, buckets: Buckets, indexes: NameIndexes, columns: Columns, offsets: I64, nodes: I64
) -> tuple[int, int]:
    """Unlinks entries of one space and window class. Fills in pool offsets and index nodes that are free with them
    (once readers have left); returns how many of each."""
    freed_offsets = 0
    freed_nodes = 0
    for entry in entries:
        node = columns.nodes[entry]
        if unlink_entry(entry, buckets, indexes, columns):
            offsets[freed_offsets] = start_of(columns.rows, entry)
            freed_offsets += 1
            if node != NONE:
                nodes[freed_nodes] = node
                freed_nodes += 1
    return freed_offsets, freed_nodes


@njit(nogil=True, cache=True)
def owned(first: int, last: int, plane: int, bit: np.uint32, at_most: int, columns: Columns) -> tuple[I64, int]:
    """Entries in [first, last) that an owner has, at most so many; and where to go on."""
    found = np.empty(at_most, dtype=np.int64)
    count = 0
    entry = first
    while entry < last and count < at_most:
        if owners_of(columns.rows, columns.owners, plane, entry) & bit != np.uint32(0):
            found[count] = entry
            count += 1
        entry += 1
    return found[:count], entry


@njit(nogil=True, cache=True)
def alive(first: int, last: int, live: U32, columns: Columns) -> I64:
    """Entries in [first, last) that somebody has."""
    found = np.empty(max(last - first, 0), dtype=np.int64)
    count = 0
    for entry in range(first, last):
        if is_alive(entry, live, columns.rows, columns.owners):
            found[count] = entry
            count += 1
    return found[:count]


@njit(nogil=True, cache=True)
def are_alive(entries: I64, live: U32, columns: Columns) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(entries), dtype=np.bool_)
    for row in range(len(entries)):
        found[row] = is_alive(entries[row], live, columns.rows, columns.owners)
    return found


@njit(nogil=True, cache=True)
def held_by(entries: I64, plane: int, bit: np.uint32, columns: Columns) -> npt.NDArray[np.bool_]:
    """Which of these entries an owner has."""
    held = np.zeros(len(entries), dtype=np.bool_)
    for row in range(len(entries)):
        held[row] = owners_of(columns.rows, columns.owners, plane, entries[row]) & bit != np.uint32(0)
    return held


_ROW_MIX = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True)
def _mixed(state: np.uint64, value: np.uint64) -> np.uint64:
    state = (state ^ value) * _ROW_MIX
    return np.uint64(state ^ (state >> np.uint64(29)))


@njit(nogil=True, cache=True)
def digest_entries(entries: I64, spaces: U64, documents: U64, owners: U64, columns: Columns) -> tuple[int, int]:
    """A digest of what the entries say, whatever ids they have and in whatever order they come: two 64-bit sums.

    spaces, documents: a digest of each by its number. owners: [words, 32], a digest for each bit, 0 if it is void.
    """
    first = np.uint64(0)
    second = np.uint64(0)
    for entry in entries:
        row = np.uint64(1)
        for part in range(4):
            row = _mixed(row, columns.names[entry, part])
            row = _mixed(row, columns.previous[entry, part])
        facts = np.uint64(columns.rows[entry, DOMAIN]) | (np.uint64(columns.rows[entry, CLASS]) << np.uint64(8))
        row = _mixed(row, facts | (np.uint64(columns.rows[entry, OFFSET] != NONE) << np.uint64(16)))
        row = _mixed(
            row, np.uint64(columns.rows[entry, POSITION]) | (np.uint64(columns.rows[entry, LENGTH]) << np.uint64(32))
        )
        row = _mixed(row, spaces[columns.rows[entry, SPACE]])
        row = _mixed(row, documents[columns.rows[entry, DOCUMENT]])
        row = _mixed(row, np.uint64(columns.claimed[entry]))
        held_by = np.uint64(0)
        for plane in range(len(owners)):
            word = owners_of(columns.rows, columns.owners, plane, entry)
            for bit in range(32):
                if (word >> np.uint32(bit)) & np.uint32(1):
                    held_by += owners[plane, bit]
        row = _mixed(row, held_by)
        if columns.rows[entry, OFFSET] != NONE:
            start = start_of(columns.rows, entry)
            for token in columns.pool[start : start + length_of(columns.rows, entry)]:
                row = _mixed(row, np.uint64(token))
        first += row
        second += _mixed(row, np.uint64(2))
    return int(first), int(second)
