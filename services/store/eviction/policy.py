"""What a policy is told, and what it is asked."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from services.store.catalog import Chunk


class Policy(Protocol):
    """Orders resident chunks by which should leave first. Not thread-safe. `now`: seconds that only ever grow.

    Protected chunks are the caller's to skip.
    """

    def added(self, chunk: Chunk, now: float, /) -> None:
        """It became resident."""
        ...

    def used(self, chunks: Sequence[Chunk], now: float, /) -> None:
        """One request reuses these, in the order of its tokens; all belong to one tenant."""
        ...

    def kept(self, chunks: Sequence[Chunk], now: float, /) -> None:
        """Who computed them offers them again: they are wanted, but this was no reuse."""
        ...

    def removed(self, chunk: Chunk, /) -> None:
        """It is resident no longer, for whatever reason."""
        ...

    def victims(self, now: float, /) -> Iterator[Chunk]:
        """Every resident chunk once, in the order in which they should go.

        Until the iterator is given up chunks may be removed, and nothing else may happen.
        """
        ...
