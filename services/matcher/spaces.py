"""All spaces, the stores' streams that fill them, and who owns what.

Readers of a space run side by side, with the GIL released inside kernels; a writer has it for itself for one event at a
time. A reader therefore sees whole entries only, and the arrays it scans cannot change under it.
"""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError
from services.common.identity import HASH_BYTES, SPACE_ID_BYTES, is_chunk_size
from services.common.tokens import decode_tokens
from services.matcher.kernels import PRIME
from services.matcher.locks import ReadWriteLock
from services.matcher.table import ChunkName, Hashing, OwnerName, Table


def random_hashing(keep: int = (1 << 62) - 1) -> Hashing:
    """Bases drawn anew for each process: nobody outside can construct collisions."""
    bases = [secrets.randbelow(PRIME - 3) + 2 for _ in range(2)]
    return Hashing(np.array(bases, dtype=np.uint64), np.uint64(keep))


class Space:
    def __init__(self, hashing: Hashing, chunk_tokens: int) -> None:
        self.lock = ReadWriteLock()
        self.table = Table(hashing, chunk_tokens)


@dataclass
class Stream:
    """One store's gapless stream, as far as it was applied."""

    epoch: int
    applied: int


def owner_of(store: str, owner: matcher_pb2.Owner) -> OwnerName:
    if owner.kind == matcher_pb2.OWNER_KIND_STORE:
        return OwnerName(owner.kind, store)
    if owner.kind == matcher_pb2.OWNER_KIND_L2 and owner.l2_id:
        return OwnerName(owner.kind, owner.l2_id)
    raise KvblendError("INVALID_ARGUMENT", "an owner is the store itself or an L2 tier with its l2_id")


def store_owner(store: str) -> OwnerName:
    return OwnerName(matcher_pb2.OWNER_KIND_STORE, store)


def check_space_id(space_id: bytes) -> None:
    if len(space_id) != SPACE_ID_BYTES:
        raise KvblendError("INVALID_ARGUMENT", f"space_id has {len(space_id)} bytes; {SPACE_ID_BYTES} are needed")


