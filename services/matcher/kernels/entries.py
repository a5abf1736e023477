"""Entries come and go: names, texts, neighbours, owners. Only the table's one writer runs these.

Readers look at entries meanwhile. They take none for real that has no owner, and owners are set last, by a call of
their own (`own`); links are set when what they lead to is complete, and an entry that goes keeps its own links.
"""

import numpy as np
from numba import njit

from services.matcher.kernels.rows import length_of, owners_of, set_owners, start_of
from services.matcher.kernels.texts import find_text, leave_text, link_text, share_text
from services.matcher.kernels.types import (
    ANY_TOKEN,
    BEFORE,
    DOMAIN,
    ENTRY_MASK,
    FIRST_BEHIND,
    I32,
    I64,
    NEXT_SIBLING,
    NO_TOKEN,
    NONE,
    OFFSET,
    POSITION,
    ROW_PLANES,
    SLOT_TOKENS,
    SPACE,
    TOKEN_BEFORE,
    TOKEN_BEHIND,
    U8,
    U32,
    U64,
    WORD,
    Buckets,
    Columns,
    NameIndexes,
)

_MIX = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True)
def _slot(names: U64, row: int, space: int, domain: int, size: int) -> int:
    """Bucket of a hash: its bytes are evenly spread already, save in tests."""
    mixed = (names[row, 0] ^ (names[row, 1] << np.uint64(1)) ^ np.uint64(4 * space + domain)) * _MIX
    return np.int64((mixed >> np.uint64(20)) & np.uint64(size - 1))


@njit(nogil=True, cache=True)
def _same(left: U64, row: int, right: U64, other: int) -> bool:
    return (
        left[row, 0] == right[other, 0]
        and left[row, 1] == right[other, 1]
        and left[row, 2] == right[other, 2]
        and left[row, 3] == right[other, 3]
    )


@njit(nogil=True, cache=True)
def find_entry(
    names: U64, row: int, space: int, domain: int, heads: I32, hashes: U64, rows: I32, following: I32
) -> int:
    """The space's entry that goes by names[row], or NONE.

    By its own name, in the index of names; or by the name before it, in the index of cohort leaders. hashes: those.
    """
    entry = heads[_slot(names, row, space, domain, len(heads))]
    while entry != NONE:
        if _same(hashes, entry, names, row) and rows[entry, DOMAIN] == domain and rows[entry, SPACE] == space:
            return int(entry)
        entry = following[entry]
    return NONE


@njit(nogil=True, cache=True)
def fetch_heads(names: U64, previous: U64, space: int, domains: U8, name_heads: I32, cohort_heads: I32) -> int:
    """Brings the buckets that new chunks will be looked for in into the cache, all at a time.

    Returns something that depends on them, so that it is not compiled away.
    """
    seen = 0
    for row in range(len(names)):
        own = _slot(names, row, space, domains[row], len(name_heads))
        before = _slot(previous, row, space, domains[row], len(name_heads))
        seen ^= name_heads[own] ^ name_heads[before] ^ cohort_heads[own] ^ cohort_heads[before]
    return seen


@njit(nogil=True, cache=True)
def find_entries(names: U64, space: int, domain: int, indexes: NameIndexes, columns: Columns) -> I64:
    heads, known, rows, name_next = indexes.names, columns.names, columns.rows, columns.name_next
    found = np.empty(len(names), dtype=np.int64)
    for row in range(len(names)):
        found[row] = find_entry(names, row, space, domain, heads, known, rows, name_next)
    return found


@njit(nogil=True, cache=True)
def chain_in(entry: int, heads: I32, hashes: U64, rows: I32, following: I32) -> None:
    """Into the bucket of its name, or of its `previous`: as `hashes` has them."""
    slot = _slot(hashes, entry, rows[entry, SPACE], rows[entry, DOMAIN], len(heads))
    following[entry] = heads[slot]
    heads[slot] = entry


@njit(nogil=True, cache=True)
def chain_out(entry: int, heads: I32, hashes: U64, rows: I32, following: I32, instead: int) -> None:
    """Out of its bucket, where `instead` takes its place; NONE: nobody does."""
    behind = following[entry]
    if instead != NONE:
        following[instead] = behind
        behind = np.int32(instead)
    slot = _slot(hashes, entry, rows[entry, SPACE], rows[entry, DOMAIN], len(heads))
    other = heads[slot]
    if other == entry:
        heads[slot] = behind
        return
    while following[other] != entry:
        other = following[other]
    following[other] = behind


@njit(nogil=True, cache=True)
def _ends_where(rows: I32, before: int, entry: int) -> bool:
    """Chunks of one chain at other stored positions (the same text held twice) would break a run's one shift."""
    return np.int64(rows[before, POSITION]) + length_of(rows, before) == np.int64(rows[entry, POSITION])


@njit(nogil=True, cache=True)
def _follow(before: int, entry: int, rows: I32, pool: U32) -> None:
    """`entry` continues `before`."""
    rows[entry, TOKEN_BEFORE] = np.int32(pool[start_of(rows, before) + length_of(rows, before) - 1])
    rows[entry, BEFORE] = before
    known = np.int64(rows[before, TOKEN_BEHIND])
    token = np.int64(np.int32(pool[start_of(rows, entry)]))
    # Of two, or of one that does not fit, there is no telling.
    if token < 0 or (known != NO_TOKEN and known != token):
        token = ANY_TOKEN
    rows[before, TOKEN_BEHIND] = token


