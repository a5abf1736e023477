"""One space's stored chunks: tokens, places, owners and the fingerprint indexes over them.

Not thread-safe: `spaces.Space` guards it, many readers or one writer.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.tokens import TokenArray
from services.matcher.kernels import I32, I64, U32, U64, fingerprint
from services.matcher.window_index import WindowIndex

# Window classes below a full chunk: an entry is indexed in the largest that fits into it.
LADDER = (16, 32, 64, 128)
_FIRST_CAPACITY = 64


class ChunkName(NamedTuple):
    domain: pb.Domain
    chain_hash: bytes


class OwnerName(NamedTuple):
    """A store by its name, or an L2 tier by its id."""

    kind: int
    name: str


@dataclass
class Entry:
    """A stored chunk. `owners`: who has it, and the sequence that said so."""

    id: int
    name: ChunkName
    previous: ChunkName
    length: int
    stored_position: int
    context_class: pb.ContextClass
    document: str
    matchable: bool
    window: int
    owners: dict[OwnerName, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Hashing:
    """The process's random bases, and a mask that tests make small to force collisions."""

    bases: U64
    keep: np.uint64


class Table:
    def __init__(self, hashing: Hashing, chunk_tokens: int) -> None:
        self.hashing = hashing
        self.chunk_tokens = chunk_tokens
        self.by_name: dict[ChunkName, Entry] = {}
        self.by_id: dict[int, Entry] = {}
        # Entries behind a chunk, also those too short for any window class.
        self.successors: dict[ChunkName, dict[int, Entry]] = {}
        self.windows: dict[int, WindowIndex] = {}
        self.tokens = 0
        self.pool: U32 = np.zeros(_FIRST_CAPACITY * chunk_tokens, dtype=np.uint32)
        self._pool_end = 0
        self._free_pool: dict[int, list[int]] = {}
        self._free_ids: list[int] = []
        self.offsets: I64 = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self.lengths: I32 = np.zeros(_FIRST_CAPACITY, dtype=np.int32)
        self.following: I32 = np.zeros(_FIRST_CAPACITY, dtype=np.int32)
        self.fingerprints: U64 = np.zeros(_FIRST_CAPACITY, dtype=np.uint64)

    @property
    def bytes(self) -> int:
        """Of the arrays, without Python's own objects."""
        arrays = (self.pool, self.offsets, self.lengths, self.following, self.fingerprints)
        return sum(array.nbytes for array in arrays) + sum(index.bytes for index in self.windows.values())

    def tokens_of(self, entry: Entry) -> TokenArray:
        offset = int(self.offsets[entry.id])
        return self.pool[offset : offset + entry.length]

    def add(self, added: matcher_pb2.ChunkAdded, tokens: TokenArray, owner: OwnerName, sequence: int) -> Entry:
        """Adds an owner to a chunk, and the chunk itself if it is new."""
        name = ChunkName(added.domain, added.chain_hash)
        entry = self.by_name.get(name)
        if entry is None:
            entry = self._insert(name, added, tokens)
        elif added.context_class < entry.context_class:
            entry.context_class = added.context_class
        entry.owners[owner] = sequence
        return entry

    def drop_owner(self, entry: Entry, owner: OwnerName) -> None:
        """Removes one owner; with the last one the entry goes."""
        entry.owners.pop(owner, None)
        if not entry.owners:
            self._delete(entry)

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
        self.pool[offset : offset + len(tokens)] = tokens
        self.offsets[entry.id] = offset
        self.lengths[entry.id] = len(tokens)
        self.by_name[name] = self.by_id[entry.id] = entry
        self.tokens += len(tokens)
        if entry.matchable:
            self.successors.setdefault(entry.previous, {})[entry.id] = entry
            if entry.window:
                self.fingerprints[entry.id] = fingerprint(tokens[: entry.window], self.hashing.bases, self.hashing.keep)
                index = self.windows.setdefault(entry.window, WindowIndex())
                index.add(entry.id, self.following, self.fingerprints)
        return entry

    def _delete(self, entry: Entry) -> None:
        if entry.matchable:
            siblings = self.successors[entry.previous]
            del siblings[entry.id]
            if not siblings:
                del self.successors[entry.previous]
            if entry.window:
                index = self.windows[entry.window]
                index.remove(entry.id, self.following, self.fingerprints)
                if not index.count:
                    del self.windows[entry.window]
        del self.by_name[entry.name], self.by_id[entry.id]
        self.tokens -= entry.length
        self._free_ids.append(entry.id)
        self._free_pool.setdefault(entry.length, []).append(int(self.offsets[entry.id]))

    def _window_of(self, length: int) -> int:
        """0: too short to be found by itself."""
        classes = (*(window for window in LADDER if window < self.chunk_tokens), self.chunk_tokens)
        return max((window for window in classes if window <= length), default=0)

    def _take_id(self) -> int:
        if self._free_ids:
            return self._free_ids.pop()
        identifier = len(self.by_id)
        if identifier == len(self.offsets):
            # New arrays: a reader that holds the old ones is not disturbed.
            self.offsets = np.concatenate([self.offsets, np.zeros_like(self.offsets)])
            self.lengths = np.concatenate([self.lengths, np.zeros_like(self.lengths)])
            self.following = np.concatenate([self.following, np.zeros_like(self.following)])
            self.fingerprints = np.concatenate([self.fingerprints, np.zeros_like(self.fingerprints)])
        return identifier

    def _take_pool(self, length: int) -> int:
        free = self._free_pool.get(length)
        if free:
            return free.pop()
        offset = self._pool_end
        self._pool_end += length
        if self._pool_end > len(self.pool):
            grown = np.zeros(max(2 * len(self.pool), self._pool_end), dtype=np.uint32)
            grown[:offset] = self.pool[:offset]
            self.pool = grown
        return offset
