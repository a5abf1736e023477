"""An exact picture of the table at one moment, taken while it goes on changing.

Whatever is about to change is put into the picture first (copy on write); the rest follows in its own time; what comes
later is left out. Nothing less will do: an entry's facts depend on which of its owners came first and on when it had
none, so a picture that mixes moments could not be made right by applying the log's records again.
"""

from collections.abc import Callable, Generator

import numpy as np

from services.matcher.kernels import batches
from services.matcher.kernels.types import I64, LENGTH
from services.matcher.table import Table

# Entries and tokens of one part: with 1,024 tokens each it has less than 4 MiB.
_ENTRIES = 512
_TOKENS = 1 << 19
# Ids looked at for one part, while the writer waits.
_LOOK_AT = 1 << 14
# What was about to change is held in memory until it is written.
_MOST_AHEAD_BYTES = 256 << 20

Encode = Callable[[I64], list[bytes]]


class TooMuchChanged(Exception):
    """More was about to change than may wait in memory: another picture must be taken later."""


class Capture:
    """The table's writer tells it what is about to change (`before_change`) and what is new (`leave_out`)."""

    def __init__(self, table: Table, encode: Encode) -> None:
        """Needs the table's lock: the picture is of this moment. `encode`: parts for some entries, as they are now."""
        self._table = table
        self._encode = encode
        self._live = table.owners.live()
        # Entries that are in the picture already, or must not be.
        self._done = np.zeros(table.entries_begun, dtype=np.bool_)
        self._cursor = 0
        self._ahead: list[bytes] = []
        self._ahead_bytes = 0
        table.watcher = self

    def before_change(self, entries: I64) -> None:
        """Needs the table's lock."""
        if self._ahead_bytes <= _MOST_AHEAD_BYTES:
            parts = self._take(entries)
            self._ahead += parts
            self._ahead_bytes += sum(map(len, parts))

    def leave_out(self, entries: I64) -> None:
        """Needs the table's lock."""
        self._done[entries[(entries >= 0) & (entries < len(self._done))]] = True

    def parts(self) -> Generator[bytes, None, None]:
        """All parts. The lock is held for some milliseconds at a time.

        Raises TooMuchChanged.
        """
        while self._cursor < len(self._done) or self._ahead:
            with self._table.lock:
                parts, self._ahead = self._ahead + self._next(), []
                too_much = self._ahead_bytes > _MOST_AHEAD_BYTES
                self._ahead_bytes = 0
            if too_much:
                raise TooMuchChanged(f"more than {_MOST_AHEAD_BYTES >> 20} MiB while a snapshot was written")
            yield from parts

    def close(self) -> None:
        """From here on the table is not watched."""
        with self._table.lock:
            self._table.watcher = None

    def _next(self) -> list[bytes]:
        first, self._cursor = self._cursor, min(len(self._done), self._cursor + _LOOK_AT)
        ahead = np.flatnonzero(~self._done[first : self._cursor])[:_ENTRIES] + first
        if len(ahead) == _ENTRIES:
            self._cursor = int(ahead[-1]) + 1
        return self._take(ahead.astype(np.int64))

    def _take(self, entries: I64) -> list[bytes]:
        """Parts for those that are not in the picture yet."""
        known = np.unique(entries[(entries >= 0) & (entries < len(self._done))])
        missing = known[~self._done[known]]
        self._done[missing] = True
        alive = missing[batches.are_alive(missing, self._live, self._table.columns)]
        parts: list[bytes] = []
        while len(alive):
            lengths = self._table.columns.rows[alive[:_ENTRIES], LENGTH].astype(np.int64)
            count = max(1, int(np.searchsorted(np.cumsum(lengths), _TOKENS, side="right")))
            parts += self._encode(alive[:count])
            alive = alive[count:]
        return parts
