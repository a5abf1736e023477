"""All spaces, the stores' streams that fill them, and who owns what.

Readers of a space run side by side, with the GIL released inside kernels; a writer has it for itself for one event at a
time. A reader therefore sees whole entries only, and the arrays it scans cannot change under it.

Every time a stream starts (a store's new epoch, a reset, this process's start) it gets a new number. An owner's claim
keeps the number and the sequence that made it, so that sequences are compared only within one stream.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError
from services.common.identity import HASH_BYTES, SPACE_ID_BYTES, is_chunk_size
from services.common.tokens import decode_tokens
from services.matcher.kernels import PRIME
from services.matcher.locks import ReadWriteLock
from services.matcher.table import ChunkName, Hashing, OwnerName, Said, Table

# Number of a stream whose store is just losing what it owned.
_VOIDING = 0
# Entries that a store loses at once under one lock: some milliseconds.
_VOIDED_AT_ONCE = 1024


def random_hashing(keep: int = (1 << 62) - 1) -> Hashing:
    """Bases drawn anew for each process: nobody outside can construct collisions."""
    bases = [secrets.randbelow(PRIME - 3) + 2 for _ in range(2)]
    return Hashing(np.array(bases, dtype=np.int64), np.uint64(keep))


class Space:
    def __init__(self, hashing: Hashing, chunk_tokens: int) -> None:
        self.lock = ReadWriteLock()
        self.table = Table(hashing, chunk_tokens)


@dataclass(frozen=True)
class Stream:
    """One store's gapless stream, as far as it was applied. `number`: of this start of it, in this process."""

    epoch: int
    applied: int
    number: int


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
        self._numbers = itertools.count(_VOIDING + 1)
        # One publish of a store at a time; different stores side by side.
        self._publishing: dict[str, threading.Lock] = {}

    def publish(self, request: matcher_pb2.PublishRequest, timeout: float) -> tuple[int, bool]:
        """Applies a page. Returns (last applied sequence, whether the store must reset).

        Raises:
            KvblendError: STALE_EPOCH for a writer that has been succeeded, INVALID_ARGUMENT for a
                malformed page, of which then nothing is applied; DEADLINE_EXCEEDED after `timeout` seconds: the
                page may be sent again.
        """
        deadline = time.monotonic() + timeout
        if not request.store or not request.first_sequence:
            raise KvblendError("INVALID_ARGUMENT", "a page needs a store and a first_sequence of at least 1")
        for event in request.events:
            _check_event(request.store, event)
        with self._lock:
            turn = self._publishing.setdefault(request.store, threading.Lock())
        if not turn.acquire(timeout=max(0.0, timeout)):
            raise KvblendError("DEADLINE_EXCEEDED", f"another page of {request.store} was applied all the time")
        try:
            return self._publish_in_turn(request, deadline)
        finally:
            turn.release()

    def _publish_in_turn(self, request: matcher_pb2.PublishRequest, deadline: float) -> tuple[int, bool]:
        stream = self._streams.get(request.store)
        if stream and request.epoch < stream.epoch:
            raise KvblendError("STALE_EPOCH", f"{request.store} has published epoch {stream.epoch} already")
        if stream is None or request.epoch > stream.epoch or request.reset or stream.number == _VOIDING:
            starts = request.reset or request.first_sequence == 1
            stream = self._start(request.store, request.epoch, request.first_sequence - 1 if starts else 0, deadline)
        if request.first_sequence > stream.applied + 1:
            return stream.applied, True
        fresh = list(request.events)[stream.applied + 1 - request.first_sequence :]
        applied = stream.applied
        try:
            for event in fresh:
                self._apply(request.store, Said(stream.number, applied + 1), event, deadline)
                applied += 1
        finally:
            # A page that could not be finished goes on where it stopped when it is sent again.
            self._advance(request.store, replace(stream, applied=applied))
        return applied, False

    def _start(self, store: str, epoch: int, applied: int, deadline: float) -> Stream:
        """Forgets all that a store owned. Until that is done no reader has anything of it, whatever its epoch.

        The epoch stays known, so that a writer of an older one is refused even if this does not end in time.
        """
        self._advance(store, Stream(epoch, 0, _VOIDING))
        self._void(store, deadline)
        stream = Stream(epoch, applied, next(self._numbers))
        self._advance(store, stream)
        return stream

    def _advance(self, store: str, stream: Stream) -> None:
        with self._applied:
            self._streams[store] = stream
            self._applied.notify_all()

    def _apply(self, store: str, said: Said, event: matcher_pb2.ChangeEvent, deadline: float) -> None:
        if event.WhichOneof("change") == "added":
            added = event.added
            space = self._space_for(added.space_id, added.chunk_tokens)
            with space.lock.writing(deadline - time.monotonic()):
                space.table.add(added, decode_tokens(added.tokens), owner_of(store, added.owner), said)
            return
        removed = event.removed
        found = self._spaces.get(removed.space_id)
        if found is None:
            return
        with found.lock.writing(deadline - time.monotonic()):
            entry = found.table.by_name.get(ChunkName(removed.domain, removed.chain_hash))
            if entry is not None:
                owner = owner_of(store, removed.owner)
                if not _was_added_again(entry.owners.get(owner), said.stream, removed.seen_sequence):
                    found.table.drop_owner(entry, owner)
        self._forget_if_empty(removed.space_id)

    def _void(self, store: str, deadline: float) -> None:
        """Drops all that a store owned, some at a time, so that readers get their turns."""
        owner = store_owner(store)
        with self._lock:
            spaces = list(self._spaces.items())
        for space_id, space in spaces:
            more = True
            while more:
                with space.lock.writing(deadline - time.monotonic()):
                    owned = space.table.owned_by(owner, _VOIDED_AT_ONCE)
                    for entry in owned:
                        space.table.drop_owner(entry, owner)
                more = len(owned) == _VOIDED_AT_ONCE
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
    def reading(self, space_id: bytes, timeout: float) -> Iterator[Table | None]:
        """The space's table for as long as the block runs; None if nothing is stored in it.

        Raises:
            KvblendError: DEADLINE_EXCEEDED if it cannot be had within `timeout` seconds.
        """
        check_space_id(space_id)
        with self._lock:
            space = self._spaces.get(space_id)
        if space is None:
            yield None
            return
        with space.lock.reading(timeout):
            yield space.table

    def current_owners(self, store: str, epoch: int, l2_id: str) -> frozenset[OwnerName]:
        """What a store at this epoch can reach: its own chunks, if the table has its epoch, and its L2's."""
        owners = set()
        with self._lock:
            stream = self._streams.get(store)
        if stream and stream.epoch == epoch and stream.number != _VOIDING:
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
        return (
            stream is not None
            and stream.number != _VOIDING
            and (stream.epoch, stream.applied) >= (position.epoch, position.sequence)
        )

    def applied(self) -> list[pb.StreamPosition]:
        with self._lock:
            return [
                pb.StreamPosition(store=store, epoch=stream.epoch, sequence=stream.applied)
                for store, stream in sorted(self._streams.items())
            ]

    def entries(self, timeout: float) -> Iterator[tuple[bytes, Table]]:
        """(space id, table) of every space, each under its read lock."""
        with self._lock:
            identifiers = list(self._spaces)
        for space_id in identifiers:
            with self.reading(space_id, timeout) as table:
                if table is not None:
                    yield space_id, table


def _was_added_again(said: Said | None, stream: int, seen_sequence: int) -> bool:
    """Whether a claim is newer than the one that somebody found to be untrue.

    What another stream said cannot be compared: then the report is believed. If it was late, the owner's next
    addition makes up for it; to keep an untrue claim would cost every lookup a search in vain.
    """
    return said is not None and said.stream == stream and bool(seen_sequence) and said.sequence > seen_sequence


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
