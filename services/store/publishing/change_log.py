"""The store's numbered changes: those that the log behind the matchers lacks, and the latest that it has.

Sequences only ever grow. Changes that the log has acknowledged are kept for a while: a log that failed over
may have lost its end, and gets it again under the same numbers. If what it lacks is not kept any more (it was
away for long, or lost too much), it gets a **checkpoint**: a run of additions in this very stream, under fresh
numbers, that says all that the store holds at that point; its first page voids everything before.

Why checkpoints get fresh numbers and not numbers below the present one: a page that timed out may be carried
out much later. Were numbers used twice, a page from before the checkpoint could fit into the middle of it,
and be taken for it. As it is, any old page is either a repeat or does not follow.

Why a checkpoint is exact although the snapshot is taken without this log's lock (whoever appends holds the
catalog's lock, and the snapshot needs that lock): changes appended meanwhile are remembered and applied to the
snapshot once more, in order. Each of them states the whole new state of what it names, so it does not matter which
of them the snapshot had seen already; what none of them names did not change. The one exception is a removal
that depends on a position of the log, which only the log can judge: the claim stays in the checkpoint, and
whoever fails to find the chunk removes it again.

A checkpoint voids only what the store owns. What was cleared in a shared tier while the log could not be told
would be lost with the changes that a checkpoint replaces, so it is carried over to the checkpoint's front.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.common.failpoints import passage
from services.store.objects import ChunkKey
from services.store.publishing.changes import STORE_OWNER, Added, Change, Cleared

Snapshot = Callable[[], list[Added]]


@dataclass(frozen=True)
class Page:
    """Changes [first, first + len(changes)). `reset`: it starts a checkpoint."""

    first: int
    changes: list[Change]
    reset: bool

    @property
    def last(self) -> int:
        return self.first + len(self.changes) - 1


class ChangeLog:
    """Thread-safe. `changed` is its lock; it is notified of every change, and never held during a snapshot."""

    def __init__(self, max_changes: int, max_bytes: int) -> None:
        """What is kept at most, acknowledged or not; a checkpoint that is on its way comes on top."""
        self.changed = threading.Condition()
        self._max_changes = max_changes
        self._max_bytes = max_bytes
        self._changes: dict[int, Change] = {}
        self._bytes = 0
        self._first = 1
        self._next = 1
        self._durable = 0
        # None: the log has never been told what was here before.
        self._checkpoint: range | None = None
        self._checkpoint_bytes = 0
        # Clearings that were dropped before the log had them.
        self._owed: list[Cleared] = []
        self._raced: list[Change] | None = None

    @property
    def last(self) -> int:
        """Sequence of the last change; 0: there was none."""
        return self._next - 1

    @property
    def durable(self) -> int:
        """Up to this sequence the log has everything, as far as it said."""
        return self._durable

    @property
    def complete(self) -> bool:
        """The log knows what was here before, not only what changed since."""
        return self._checkpoint is not None and self._durable >= self._checkpoint.stop - 1

    def __len__(self) -> int:
        """Changes kept in memory."""
        return len(self._changes)

    def append(self, change: Change) -> int:
        """Its sequence."""
        passage("outbox.append")
        with self.changed:
            sequence = self._next
            self._put(change)
            if self._raced is not None:
                self._raced.append(change)
            self._trim()
            self.changed.notify_all()
            return sequence

    def acknowledge(self, durable: int) -> None:
        """What the log says that it has, more or less than before."""
        with self.changed:
            self._durable = durable
            self._trim()
            self.changed.notify_all()

    def page(self, max_changes: int, max_bytes: int) -> Page | None:
        """What the log lacks, beginning with the oldest; no changes if it has everything.

        None: what it lacks is not kept, it must be told everything.
        """
        with self.changed:
            first = self._durable + 1
            if self._checkpoint is None or first > self._next:
                return None
            if first < self._first:
                if self._checkpoint.start < self._first:
                    return None
                first = self._first
            changes: list[Change] = []
            size = 0
            for sequence in range(first, min(self._next, first + max_changes)):
                change = self._changes[sequence]
                size += change.wire_bytes
                if changes and size > max_bytes:
                    break
                changes.append(change)
            return Page(first, changes, reset=first == self._checkpoint.start)

    def start_over(self, snapshot: Snapshot) -> None:
        """Replaces all changes by a checkpoint. By one thread at a time."""
        with self.changed:
            raced = self._raced = []
        try:
            held = {(added.key, added.owner): added for added in snapshot()}
        except BaseException:
            with self.changed:
                self._raced = None
            raise
        with self.changed:
            self._raced = None
            _bring_forward(held, raced)
            for sequence, change in self._changes.items():
                self._owe(sequence, change)
            owed, self._owed = self._owed, []
            self._changes, self._bytes = {}, 0
            # Never empty, so that it is a change of its own even if nothing is held.
            start = self._first = self._next = max(self._next, self._durable + 1)
            everything: list[Change] = [Cleared(STORE_OWNER), *owed, *held.values()]
            for change in everything:
                self._put(change)
            self._checkpoint, self._checkpoint_bytes = range(start, self._next), self._bytes
            self.changed.notify_all()

    def _put(self, change: Change) -> None:
        self._changes[self._next] = change
        self._bytes += change.wire_bytes
        self._next += 1

    def _trim(self) -> None:
        """Forgets the oldest changes beyond the limits."""
        max_changes, max_bytes = self._max_changes, self._max_bytes
        if self._checkpoint is not None and not self.complete and self._first == self._checkpoint.start:
            max_changes += len(self._checkpoint)
            max_bytes += self._checkpoint_bytes
        while len(self._changes) > max_changes or self._bytes > max_bytes:
            change = self._changes.pop(self._first)
            self._owe(self._first, change)
            self._bytes -= change.wire_bytes
            self._first += 1

    def _owe(self, sequence: int, change: Change) -> None:
        """The change is dropped: the log must still hear of it if a checkpoint does not say as much."""
        if sequence > self._durable and isinstance(change, Cleared) and change.owner != STORE_OWNER:
            self._owed.append(change)


def _bring_forward(held: dict[tuple[ChunkKey, str], Added], raced: Iterable[Change]) -> None:
    """Applies the changes that were made while the snapshot was taken."""
    for change in raced:
        if isinstance(change, Added):
            held[change.key, change.owner] = change
        elif isinstance(change, Cleared):
            for name in [name for name, added in held.items() if change.covers(added)]:
                del held[name]
        elif not change.seen_position:
            held.pop((change.key, change.owner), None)
