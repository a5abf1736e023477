"""The arrays that kernels work on."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NONE = -1

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

# An occurrence's key: position << 32 | entry.
ENTRY_BITS = 32
ENTRY_MASK = (1 << ENTRY_BITS) - 1


# Columns of a row. A row is one cache line: all that a reader needs of an entry and to judge its neighbours.
OFFSET, LENGTH, POSITION, CLASS, DOMAIN, TOUCHED, SPACE, DOCUMENT = range(8)
BEFORE, FIRST_BEHIND, NEXT_SIBLING, NEXT_SAME, TOKEN_BEFORE, TOKEN_BEHIND, OWNERS = range(8, 15)
ROW = 16
# Words of owners that lie in the row; each has a bit for 32 of them.
ROW_PLANES = 2
# Unit of OFFSET: tokens of one slot of the pool.
SLOT_TOKENS = 16
# TOKEN_BEFORE, TOKEN_BEHIND: nothing there; any token may be there.
NO_TOKEN = -1
ANY_TOKEN = -2


class Columns(NamedTuple):
    """All entries of the table, by id; their tokens lie in `pool`. Links are ids, NONE where there is none.

    rows: [entries, ROW]:
      OFFSET: into the pool, in slots; NONE: not matchable, its tokens are not kept. Entries of one space with the same
      tokens share them: they are linked by NEXT_SAME and prior_same behind one node of the space's window index.
      BEFORE: the entry that this one continues, at the position where that ends; TOKEN_BEFORE: its last token.
      FIRST_BEHIND: the leader of the cohort that names this entry as previous. A **cohort** is all matchable entries
      of one domain with the same `previous`: linked by NEXT_SIBLING and prior_sibling behind its leader. TOKEN_BEHIND:
      the first token of the one entry that continues this one; ANY_TOKEN if several do. These tokens only save a
      look at the neighbour; they may be stale.
      TOUCHED: second of the last match.
      OWNERS and the next: the first words of owners; the other words are in `owners`, [words, entries].
    names, previous: [entries, 4], the 32-byte chain hashes of a chunk and of the one before it.
    name_next, cohort_next: bucket chains of the two name indexes (of entries; of cohort leaders).
    nodes: of each entry's text in its window index. windows: the class of that index; 0: too short to be found
    by itself. claimed: log position of the last claim by an L2 tier.
    """

    pool: U32
    rows: I32
    owners: U32
    names: U64
    previous: U64
    name_next: I32
    cohort_next: I32
    prior_sibling: I32
    prior_same: I32
    nodes: I32
    windows: U16
    claimed: I64


class ReaderColumns(NamedTuple):
    """What matching needs of `Columns`: each array that a kernel is given costs its caller some time."""

    pool: U32
    rows: I32
    owners: U32


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only view. Kernels are compiled for read-only and for writable arrays apart: each argument is always one
    of the two."""
    view = array.view()
    view.flags.writeable = False
    return view


class NameIndexes(NamedTuple):
    """Bucket heads, powers of two long: entries by (domain, name), cohort leaders by (domain, previous)."""

    names: I32
    cohorts: I32


# Columns of `Buckets.nodes`.
WORD, LINKS = 0, 1


class Buckets(NamedTuple):
    """Fingerprints of one window class of one space. A node is one distinct text.

    bits: filter words. heads: bucket -> first node. nodes: [nodes, 2]; fingerprint << 32 | first entry with this text,
    and the neighbours in the bucket (texts.py): what a reader needs of a node lies in one place.
    """

    bits: U32
    heads: I32
    nodes: U64


class Hashing(NamedTuple):
    """Powers of the process's random base and of its inverse modulo the prime. `keep`: mask over fingerprints."""

    powers: U32
    inverses: U32
    keep: np.uint32


# Who asks. ALLOWED: a bit for each context class that may serve. HOLDERS and the next: bits of the owners that can, in
# the words of owners that lie in rows; from OTHERS on pairs: number of another word, bits in it.
Reader = U32
ALLOWED, HOLDERS = 0, 1
OTHERS = HOLDERS + ROW_PLANES


class Output(NamedTuple):
    """Pairs found, [capacity] each: position << 32 | entry, and how many of the entry's tokens stand there.

    counts: [pairs, candidates, verified, why the scan stopped].
    """

    keys: I64
    agreed: I32
    counts: I64


class Links(NamedTuple):
    """Occurrences joined to runs, [occurrences]: parent is the occurrence before, NONE at a run's first.

    starts: query position where the run through this occurrence begins; NONE if the reader may not have it.
    befores: at a run's first, the entry before it whose end the run begins with, or NONE.
    classes: the worst context class from there to here.
    """

    parents: I32
    starts: I64
    befores: I32
    classes: U8


class RawRuns(NamedTuple):
    """The longest runs, [runs]: query range, last whole occurrence, chunk behind it that goes on (or NONE), class."""

    starts: I64
    ends: I64
    leaves: I32
    tails: I32
    classes: U8


class Slots(NamedTuple):
    """State of a slab allocator (slots.py). By slab: slot size, slots in use, free slots on its stack, neighbours
    in the list of slabs with room. By size: that list's head. stacks: [slabs, slots].

    totals: [slabs ever begun, slabs on the free stack, slabs with something in them].
    """

    sizes: I32
    used: I32
    free: I32
    next_slab: I32
    prior_slab: I32
    open_slabs: I32
    stacks: U16
    free_slabs: I32
    totals: I64