class Spaces:
    """The table of all spaces. Thread-safe."""

    def __init__(self, hashing: Hashing | None = None) -> None:
        self._hashing = hashing or random_hashing()
        self._lock = threading.Lock()
        self._applied = threading.Condition(self._lock)
        self._spaces: dict[bytes, Space] = {}
        self._streams: dict[str, Stream] = {}
        # One publish of a store at a time; different stores side by side.
        self._publishing: dict[str, threading.Lock] = {}

    def publish(self, request: matcher_pb2.PublishRequest) -> tuple[int, bool]:
        """Applies a page. Returns (last applied sequence, whether the store must reset).

        Raises:
            KvblendError: STALE_EPOCH for a writer that has been succeeded, INVALID_ARGUMENT for a
                malformed page, of which then nothing is applied.
        """
        if not request.store or not request.first_sequence:
            raise KvblendError("INVALID_ARGUMENT", "a page needs a store and a first_sequence of at least 1")
        for event in request.events:
            _check_event(request.store, event)
        with self._lock:
            turn = self._publishing.setdefault(request.store, threading.Lock())
        with turn:
            return self._publish_in_turn(request)

    def _publish_in_turn(self, request: matcher_pb2.PublishRequest) -> tuple[int, bool]:
        stream = self._streams.get(request.store)
        if stream and request.epoch < stream.epoch:
            raise KvblendError("STALE_EPOCH", f"{request.store} has published epoch {stream.epoch} already")
        starts = request.reset or request.first_sequence == 1
        if stream is None or request.epoch > stream.epoch:
            self._void(request.store)
            if not starts:
                self._advance(request.store, request.epoch, 0)
                return 0, True
            stream = Stream(request.epoch, request.first_sequence - 1)
        elif request.reset:
            self._void(request.store)
            stream = Stream(request.epoch, request.first_sequence - 1)
        if request.first_sequence > stream.applied + 1:
            return stream.applied, True
        fresh = list(request.events)[stream.applied + 1 - request.first_sequence :]
        for sequence, event in enumerate(fresh, start=stream.applied + 1):
            self._apply(request.store, sequence, event)
        last = stream.applied + len(fresh)
        self._advance(request.store, request.epoch, last)
        return last, False

    def _advance(self, store: str, epoch: int, applied: int) -> None:
        with self._applied:
            self._streams[store] = Stream(epoch, applied)
            self._applied.notify_all()

    def _apply(self, store: str, sequence: int, event: matcher_pb2.ChangeEvent) -> None:
        if event.WhichOneof("change") == "added":
            added = event.added
            space = self._space_for(added.space_id, added.chunk_tokens)
            with space.lock.writing():
                space.table.add(added, decode_tokens(added.tokens), owner_of(store, added.owner), sequence)
            return
        removed = event.removed
        found = self._spaces.get(removed.space_id)
        if found is None:
            return
        with found.lock.writing():
            entry = found.table.by_name.get(ChunkName(removed.domain, removed.chain_hash))
            owner = owner_of(store, removed.owner)
            added_at = entry.owners.get(owner, 0) if entry else 0
            if entry and not (removed.seen_sequence and added_at > removed.seen_sequence):
                found.table.drop_owner(entry, owner)
        self._forget_if_empty(removed.space_id)

    def _void(self, store: str) -> None:
        """Drops all that a store owned."""
        owner = store_owner(store)
        with self._lock:
            spaces = list(self._spaces.items())
        for space_id, space in spaces:
            with space.lock.writing():
                owned = [entry for entry in space.table.by_id.values() if owner in entry.owners]
                for entry in owned:
                    space.table.drop_owner(entry, owner)
            self._forget_if_empty(space_id)

    def _space_for(self, space_id: bytes, chunk_tokens: int) -> Space:
        with self._lock:
            space = self._spaces.get(space_id)
            if space is None:
                space = self._spaces[space_id] = Space(self._hashing, chunk_tokens)
            return space

    def _forget_if_empty(self, space_id: bytes) -> None:
        with self._lock:
            space = self._spaces.get(space_id)
            if space and not space.table.by_name and not self._is_publishing_elsewhere():
                del self._spaces[space_id]

    def _is_publishing_elsewhere(self) -> bool:
        """Another store's page may be about to add to a space that looks empty; it then stays for now."""
        return sum(lock.locked() for lock in self._publishing.values()) > 1

    @contextmanager
    def reading(self, space_id: bytes) -> Iterator[Table | None]:
        """The space's table for as long as the block runs; None if nothing is stored in it."""
        check_space_id(space_id)
        with self._lock:
            space = self._spaces.get(space_id)
        if space is None:
            yield None
            return
        with space.lock.reading():
            yield space.table

    def current_owners(self, store: str, epoch: int, l2_id: str) -> frozenset[OwnerName]:
        """What a store at this epoch can reach: its own chunks, if the table has its epoch, and its L2's."""
        owners = set()
        with self._lock:
            stream = self._streams.get(store)
        if stream and stream.epoch == epoch:
            owners.add(store_owner(store))
        if l2_id:
            owners.add(OwnerName(matcher_pb2.OWNER_KIND_L2, l2_id))
        return frozenset(owners)

    def wait_applied(self, positions: list[pb.StreamPosition], timeout: float) -> None:
        """Raises KvblendError NOT_CAUGHT_UP if a position has not been applied in time."""
        with self._applied:
            if not self._applied.wait_for(lambda: all(map(self._has_applied, positions)), timeout):
                raise KvblendError("NOT_CAUGHT_UP", "this matcher has not yet applied the position asked for")

    def _has_applied(self, position: pb.StreamPosition) -> bool:
        stream = self._streams.get(position.store)
        return stream is not None and (stream.epoch, stream.applied) >= (position.epoch, position.sequence)

    def applied(self) -> list[pb.StreamPosition]:
        with self._lock:
            return [
                pb.StreamPosition(store=store, epoch=stream.epoch, sequence=stream.applied)
                for store, stream in sorted(self._streams.items())
            ]

    def entries(self) -> Iterator[tuple[bytes, Table]]:
        """(space id, table) of every space, each under its read lock."""
        with self._lock:
            identifiers = list(self._spaces)
        for space_id in identifiers:
            with self.reading(space_id) as table:
                if table is not None:
                    yield space_id, table


def _check_event(store: str, event: matcher_pb2.ChangeEvent) -> None:
    kind = event.WhichOneof("change")
    if kind is None:
        raise KvblendError("INVALID_ARGUMENT", "an event adds or removes a chunk")
    change: matcher_pb2.ChunkAdded | matcher_pb2.ChunkRemoved = event.added if kind == "added" else event.removed
    check_space_id(change.space_id)
    owner_of(store, change.owner)
    if len(change.chain_hash) != HASH_BYTES or change.domain == pb.DOMAIN_UNSPECIFIED:
        raise KvblendError("INVALID_ARGUMENT", "a chunk needs a domain and a 32-byte chain_hash")
    if kind == "added":
        _check_added(event.added)


def _check_added(added: matcher_pb2.ChunkAdded) -> None:
    tokens = decode_tokens(added.tokens)
    if not is_chunk_size(added.chunk_tokens) or len(tokens) > added.chunk_tokens:
        raise KvblendError(
            "INVALID_ARGUMENT", f"a chunk has {len(tokens)} tokens in a space of {added.chunk_tokens} a chunk"
        )
    if len(added.previous_hash) != HASH_BYTES or added.context_class == pb.CONTEXT_CLASS_UNSPECIFIED:
        raise KvblendError("INVALID_ARGUMENT", "a chunk needs a 32-byte previous_hash and a context class")
