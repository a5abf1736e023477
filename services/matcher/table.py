"""One space's stored chunks: tokens, places, owners, neighbours and the fingerprint indexes over them.

Not thread-safe: `spaces.Space` guards it, many readers or one writer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.tokens import TokenArray
from services.matcher.columns import empty_columns, grown, with_owner_words, with_pool
from services.matcher.kernels import I64, NONE, U64, Columns, Reader, fingerprint
from services.matcher.window_index import WindowIndex

# Window classes below a full chunk: an entry is indexed in the largest that fits into it.
LADDER = (16, 32, 64, 128)
_WORD = 64


class ChunkName(NamedTuple):
    domain: pb.Domain
    chain_hash: bytes


class OwnerName(NamedTuple):
    """A store by its name, or an L2 tier by its id."""

    kind: int
    name: str


class Said(NamedTuple):
    """Where an owner's claim was made: which stream of which store (a number of this process), and its sequence there.

    Sequences of different streams cannot be compared.
    """

    stream: int
    sequence: int


@dataclass(slots=True)
class Entry:
    """A stored chunk. `owners`: who has it, and who said so."""

    id: int
    name: ChunkName
    previous: ChunkName
    length: int
    stored_position: int
    context_class: pb.ContextClass
    document: str
    matchable: bool
    window: int
    owners: dict[OwnerName, Said] = field(default_factory=dict)


@dataclass(frozen=True)
class Hashing:
    """The process's random bases, [2], and a mask that tests make small to force collisions."""

    bases: I64
    keep: np.uint64


class _Owners:
    """Which bit stands for which owner. A bit is given again only when nothing is owned under it."""

    def __init__(self) -> None:
        self.bits: dict[OwnerName, int] = {}
        self._counts: dict[OwnerName, int] = {}
        self._free: list[int] = []

    def take(self, owner: OwnerName) -> int:
        if owner not in self.bits:
            self.bits[owner] = self._free.pop() if self._free else len(self.bits)
            self._counts[owner] = 0
        self._counts[owner] += 1
        return self.bits[owner]

    def release(self, owner: OwnerName) -> int:
        bit = self.bits[owner]
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner], self.bits[owner]
            self._free.append(bit)
        return bit


