"""The fingerprint table of all spaces: entries as columns, texts in a pool, indexes by window and by name.

One writer, any number of readers, and no reader ever waits for the writer or makes it wait. What a reader needs is
reached through arrays that never move (reservation.py) or are replaced as a whole (window_index.py); entries are
linked when they are complete and get their owners last; what is unlinked is used again only after a grace period
(grace.py). So a reader sees every entry that was there before it came and is there when it leaves, none that was gone
before it came, and never tokens of one entry under the name of another. (On x86 stores become visible in program
order; kernels that make an entry and the one that gives it its owner are separate calls.)

Methods that change the table, and those that look things up by name, take `lock`; matching does not.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError
from services.matcher import entry_columns
from services.matcher.documents import Documents
from services.matcher.entry_columns import EntryColumns
from services.matcher.grace import Grace
from services.matcher.kernels import batches
from services.matcher.kernels.batches import Added, Chunks, Spare
from services.matcher.kernels.entries import find_entries, relink_names
from services.matcher.kernels.hashing import random_hashing
from services.matcher.kernels.types import (
    DOCUMENT,
    I32,
    I64,
    LENGTH,
    NONE,
    OWNERS,
    ROW_PLANES,
    SLOT_TOKENS,
    SPACE,
    TOUCHED,
    U8,
    U32,
    U64,
    Buckets,
    Hashing,
    NameIndexes,
    Reader,
    ReaderColumns,
    frozen,
)
from services.matcher.owners import OwnerName, Owners
from services.matcher.slabs import Slabs
from services.matcher.window_index import NO_BUCKETS, WindowIndex

# Window classes below a full chunk: an entry is indexed in the largest that fits into it.
LADDER = (16, 32, 64, 128)
_CLASSES = len(LADDER) + 1
_SMALLEST_NAMES = 1024
# Entries voided, cleared or evicted at a time, and entries looked at for that: about a millisecond.
_AT_ONCE = 2048
_LOOK_AT = 1 << 18
# For calls that are inside to end, where nothing else helps.
_WAIT_FOR_READERS = 10.0
# Over its limit the table drops entries down to this share of it.
_EVICT_TO = 0.95
_EVICTIONS_AT_ONCE = 4


@dataclass
class Space:
    """One space's share of the table. Indexes by window class; None where nothing is in it."""

    space_id: bytes
    number: int
    chunk_tokens: int
    tenant: str
    windows: tuple[int, ...]
    indexes: list[WindowIndex | None]
    chunks: int = 0
    tokens: int = 0

    def view(self) -> tuple[tuple[int, ...], tuple[Buckets, ...]]:
        """Windows in use (0: not) and their buckets, for a scan."""
        indexes = list(self.indexes)
        windows = tuple(window if index else 0 for window, index in zip(self.windows, indexes, strict=True))
        return windows, tuple(index.buckets if index else NO_BUCKETS for index in indexes)


@dataclass(frozen=True)
class Batch:
    """N chunks of one space, as columns: names and previous [N, 4] (32-byte hashes as four u64), the others [N].

    tokens: of all chunks, one after another; none for chunks that are not matchable. documents: a name for all
    (str), or numbers of this table's documents.
    """

    space_id: bytes
    chunk_tokens: int
    tenant: str
    names: U64
    previous: U64
    positions: U32
    lengths: U32
    tokens: U32
    domains: U8
    classes: U8
    matchable: U8
    documents: str | I32

    def __len__(self) -> int:
        return len(self.lengths)


class Watcher(Protocol):
    """Whoever takes a picture of the table (capture.py). Called with the lock held."""

    def before_change(self, entries: I64) -> None: ...

    def leave_out(self, entries: I64) -> None: ...


def windows_for(chunk_tokens: int) -> tuple[int, ...]:
    """Window classes of a space, ascending, padded in front with zeros to a fixed number."""
    classes = (*(window for window in LADDER if window < chunk_tokens), chunk_tokens)
    return (0,) * (_CLASSES - len(classes)) + classes


