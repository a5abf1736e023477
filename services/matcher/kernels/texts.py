"""The window index of one class of one space: a bit filter, chained buckets, one node for each distinct text.

Readers walk it while it changes: a node is complete before anything leads to it, one that was taken out still leads on,
and none is used again before every reader that could stand on it has left (grace.py).
"""

import numpy as np
from numba import njit

from services.matcher.kernels.compare import agreeing
from services.matcher.kernels.hashing import FINGERPRINT_BITS
from services.matcher.kernels.rows import length_of, start_of
from services.matcher.kernels.types import (
    ENTRY_BITS,
    ENTRY_MASK,
    I32,
    I64,
    LINKS,
    NEXT_SAME,
    NONE,
    OFFSET,
    U32,
    U64,
    WORD,
    Buckets,
    Columns,
)

# The word comes from a fingerprint's upper bits; so that its bits do not depend on these, they are mixed.
FILTER_MIX = np.uint32(0x9E3779B1)
_LINK_BITS = 32
_LOW = np.uint32(31)
_ONE = np.uint32(1)


@njit(nogil=True, cache=True)
def shift_for(size: int) -> int:
    """Right shift that leaves an index into a power-of-two table of `size`, of a fingerprint's upper bits."""
    shift = FINGERPRINT_BITS
    while size > 1:
        size >>= 1
        shift -= 1
    return max(shift, 0)


@njit(nogil=True, cache=True)
def set_bits(bits: U32, value: np.uint32) -> None:
    """Three bits of one word: the filter lets about one unknown window in two hundred pass."""
    mixed = np.uint32(value * FILTER_MIX)
    mask = _ONE << (mixed >> np.uint32(27))
    mask |= _ONE << ((mixed >> np.uint32(22)) & _LOW)
    mask |= _ONE << ((mixed >> np.uint32(17)) & _LOW)
    bits[np.int64(value) >> shift_for(len(bits))] |= np.uint32(mask)


@njit(nogil=True, cache=True)
def next_of(nodes: U64, node: int) -> int:
    """The node behind in its bucket, or NONE."""
    return np.int64(np.int32(np.uint32(nodes[node, LINKS])))


@njit(nogil=True, cache=True)
def _prior_of(nodes: U64, node: int) -> int:
    return np.int64(np.int32(np.uint32(nodes[node, LINKS] >> np.uint64(_LINK_BITS))))


@njit(nogil=True, cache=True)
def _set_links(nodes: U64, node: int, following: int, preceding: int) -> None:
    """One store: a reader sees the old links or the new ones."""
    nodes[node, LINKS] = np.uint64(np.uint32(following)) | (np.uint64(np.uint32(preceding)) << np.uint64(_LINK_BITS))


@njit(nogil=True, cache=True)
def find_text(value: np.uint32, tokens: U32, buckets: Buckets, columns: Columns) -> int:
    """The node of exactly these tokens, or NONE."""
    nodes, rows, pool = buckets.nodes, columns.rows, columns.pool
    size = len(tokens)
    node = np.int64(buckets.heads[np.int64(value) >> shift_for(len(buckets.heads))])
    while node != NONE:
        word = nodes[node, WORD]
        if np.uint32(word >> np.uint64(ENTRY_BITS)) == value:
            entry = np.int64(word & np.uint64(ENTRY_MASK))
            if length_of(rows, entry) == size and agreeing(pool, start_of(rows, entry), tokens, 0, size) == size:
                return int(node)
        node = next_of(nodes, node)
    return NONE


@njit(nogil=True, cache=True)
def _chain_in(node: int, value: np.uint32, heads: I32, nodes: U64, bits: U32) -> None:
    slot = np.int64(value) >> shift_for(len(heads))
    head = np.int64(heads[slot])
    _set_links(nodes, node, head, NONE)
    if head != NONE:
        _set_links(nodes, head, next_of(nodes, head), node)
    set_bits(bits, value)
    heads[slot] = node


@njit(nogil=True, cache=True)
def link_text(node: int, value: np.uint32, entry: int, buckets: Buckets) -> None:
    """A new text, held by `entry` alone."""
    buckets.nodes[node, WORD] = (np.uint64(value) << np.uint64(ENTRY_BITS)) | np.uint64(entry)
    _chain_in(node, value, buckets.heads, buckets.nodes, buckets.bits)


@njit(nogil=True, cache=True)
def unlink_text(node: int, buckets: Buckets) -> None:
    """Takes a node out; its own links stay, for readers that stand on it. Filter bits stay set: others may share
    them."""
    nodes = buckets.nodes
    following = next_of(nodes, node)
    preceding = _prior_of(nodes, node)
    if following != NONE:
        _set_links(nodes, following, next_of(nodes, following), preceding)
    if preceding != NONE:
        _set_links(nodes, preceding, following, _prior_of(nodes, preceding))
    else:
        value = np.int64(nodes[node, WORD] >> np.uint64(ENTRY_BITS))
        buckets.heads[value >> shift_for(len(buckets.heads))] = following


@njit(nogil=True, cache=True)
def share_text(entry: int, first: int, columns: Columns) -> None:
    """Puts an entry behind the first one of its text."""
    following = columns.rows[first, NEXT_SAME]
    columns.rows[entry, NEXT_SAME] = following
    columns.prior_same[entry] = first
    if following != NONE:
        columns.prior_same[following] = entry
    columns.rows[first, NEXT_SAME] = entry


@njit(nogil=True, cache=True)
def leave_text(entry: int, buckets: Buckets, columns: Columns) -> bool:
    """Takes an entry off its text; true if it was the last one: then the node is taken out, too."""
    node = columns.nodes[entry]
    following = columns.rows[entry, NEXT_SAME]
    preceding = columns.prior_same[entry]
    if following == NONE and preceding == NONE:
        unlink_text(node, buckets)
        return True
    if following != NONE:
        columns.prior_same[following] = preceding
    if preceding != NONE:
        columns.rows[preceding, NEXT_SAME] = following
    else:
        fingerprint = (buckets.nodes[node, WORD] >> np.uint64(ENTRY_BITS)) << np.uint64(ENTRY_BITS)
        buckets.nodes[node, WORD] = fingerprint | np.uint64(following)
    return False


@njit(nogil=True, cache=True)
def rebuild(old: Buckets, new: Buckets, columns: Columns) -> int:
    """Links every text of `old` into the empty `new`, under new node numbers; returns how many there are."""
    count = 0
    for head in old.heads:
        node = np.int64(head)
        while node != NONE:
            word = old.nodes[node, WORD]
            entry = np.int64(word & np.uint64(ENTRY_MASK))
            new.nodes[count, WORD] = word
            _chain_in(count, np.uint32(word >> np.uint64(ENTRY_BITS)), new.heads, new.nodes, new.bits)
            while entry != NONE:
                columns.nodes[entry] = count
                entry = np.int64(columns.rows[entry, NEXT_SAME])
            count += 1
            node = next_of(old.nodes, node)
    return count


@njit(nogil=True, cache=True)
def gather_tokens(entries: I64, columns: Columns) -> U32:
    """The tokens of all these entries, one after another; of those whose tokens are not kept, none."""
    total = 0
    for entry in entries:
        if columns.rows[entry, OFFSET] != NONE:
            total += length_of(columns.rows, entry)
    tokens = np.empty(total, dtype=np.uint32)
    end = 0
    for entry in entries:
        if columns.rows[entry, OFFSET] != NONE:
            length = length_of(columns.rows, entry)
            start = start_of(columns.rows, entry)
            tokens[end : end + length] = columns.pool[start : start + length]
            end += length
    return tokens