@njit(nogil=True, cache=True)
def join_neighbours(
    entry: int, name_heads: I32, cohort_heads: I32, names: U64, previous: U64, rows: I32, name_next: I32,
    cohort_next: I32, prior_sibling: I32, pool: U32,
) -> None:  # fmt: skip
    """Links a matchable entry with the one before it and with those behind it."""
    space, domain = rows[entry, SPACE], rows[entry, DOMAIN]
    before = find_entry(previous, entry, space, domain, name_heads, names, rows, name_next)
    if before != NONE and rows[before, OFFSET] == NONE:
        before = NONE
    if before != NONE and _ends_where(rows, before, entry):
        _follow(before, entry, rows, pool)
    leader = find_entry(previous, entry, space, domain, cohort_heads, previous, rows, cohort_next)
    if leader == NONE:
        chain_in(entry, cohort_heads, previous, rows, cohort_next)
        if before != NONE:
            rows[before, FIRST_BEHIND] = entry
    else:
        following = rows[leader, NEXT_SIBLING]
        rows[entry, NEXT_SIBLING] = following
        prior_sibling[entry] = leader
        if following != NONE:
            prior_sibling[following] = entry
        rows[leader, NEXT_SIBLING] = entry
    behind = find_entry(names, entry, space, domain, cohort_heads, previous, rows, cohort_next)
    rows[entry, FIRST_BEHIND] = behind
    while behind != NONE:
        if _ends_where(rows, entry, behind):
            _follow(entry, behind, rows, pool)
        behind = rows[behind, NEXT_SIBLING]


@njit(nogil=True, cache=True)
def _part_from_neighbours(entry: int, indexes: NameIndexes, columns: Columns) -> None:
    rows, prior_sibling = columns.rows, columns.prior_sibling
    behind = rows[entry, FIRST_BEHIND]
    while behind != NONE:
        if rows[behind, BEFORE] == entry:
            rows[behind, BEFORE] = NONE
        behind = rows[behind, NEXT_SIBLING]
    following = rows[entry, NEXT_SIBLING]
    preceding = prior_sibling[entry]
    if following != NONE:
        prior_sibling[following] = preceding
    if preceding != NONE:
        rows[preceding, NEXT_SIBLING] = following
        return
    chain_out(entry, indexes.cohorts, columns.previous, rows, columns.cohort_next, following)
    before = find_entry(
        columns.previous, entry, rows[entry, SPACE], rows[entry, DOMAIN], indexes.names, columns.names, rows,
        columns.name_next,
    )  # fmt: skip
    if before != NONE and rows[before, OFFSET] != NONE:
        rows[before, FIRST_BEHIND] = following


@njit(nogil=True, cache=True)
def is_alive(entry: int, live: U32, rows: I32, owners: U32) -> bool:
    """Whether an owner that has not been voided has the entry. live: a mask for each word."""
    for plane in range(len(live)):  # noqa: SIM110 -- compiled: a generator would be slower
        if owners_of(rows, owners, plane, entry) & live[plane] != np.uint32(0):
            return True
    return False


@njit(nogil=True, cache=True)
def link_entry(
    entry: int, tokens: U32, value: np.uint32, window: int, offset: int, node: int, buckets: Buckets, columns: Columns
) -> bool:
    """Gives a new matchable entry its text. window 0: too short to be found by itself; value: its fingerprint.

    `offset`, `node`: free ones, for tokens that are not there yet; returns whether they were used.
    """
    if window:
        known = find_text(value, tokens, buckets, columns)
        if known != NONE:
            first = np.int64(buckets.nodes[known, WORD] & np.uint64(ENTRY_MASK))
            columns.rows[entry, OFFSET] = columns.rows[first, OFFSET]
            columns.nodes[entry] = known
            share_text(entry, first, columns)
            return False
    pool = columns.pool[offset : offset + len(tokens)]
    for index in range(len(tokens)):
        pool[index] = tokens[index]
    columns.rows[entry, OFFSET] = offset // SLOT_TOKENS
    if window:
        columns.nodes[entry] = node
        link_text(node, value, entry, buckets)
    return True


@njit(nogil=True, cache=True)
def unlink_entry(entry: int, buckets: Buckets, indexes: NameIndexes, columns: Columns) -> bool:
    """Takes an entry out of everything; true if its tokens (and its node) are nobody's any more."""
    rows, owners = columns.rows, columns.owners
    chain_out(entry, indexes.names, columns.names, rows, columns.name_next, NONE)
    for plane in range(ROW_PLANES + len(owners)):
        if owners_of(rows, owners, plane, entry) != np.uint32(0):
            set_owners(rows, owners, plane, entry, np.uint32(0))
    if rows[entry, OFFSET] == NONE:
        return False
    _part_from_neighbours(entry, indexes, columns)
    if columns.nodes[entry] == NONE:
        return True
    return leave_text(entry, buckets, columns)


@njit(nogil=True, cache=True)
def _rehash(old: I32, new: I32, hashes: U64, rows: I32, following: I32) -> None:
    for head in old:
        entry = head
        while entry != NONE:
            behind = following[entry]
            chain_in(entry, new, hashes, rows, following)
            entry = behind


@njit(nogil=True, cache=True)
def relink_names(old: NameIndexes, new: NameIndexes, columns: Columns) -> None:
    """Moves both name indexes into larger or smaller ones. Only the writer and `Score` (under its lock) use them."""
    _rehash(old.names, new.names, columns.names, columns.rows, columns.name_next)
    _rehash(old.cohorts, new.cohorts, columns.previous, columns.rows, columns.cohort_next)
