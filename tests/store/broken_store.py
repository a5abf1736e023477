"""Stores that are broken on purpose."""

from typing import Any

from services.common.arena_format import BlockState
from services.store.arena.headers import HeaderTable
from services.store.catalog import Catalog
from services.store.leasing.leases import LeaseTable
from services.store.publishing.publisher import NoMatchers
from services.store.state import StoreState
from services.store.writing.writes import Writes


def keeps_generations() -> None:
    """A freed block's readers are not told."""

    def broken(self: Any, header: int) -> None:
        self.set_state(header, BlockState.FREE)
        self._free.append(header)

    HeaderTable.free = broken  # type: ignore[method-assign]


def frees_at_expiry() -> None:
    """Time alone gives a writer's blocks away."""
    quarantine = Writes._quarantine

    def broken(self: Any, reservation: Any) -> None:
        quarantine(self, reservation)
        kept = self._quarantined[reservation.number]
        for header in kept.headers:
            self._state.pool.free(header)
        kept.headers.clear()

    Writes._quarantine = broken  # type: ignore[method-assign]


def accepts_late_commits() -> None:
    """A reservation never expires."""
    reserve = Writes.reserve

    def broken(self: Any, *arguments: Any) -> Any:
        number, grants = reserve(self, *arguments)
        if number:
            self._open[number].deadline += 3600
        return number, grants

    Writes.reserve = broken  # type: ignore[method-assign]


def revokes_busy() -> None:
    """A block is freed although a copy out of it runs."""
    LeaseTable.is_copied = lambda self, header: False  # type: ignore[method-assign]


def keeps_evictions_to_itself() -> None:
    """Matchers are not told of what has left."""
    remove = StoreState.remove

    def broken(self: Any, chunk: Any, reason: Any) -> None:
        outbox, self._outbox = self._outbox, NoMatchers("", 0)
        remove(self, chunk, reason)
        self._outbox = outbox

    StoreState.remove = broken  # type: ignore[method-assign]


def publishes_halves() -> None:
    """Matchers are told of a chunk before its last rank has committed."""
    add_object = Catalog.add_object

    def broken(self: Any, *arguments: Any) -> Any:
        chunk = add_object(self, *arguments)
        chunk.complete = True
        return chunk

    Catalog.add_object = broken  # type: ignore[method-assign]


FAULTS = {
    "keeps generations": keeps_generations,
    "frees at expiry": frees_at_expiry,
    "accepts late commits": accepts_late_commits,
    "revokes busy": revokes_busy,
}
PUBLISHING_FAULTS = {
    "keeps evictions to itself": keeps_evictions_to_itself,
    "publishes halves": publishes_halves,
}


def break_it(fault: str) -> None:
    """Breaks the store of this process."""
    (FAULTS | PUBLISHING_FAULTS)[fault]()