class Table:
    def __init__(self, memory_limit_bytes: int, hashing: Hashing | None = None) -> None:
        """`memory_limit_bytes`: over it, least recently matched entries are dropped."""
        self.memory_limit_bytes = memory_limit_bytes
        self.hashing = hashing or random_hashing()
        self.lock = threading.RLock()
        self.grace = Grace()
        self.owners = Owners()
        self.documents = Documents()
        self.spaces: dict[bytes, Space] = {}
        self.evicted = 0
        self.watcher: Watcher | None = None
        self.numbered: list[Space | None] = []
        self._store = EntryColumns(memory_limit_bytes)
        self._ids: Slabs = self._store.ids
        self._pool: Slabs = self._store.pool
        self._fit_planes()
        self.chunks = 0
        self._names = _name_indexes(_SMALLEST_NAMES)
        # Where the search for entries of a voided owner goes on.
        self._sweep_at = 0
        # Bytes of what was removed, but waits for readers to leave.
        self._leaving = 0

    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """`lock`, for calls: the writer may have it for some time.

        Raises KvblendError DEADLINE_EXCEEDED if it cannot be had within `timeout` seconds.
        """
        if not self.lock.acquire(timeout=max(0.0, timeout)):
            raise KvblendError("DEADLINE_EXCEEDED", "the table was being changed for all of the call's time")
        try:
            yield
        finally:
            self.lock.release()

    # Reading.

    def reader(self, owners: Iterable[OwnerName], context_classes: Iterable[int]) -> Reader:
        """What kernels need to know of who asks; owners that own nothing leave no trace."""
        masks: dict[int, int] = {}
        for bit in filter(None, map(self.owners.find, owners)):
            masks[bit.plane] = masks.get(bit.plane, 0) | int(bit.mask)
        words = [sum(1 << context_class for context_class in set(context_classes))]
        words += [masks.pop(plane, 0) for plane in range(ROW_PLANES)]
        return np.array([*words, *chain.from_iterable(masks.items())], dtype=np.uint32)

    @property
    def now(self) -> int:
        """The second by which entries are found to be matched less recently than others."""
        return int(time.monotonic())

    def find(self, space: Space, domain: int, names: U64) -> I64:
        """Entries by their names [N, 4], NONE where there is none. Needs the lock."""
        entries: I64 = find_entries(frozen(names), space.number, domain, self._names, self.columns)
        return entries

    @property
    def size(self) -> int:
        """Bytes of everything that grows with what is held."""
        indexes = sum(index.bytes for space in list(self.spaces.values()) for index in space.indexes if index)
        names = self._names.names.nbytes + self._names.cohorts.nbytes
        entries = self._ids.used * entry_columns.bytes_per_entry(self.owners.planes) - self._leaving
        return (
            entries + 4 * self._pool.used + self._ids.bytes + self._pool.bytes + indexes + names + self.documents.bytes
        )

    # Writing.

    def add(self, batch: Batch, owner: OwnerName, position: int) -> None:
        """Adds an owner to chunks, and chunks that are new. `position`: of the log, where the owner says so.

        Raises KvblendError OVERLOADED if there are too many owners; then nothing has changed.
        """
        if not len(batch):
            return
        with self.lock:
            self._make_room_for(owner)
            self.owners.take(owner)
            self.own(self.insert(batch), owner, position if owner.kind == matcher_pb2.OWNER_KIND_L2 else 0)
            self.settle()

    def _make_room_for(self, owner: OwnerName) -> None:
        """Where all bits are taken: gets back those of voided owners, and of owners that have nothing.

        So whether an owner finds room depends on what the log says, not on when this replica found the time to sweep.
        """
        if self.owners.has_room(owner):
            return
        words = [np.bitwise_or.reduce(self.columns.rows[: self._ids.begun, OWNERS + plane]) for plane in (0, 1)]
        words += [np.bitwise_or.reduce(plane[: self._ids.begun]) for plane in self.columns.owners]
        for idle, bit in self.owners.items():
            if not int(words[bit.plane]) & int(bit.mask):
                self.grace.retire(self.owners.forget(idle))
        give_up_at = time.monotonic() + _WAIT_FOR_READERS
        while not self.owners.has_room(owner) and (self.sweep() or self.grace.pending):
            if time.monotonic() > give_up_at:
                return
            self.grace.collect()
            time.sleep(0)

    def own(self, entries: I64, owner: OwnerName, claimed: int = 0) -> None:
        """Gives entries (NONE: skipped) an owner. `claimed`: log position of an L2 tier's claim; 0: as it was.

        Needs the lock.
        """
        bit = self.owners.take(owner)
        if self.owners.planes > ROW_PLANES + len(self.columns.owners):
            self._fit_planes()
        batches.own(entries, bit.plane, bit.mask, claimed, self.columns)

    def insert(self, batch: Batch) -> I64:
        """The entry of each chunk, [N], NONE where there is no room. Needs the lock.

        New entries have no owners yet: nobody sees them, and they must get some.
        """
        self._remove_void(self._space_for(batch), batch)
        # Once more: it may have been emptied, and so forgotten.
        space = self._space_for(batch)
        self._tell_of(space, batch)
        self._fit_names(len(batch))
        windows = _windows_of(space, batch.lengths)
        starts = np.cumsum(np.where(batch.matchable, batch.lengths, 0), dtype=np.int64)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), starts[:-1]])
        if isinstance(batch.documents, str):
            documents = np.full(len(batch), self.documents.take(batch.documents, len(batch)), dtype=np.int32)
        else:
            documents = batch.documents
        entries = np.full(len(batch), NONE, dtype=np.int64)
        for window in np.unique(windows).tolist():
            rows = np.flatnonzero(windows == window)
            done = self._insert_alike(space, window, _chunks(batch, starts, documents, rows))
            entries[rows[: len(done)]] = done
        self._forget_if_gone(space)
        if self.watcher:
            self.watcher.leave_out(entries)
        return entries

    def _tell_of(self, space: Space, batch: Batch) -> None:
        """Chunks that are here already get another owner, and perhaps a better context class."""
        if self.watcher:
            for domain in np.unique(batch.domains).tolist():
                self.watcher.before_change(self.find(space, domain, batch.names[batch.domains == domain]))

    def _insert_alike(self, space: Space, window: int, chunks: Chunks) -> I64:
        ids, chunks = self._take_ids(chunks)
        count = len(chunks.lengths)
        offsets, chunks = self._take_offsets(chunks)
        index = self._index_for(space, window) if window else None
        nodes = index.reserve(count, self.columns) if index else np.empty(0, dtype=np.int64)
        count = len(chunks.lengths)
        added = Added(np.empty(count, dtype=np.int64), np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.uint8))
        buckets = index.buckets if index else NO_BUCKETS
        used_ids, used_nodes = batches.add_entries(
            chunks,
            space.number,
            window,
            self.now,
            Spare(ids, offsets, nodes),
            self.hashing,
            buckets,
            self._names,
            self.columns,
            added,
        )
        self._ids.give(ids[used_ids:])
        self._pool.give(offsets[(added.held == 0) & (offsets != NONE)])
        if index:
            index.unused(nodes[used_nodes:])
            self._forget_if_empty(space, window)
        fresh = added.fresh.astype(bool)
        self.documents.drop(chunks.documents[~fresh])
        self.chunks += int(fresh.sum())
        space.chunks += int(fresh.sum())
        space.tokens += int(chunks.lengths[fresh].sum())
        return added.entries

    def _take_ids(self, chunks: Chunks) -> tuple[I64, Chunks]:
        """Ids for as many of the chunks as there is room for; the others are left out."""
        ids = self._ids.take(1, len(chunks.lengths))
        return ids, self._left_out(chunks, len(ids))

    def _take_offsets(self, chunks: Chunks) -> tuple[I64, Chunks]:
        """A place in the pool for the tokens of each; NONE for those whose tokens are not kept."""
        sizes = -(-chunks.lengths // SLOT_TOKENS) * SLOT_TOKENS
        sizes[chunks.matchable == 0] = 0
        offsets = np.full(len(sizes), NONE, dtype=np.int64)
        for size in np.unique(sizes[sizes > 0]).tolist():
            rows = np.flatnonzero(sizes == size)
            taken = self._pool.take(size, len(rows))
            offsets[rows[: len(taken)]] = taken
        short = np.flatnonzero((offsets == NONE) & (sizes > 0))
        kept = int(short[0]) if len(short) else len(sizes)
        self._pool.give(offsets[kept:][offsets[kept:] != NONE])
        return offsets[:kept], self._left_out(chunks, kept)

    def _left_out(self, chunks: Chunks, kept: int) -> Chunks:
        """What there is no room for: known to the log, not to this replica."""
        count = len(chunks.lengths)
        if kept == count:
            return chunks
        self.evicted += count - kept
        self.documents.drop(chunks.documents[kept:])
        shorter: dict[str, Any] = {name: column[:kept] for name, column in chunks._asdict().items() if name != "tokens"}
        return Chunks(**shorter, tokens=chunks.tokens)

    def remove(self, space_id: bytes, domain: int, names: U64, owner: OwnerName, seen: int = 0) -> None:
        """Takes an owner off chunks, named by [N, 4] hashes; a chunk without an owner goes.

        `seen`: log position of the answer that a report is about (0: the owner itself says so).
        """
        with self.lock:
            space = self.spaces.get(space_id)
            if space is not None:
                self._disown(self.find(space, domain, names), owner, seen)
                self.settle()

    def clear(self, owner: OwnerName, space_id: bytes = b"", tenant: str = "", document: str = "") -> None:
        """Takes an owner off everything in a scope; what is empty is not looked at."""
        cursor = 0
        while True:
            with self.lock:
                bit = self.owners.find(owner)
                if bit is None or cursor >= self._ids.begun:
                    return
                last = min(self._ids.begun, cursor + _LOOK_AT)
                entries, cursor = batches.owned(cursor, last, bit.plane, bit.mask, _AT_ONCE, self.columns)
                self._disown(entries[self._in_scope(entries, space_id, tenant, document)], owner)
                self.settle()

    def _in_scope(self, entries: I64, space_id: bytes, tenant: str, document: str) -> np.ndarray:
        spaces = np.array(
            [
                space is not None and space.space_id in (space_id or space.space_id,) and tenant in ("", space.tenant)
                for space in self.numbered
            ],
            dtype=bool,
        )
        inside = spaces[self.columns.rows[entries, SPACE]] if len(spaces) else np.zeros(len(entries), dtype=bool)
        if document:
            inside &= self.columns.rows[entries, DOCUMENT] == self.documents.find(document)
        return inside

    def void(self, owner: OwnerName) -> None:
        """From now on the owner has nothing. What it had is removed by `sweep`."""
        with self.lock:
            self.owners.void(owner)

    def sweep(self) -> bool:
        """Removes some of what voided owners had; whether there is more to do."""
        with self.lock:
            bit = self.owners.next_void()
            if bit is None:
                self.grace.collect()
                return False
            last = min(self._ids.begun, self._sweep_at + _LOOK_AT)
            columns = self.columns
            entries, self._sweep_at = batches.owned(self._sweep_at, last, bit.plane, bit.mask, _AT_ONCE, columns)
            if self.watcher:
                self.watcher.before_change(entries)
            self._delete(batches.disown(entries, bit.plane, bit.mask, 0, False, self.owners.live(), columns))
            if self._sweep_at >= self._ids.begun:
                self._sweep_at = 0
                self.grace.retire(self.owners.cleared())
            self.settle()
            return True

    def _remove_void(self, space: Space, batch: Batch) -> None:
        """Entries that only voided owners have are not there: a chunk that is added anew takes nothing from them."""
        if self.owners.next_void() is None:
            return
        live = self.owners.live()
        for domain in np.unique(batch.domains).tolist():
            entries = self.find(space, domain, batch.names[batch.domains == domain])
            entries = np.unique(entries[entries != NONE])
            self._delete(entries[~batches.are_alive(entries, live, self.columns)])

    def _disown(self, entries: I64, owner: OwnerName, seen: int = 0) -> None:
        bit = self.owners.find(owner)
        if bit is not None:
            is_tier = owner.kind == matcher_pb2.OWNER_KIND_L2
            live = self.owners.live()
            if self.watcher:
                self.watcher.before_change(entries)
            self._delete(batches.disown(entries, bit.plane, bit.mask, seen, is_tier, live, self.columns))

    def _delete(self, entries: I64) -> None:
        """Removes entries at once; their places are free when no reader can see them any more."""
        if not len(entries):
            return
        if self.watcher:
            self.watcher.before_change(entries)
        columns = self.columns
        keys = columns.rows[entries, SPACE].astype(np.int64) << 16 | columns.windows[entries]
        order = np.argsort(keys, kind="stable")
        bounds = np.flatnonzero(np.diff(keys[order])) + 1
        for group in np.split(entries[order], bounds):
            self._delete_alike(group)
        self.chunks -= len(entries)

    def _delete_alike(self, entries: I64) -> None:
        columns = self.columns
        space = self.numbered[columns.rows[entries[0], SPACE]]
        window = int(columns.windows[entries[0]])
        assert space is not None
        documents = columns.rows[entries, DOCUMENT]
        index = space.indexes[space.windows.index(window)] if window else None
        offsets, nodes = np.empty(len(entries), dtype=np.int64), np.empty(len(entries), dtype=np.int64)
        space.chunks -= len(entries)
        space.tokens -= int(columns.rows[entries, LENGTH].sum())
        buckets = index.buckets if index else NO_BUCKETS
        held, unlinked = batches.remove_entries(entries, buckets, self._names, columns, offsets, nodes)
        leaving = 4 * self._pool.units(offsets[:held]) + len(entries) * entry_columns.bytes_per_entry(
            self.owners.planes
        )
        self._leaving += leaving

        def free() -> None:
            self._ids.give(entries)
            self._pool.give(offsets[:held])
            self.documents.drop(documents)
            self._leaving -= leaving

        self.grace.retire(free)
        if index:
            index.removed(nodes[:unlinked], columns)
            self._forget_if_empty(space, window)
        self._forget_if_gone(space)

    def _forget_if_gone(self, space: Space) -> None:
        if not space.chunks and space.space_id in self.spaces:
            del self.spaces[space.space_id]
            self.numbered[space.number] = None

    def _forget_if_empty(self, space: Space, window: int) -> None:
        """A class in which nothing is is not scanned."""
        place = space.windows.index(window)
        index = space.indexes[place]
        if index and not index.count:
            space.indexes[place] = None

    # Size.

    def settle(self) -> None:
        """Behind every change: what can be freed is, and what is too much goes."""
        self.grace.collect()
        for _ in range(_EVICTIONS_AT_ONCE):
            if self.size <= self.memory_limit_bytes:
                return
            self._evict()

    def _evict(self) -> None:
        """Drops the least recently matched entries: a share that would be enough if everything shrank by it."""
        entries = batches.alive(0, self._ids.begun, self.owners.live(), self.columns)
        touched = self.columns.rows[entries, TOUCHED]
        share = 1 - _EVICT_TO * self.memory_limit_bytes / self.size
        count = min(len(entries), int(share * len(entries)) + 1)
        oldest = entries[np.argpartition(touched, count - 1)[:count]] if count else entries
        self.evicted += len(oldest)
        self._delete(oldest)
        self._fit_names(0)
        self.grace.collect()

    def _fit_planes(self) -> None:
        self.columns = self._store.columns(self.owners.planes)
        self.reader_columns = ReaderColumns(self.columns.pool, self.columns.rows, self.columns.owners)

    def _fit_names(self, more: int) -> None:
        wanted = max(_SMALLEST_NAMES, 2 << (self.chunks + more).bit_length())
        size = len(self._names.names)
        if wanted > size or 8 * wanted <= size:
            larger = _name_indexes(wanted)
            relink_names(self._names, larger, self.columns)
            self._names = larger

    # Spaces.

    def _space_for(self, batch: Batch) -> Space:
        space = self.spaces.get(batch.space_id)
        if space is None:
            if None not in self.numbered:
                self.numbered.append(None)
            number = self.numbered.index(None)
            space = Space(
                batch.space_id,
                number,
                batch.chunk_tokens,
                batch.tenant,
                windows_for(batch.chunk_tokens),
                [None] * _CLASSES,
            )
            self.spaces[batch.space_id] = self.numbered[number] = space
        return space

    def _index_for(self, space: Space, window: int) -> WindowIndex:
        place = space.windows.index(window)
        index = space.indexes[place]
        if index is None:
            index = space.indexes[place] = WindowIndex(self.grace)
        return index

    @property
    def entries_begun(self) -> int:
        """Ids below this have been in use at some time."""
        return self._ids.begun


def _windows_of(space: Space, lengths: U32) -> I64:
    """The largest class that fits into each length; 0: too short to be found by itself."""
    classes = np.array(space.windows, dtype=np.int64)
    return np.where(
        lengths < LADDER[0], 0, classes[np.clip(np.searchsorted(classes, lengths, side="right") - 1, 0, None)]
    )


def _chunks(batch: Batch, starts: I64, documents: I32, rows: I64) -> Chunks:
    return Chunks(
        names=batch.names[rows],
        previous=batch.previous[rows],
        positions=batch.positions[rows],
        lengths=batch.lengths[rows].astype(np.int64),
        starts=starts[rows],
        tokens=frozen(batch.tokens),
        domains=batch.domains[rows],
        classes=batch.classes[rows],
        matchable=batch.matchable[rows],
        documents=documents[rows],
    )


def _name_indexes(size: int) -> NameIndexes:
    return NameIndexes(np.full(size, NONE, dtype=np.int32), np.full(size, NONE, dtype=np.int32))