class Table:
    def __init__(self, hashing: Hashing, chunk_tokens: int) -> None:
        self.hashing = hashing
        self.chunk_tokens = chunk_tokens
        self.by_name: dict[ChunkName, Entry] = {}
        self.by_id: dict[int, Entry] = {}
        self.windows: dict[int, WindowIndex] = {}
        self.tokens = 0
        self.columns: Columns = empty_columns(chunk_tokens)
        # Matchable entries behind a chunk that may not be there (yet).
        self._behind: dict[ChunkName, dict[int, Entry]] = {}
        self._owners = _Owners()
        self._pool_end = 0
        self._free_pool: dict[int, list[int]] = {}
        self._free_ids: list[int] = []

    @property
    def bytes(self) -> int:
        """Of the arrays, without Python's own objects."""
        return sum(array.nbytes for array in self.columns) + sum(index.bytes for index in self.windows.values())

    @property
    def owners(self) -> list[OwnerName]:
        """Everybody who owns something here."""
        return sorted(self._owners.bits)

    def reader(self, owners: Iterable[OwnerName], context_classes: Iterable[int]) -> Reader:
        """What kernels need to know of who asks; of owners that own nothing here there is no trace."""
        mask: U64 = np.zeros(self.columns.owners.shape[1], dtype=np.uint64)
        for owner in owners:
            bit = self._owners.bits.get(owner)
            if bit is not None:
                mask[bit // _WORD] |= np.uint64(1 << bit % _WORD)
        return Reader(mask, sum(1 << context_class for context_class in set(context_classes)))

    def owned_by(self, owner: OwnerName, at_most: int) -> list[Entry]:
        bit = self._owners.bits.get(owner)
        if bit is None:
            return []
        held = self.columns.owners[:, bit // _WORD] & np.uint64(1 << bit % _WORD)
        return [self.by_id[entry] for entry in np.flatnonzero(held)[:at_most].tolist()]

    def add(self, added: matcher_pb2.ChunkAdded, tokens: TokenArray, owner: OwnerName, said: Said) -> Entry:
        """Adds an owner to a chunk, and the chunk itself if it is new."""
        name = ChunkName(added.domain, added.chain_hash)
        entry = self.by_name.get(name)
        if entry is None:
            entry = self._insert(name, added, tokens)
        elif added.context_class < entry.context_class:
            entry.context_class = added.context_class
            self.columns.classes[entry.id] = added.context_class
        if owner not in entry.owners:
            self._mark(entry, owner)
        entry.owners[owner] = said
        return entry

    def drop_owner(self, entry: Entry, owner: OwnerName) -> None:
        """Removes one owner; with the last one the entry goes."""
        if entry.owners.pop(owner, None) is None:
            return
        bit = self._owners.release(owner)
        self.columns.owners[entry.id, bit // _WORD] &= np.uint64(~(1 << bit % _WORD) & (1 << _WORD) - 1)
        if not entry.owners:
            self._delete(entry)

    def _mark(self, entry: Entry, owner: OwnerName) -> None:
        bit = self._owners.take(owner)
        if bit // _WORD == self.columns.owners.shape[1]:
            self.columns = with_owner_words(self.columns, 2 * self.columns.owners.shape[1])
        self.columns.owners[entry.id, bit // _WORD] |= np.uint64(1 << bit % _WORD)

    def _insert(self, name: ChunkName, added: matcher_pb2.ChunkAdded, tokens: TokenArray) -> Entry:
        entry = Entry(
            id=self._take_id(),
            name=name,
            previous=ChunkName(added.domain, added.previous_hash),
            length=len(tokens),
            stored_position=added.stored_position,
            context_class=added.context_class,
            document=added.document,
            matchable=added.matchable and added.domain != pb.DOMAIN_BLENDED,
            window=self._window_of(len(tokens)),
        )
        offset = self._take_pool(len(tokens))
        columns = self.columns
        columns.pool[offset : offset + len(tokens)] = tokens
        columns.offsets[entry.id] = offset
        columns.lengths[entry.id] = len(tokens)
        columns.classes[entry.id] = added.context_class
        columns.owners[entry.id] = 0
        for link in (columns.before, columns.first_behind, columns.next_sibling, columns.prior_sibling):
            link[entry.id] = NONE
        self.by_name[name] = self.by_id[entry.id] = entry
        self.tokens += len(tokens)
        if entry.matchable:
            self._join_neighbours(entry)
            if entry.window:
                value = fingerprint(columns.pool[offset : offset + entry.window], self.hashing.bases, self.hashing.keep)
                columns.fingerprints[entry.id] = value
                self.windows.setdefault(entry.window, WindowIndex()).add(entry.id, columns)
        return entry

    def _delete(self, entry: Entry) -> None:
        if entry.matchable:
            self._part_from_neighbours(entry)
            if entry.window:
                index = self.windows[entry.window]
                index.remove(entry.id, self.columns)
                if not index.count:
                    del self.windows[entry.window]
        del self.by_name[entry.name], self.by_id[entry.id]
        self.tokens -= entry.length
        self._free_ids.append(entry.id)
        self._free_pool.setdefault(entry.length, []).append(int(self.columns.offsets[entry.id]))

    def _join_neighbours(self, entry: Entry) -> None:
        before = self.by_name.get(entry.previous)
        if before is not None and before.matchable and _is_behind(entry, before):
            self._link(before.id, entry.id)
        for behind in self._behind.get(entry.name, {}).values():
            if _is_behind(behind, entry):
                self._link(entry.id, behind.id)
        self._behind.setdefault(entry.previous, {})[entry.id] = entry

    def _link(self, before: int, behind: int) -> None:
        columns = self.columns
        sibling = columns.first_behind[before]
        columns.before[behind] = before
        columns.next_sibling[behind] = sibling
        columns.prior_sibling[behind] = NONE
        if sibling != NONE:
            columns.prior_sibling[sibling] = behind
        columns.first_behind[before] = behind

    def _part_from_neighbours(self, entry: Entry) -> None:
        columns = self.columns
        siblings = self._behind[entry.previous]
        del siblings[entry.id]
        if not siblings:
            del self._behind[entry.previous]
        before, following = columns.before[entry.id], columns.next_sibling[entry.id]
        preceding = columns.prior_sibling[entry.id]
        if following != NONE:
            columns.prior_sibling[following] = preceding
        if preceding != NONE:
            columns.next_sibling[preceding] = following
        elif before != NONE:
            columns.first_behind[before] = following
        for behind in self._behind.get(entry.name, {}):
            if columns.before[behind] == entry.id:
                columns.before[behind] = columns.next_sibling[behind] = columns.prior_sibling[behind] = NONE

    def _window_of(self, length: int) -> int:
        """0: too short to be found by itself."""
        classes = (*(window for window in LADDER if window < self.chunk_tokens), self.chunk_tokens)
        return max((window for window in classes if window <= length), default=0)

    def _take_id(self) -> int:
        if self._free_ids:
            return self._free_ids.pop()
        identifier = len(self.by_id)
        if identifier == len(self.columns.offsets):
            self.columns = grown(self.columns)
        return identifier

    def _take_pool(self, length: int) -> int:
        free = self._free_pool.get(length)
        if free:
            return free.pop()
        offset = self._pool_end
        self._pool_end += length
        if self._pool_end > len(self.columns.pool):
            self.columns = with_pool(self.columns, max(2 * len(self.columns.pool), self._pool_end))
        return offset


def _is_behind(entry: Entry, before: Entry) -> bool:
    """Chunks of one chain at other stored positions (the same text held twice) would break a run's one shift."""
    return entry.stored_position == before.stored_position + before.length
