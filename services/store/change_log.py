"""The store's numbered changes, as far as some matcher still has to read them, with checkpoints.

Sequences only ever grow, and every matcher sees the same change under the same number. A reader that
has to start over (a matcher that restarted, or fell too far behind) starts at a **checkpoint**: a run
of additions in this very log that says all that the store holds at that point. To the other readers a
checkpoint's additions are repeats of what they know.

Why checkpoints get fresh numbers and not numbers below the present one: a page that timed out may be
carried out much later. Were numbers used twice, a page from before the checkpoint could fit
into the middle of it, and be taken for it. As it is, any old page is either a repeat or a gap.

Why a checkpoint is exact although the snapshot is taken without this log's lock (whoever appends holds
the catalog's lock, and the snapshot needs that lock): changes appended meanwhile are remembered and
applied to the snapshot once more, in order. Each of them states its key's whole new state, so it does
not matter which of them the snapshot had seen already; keys that none of them names did not change.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvblend.v1 import matcher_pb2

Change = matcher_pb2.ChunkAdded | matcher_pb2.ChunkRemoved
Snapshot = Callable[[], list[matcher_pb2.ChunkAdded]]
Key = tuple[bytes, int, bytes, int, str]


@dataclass
class Reader:
    """Where one matcher stands. `next`: first sequence that it has not acknowledged; None: it must start over."""

    next: int | None = None


@dataclass(frozen=True)
class Page:
    first: int
    changes: list[Change]

    @property
    def last(self) -> int:
        return self.first + len(self.changes) - 1


def key_of(change: Change) -> Key:
    return change.space_id, change.domain, change.chain_hash, change.owner.kind, change.owner.l2_id


def _brought_forward(
    snapshot: Iterable[matcher_pb2.ChunkAdded], raced: Iterable[tuple[int, Change]]
) -> Iterator[matcher_pb2.ChunkAdded]:
    """The snapshot after the changes (sequence, change) that were made while it was taken."""
    held = {key_of(added): added for added in snapshot}
    added_at: dict[Key, int] = {}
    for sequence, change in raced:
        key = key_of(change)
        if isinstance(change, matcher_pb2.ChunkAdded):
            held[key], added_at[key] = change, sequence
        elif not change.seen_sequence or added_at.get(key, 0) <= change.seen_sequence:
            held.pop(key, None)
    yield from held.values()


class ChangeLog:
    """Thread-safe. `changed` is its lock; it is notified of every change, and never held during a snapshot."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: changes kept for a slow reader, besides the latest checkpoint."""
        self.changed = threading.Condition()
        self._capacity = capacity
        self._changes: dict[int, Change] = {}
        self._first = 1
        self._next = 1
        self._readers: list[Reader] = []
        # One checkpoint is taken at a time; never held by whoever appends.
        self._checkpointing = threading.Lock()
        self._checkpoint = range(0)
        self._raced: list[tuple[int, Change]] | None = None

    @property
    def last(self) -> int:
        """Sequence of the last change; 0: there was none."""
        return self._next - 1

    def __len__(self) -> int:
        """Changes kept in memory."""
        return len(self._changes)

    def new_reader(self) -> Reader:
        reader = Reader()
        with self.changed:
            self._readers.append(reader)
        return reader

    def append(self, change: Change) -> int:
        """Its sequence. The change must not be modified any more."""
        with self.changed:
            sequence = self._put(change)
            if self._raced is not None:
                self._raced.append((sequence, change))
            self._trim()
            self.changed.notify_all()
            return sequence

    def start_over(self, reader: Reader, snapshot: Snapshot) -> int:
        """Sets the reader to a checkpoint, a new one unless the log still has one. First sequence behind it."""
        with self._checkpointing:
            with self.changed:
                if self._checkpoint and self._checkpoint.start >= self._first:
                    reader.next = self._checkpoint.start
                    return self._checkpoint.stop
                raced = self._raced = []
            try:
                held = snapshot()
            except BaseException:
                with self.changed:
                    self._raced = None
                raise
            with self.changed:
                self._raced = None
                reader.next = start = self._next
                for added in _brought_forward(held, raced):
                    self._put(added)
                self._checkpoint = range(start, self._next)
                self._trim()
                self.changed.notify_all()
                return self._next

    def page(self, reader: Reader, max_changes: int, max_bytes: int, wait_seconds: float) -> Page | None:
        """What the reader has to read next; without changes if none came in time. None: it must start over."""
        with self.changed:
            self.changed.wait_for(lambda: reader.next is None or reader.next < self._next, wait_seconds)
            if reader.next is None:
                return None
            changes: list[Change] = []
            size = 0
            for sequence in range(reader.next, min(self._next, reader.next + max_changes)):
                change = self._changes[sequence]
                size += change.ByteSize()
                if changes and size > max_bytes:
                    break
                changes.append(change)
            return Page(reader.next, changes)

    def drop(self, reader: Reader) -> None:
        """The reader must start over, or is gone: nothing is kept for it, and its `page` returns."""
        with self.changed:
            reader.next = None
            self._trim()
            self.changed.notify_all()

    def acknowledge(self, reader: Reader, last: int) -> None:
        """The reader has everything up to `last`."""
        with self.changed:
            if reader.next is not None:
                reader.next = last + 1
                self._trim()

    def _put(self, change: Change) -> int:
        sequence = self._next
        self._changes[sequence] = change
        self._next += 1
        return sequence

    def _trim(self) -> None:
        """Forgets what every reader has, and what a reader that is too slow will not get."""
        wanted = min((reader.next for reader in self._readers if reader.next is not None), default=self._next)
        # The latest checkpoint comes on top, until so much was added behind it that another one is cheaper.
        fresh = self._next - self._checkpoint.stop < self._capacity
        kept = self._capacity + (len(self._checkpoint) if fresh else 0)
        start = max(wanted, self._next - kept)
        for sequence in range(self._first, start):
            del self._changes[sequence]
        self._first = max(self._first, start)
        for reader in self._readers:
            if reader.next is not None and reader.next < self._first:
                reader.next = None
