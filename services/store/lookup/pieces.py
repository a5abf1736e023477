"""The parts of stored chunks that serve a prompt, as columns: a long prompt has hundreds, each looked at often."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from services.common.columns import Numbers
from services.store.catalog import Chunk
from services.store.objects import Name

# What a piece is a part of: a chunk that is here, or the name of one that is claimed to be.
Source = TypeVar("Source", bound=Chunk | Name)


class Piece(NamedTuple, Generic[Source]):
    """Tokens [offset, offset + length) of a stored chunk serve the prompt from `position` on."""

    position: int
    source: Source
    offset: int
    length: int
    # Position of the first of these tokens when its KV was computed.
    stored_position: int

    @property
    def end(self) -> int:
        return self.position + self.length


@dataclass(frozen=True)
class Pieces(Generic[Source]):
    """N pieces (see `Piece`), ascending, not overlapping. Numbers are [N]."""

    positions: Numbers
    sources: Sequence[Source]
    offsets: Numbers
    lengths: Numbers
    stored_positions: Numbers

    @classmethod
    def of(cls, sources: Sequence[Source], *numbers: Sequence[int]) -> "Pieces[Source]":
        """From columns of plain numbers: positions, offsets, lengths, stored positions."""
        positions, offsets, lengths, stored = (np.array(column, np.int64) for column in numbers)
        return cls(positions, sources, offsets, lengths, stored)

    @classmethod
    def of_each(cls, pieces: "Sequence[Piece[Source]]") -> "Pieces[Source]":
        positions, sources, *numbers = zip(*pieces, strict=True) if pieces else ([], [], [], [], [])
        return cls.of(list(sources), positions, *numbers)

    @classmethod
    def none(cls) -> "Pieces[Source]":
        return cls.of([], [], [], [], [])

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[Piece[Source]]:
        numbers = (self.offsets.tolist(), self.lengths.tolist(), self.stored_positions.tolist())
        return map(Piece, self.positions.tolist(), self.sources, *numbers)

    @property
    def ends(self) -> Numbers:
        return self.positions + self.lengths

    @property
    def end(self) -> int:
        """End of the last one in the prompt; 0: there is none."""
        return int(self.positions[-1] + self.lengths[-1]) if self.sources else 0

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def at(self, numbers: Numbers) -> "Pieces[Source]":
        """Those of these numbers, which ascend."""
        sources = [self.sources[number] for number in numbers.tolist()]
        columns = (self.offsets, self.lengths, self.stored_positions)
        return Pieces(self.positions[numbers], sources, *(column[numbers] for column in columns))

    def between(self, first: int, end: int) -> "Pieces[Source]":
        """Pieces `first` to `end` of these, by number."""
        part = slice(first, end)
        return Pieces(
            self.positions[part],
            self.sources[part],
            self.offsets[part],
            self.lengths[part],
            self.stored_positions[part],
        )

    def followed_by(self, others: "Pieces[Source]") -> "Pieces[Source]":
        if not self.sources:
            return others
        return Pieces(
            np.append(self.positions, others.positions),
            [*self.sources, *others.sources],
            np.append(self.offsets, others.offsets),
            np.append(self.lengths, others.lengths),
            np.append(self.stored_positions, others.stored_positions),
        )

    def trim(self, first: int, end: int) -> "Pieces[Source]":
        """The parts that lie in [first, end) of the prompt."""
        if first >= end:
            return self.between(0, 0)
        ends = self.ends
        low = int(np.searchsorted(ends, first, "right"))
        high = max(low, int(np.searchsorted(self.positions, end, "left")))
        inside = self.between(low, high)
        if low == high or (self.positions[low] >= first and ends[high - 1] <= end):
            return inside
        starts = np.maximum(inside.positions, first)
        skips = starts - inside.positions
        lengths = np.minimum(ends[low:high], end) - starts
        return Pieces(starts, inside.sources, inside.offsets + skips, lengths, inside.stored_positions + skips)
