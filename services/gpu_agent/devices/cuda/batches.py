"""What a transfer moves, cut into batches that fit a staging slot, as the tables that a kernel reads.

A batch's fragments lie one after the other in the slot. A fragment is the wanted tokens of some
neighbouring planes of one object, [planes, tokens, heads, size] without gaps; plane number
layer * planes_of_a_layer + kind. A tile is what one program of the kernel moves of each plane.

The tables are plain arrays: tests read them on a CPU as the kernel does on a GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from services.common.checksums import WORD_BYTES, with_length
from services.gpu_agent.devices.base import Bytes, Piece
from services.gpu_agent.engines.layouts import GroupShape
from services.gpu_agent.engines.rope import RopeSpec

Floats = npt.NDArray[np.float32]

# Columns of a tile: where its fragment's first plane starts in the slot and the distance of its planes, in
# elements; its tokens in `slots`; its first token in the fragment; its planes; its row of cos and sin, or -1; where
# the terms of its words are added up (services/common/checksums.py), or -1; the number of its first word in the block
# and the words from one of the block's planes to the next. Planes are counted from the batch's `base`, and words as if
# the block began there.
TILE = (
    "start",
    "pitch",
    "row",
    "tokens",
    "first_token",
    "first_plane",
    "planes",
    "rotation",
    "sum",
    "first_word",
    "plane_words",
)
# Bounds of one batch, so that its tables fit buffers of a fixed size.
MAX_TOKENS = 1 << 14
MAX_FRAGMENTS = 1 << 10
# A sum of terms for each fragment.
SUMS_BYTES = MAX_FRAGMENTS * 8


@dataclass(frozen=True)
class Fragment:
    """`planes` planes of a piece's object from `first_plane` on, at byte `start` of the slot."""

    # Which of the transfer's pieces this is of; it may be narrower than that.
    number: int
    piece: Piece
    first_plane: int
    planes: int
    start: int
    # Bytes of one token of one plane.
    row_bytes: int

    @property
    def width(self) -> int:
        """Bytes of one plane's wanted tokens."""
        return len(self.piece.slots) * self.row_bytes

    @property
    def pitch(self) -> int:
        """Bytes from one plane of the object to the next."""
        return self.piece.tokens * self.row_bytes

    @property
    def nbytes(self) -> int:
        return self.planes * self.width

    @property
    def host_start(self) -> int:
        """The first wanted byte in the block."""
        return self.first_plane * self.pitch + self.piece.first * self.row_bytes

    def host_rows(self) -> Bytes:
        """The wanted bytes in the block, a view [planes, width]."""
        planes = self.piece.block.reshape(-1, self.pitch)[self.first_plane : self.first_plane + self.planes]
        return planes[:, self.piece.first * self.row_bytes :][:, : self.width]


@dataclass(frozen=True)
class Tables:
    """`tiles` [n, len(TILE)] i64; `slots` [tokens] i32; `cos`, `sin` [rotations, pairs] f32."""

    tiles: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int32]
    cos: Floats
    sin: Floats


@dataclass
class Batch:
    """`summed` are the fragments whose terms are added up, in the order of the sums."""

    fragments: list[Fragment]
    base: int
    make_tables: Callable[["Batch"], Tables]

    @cached_property
    def tables(self) -> Tables:
        """Not made before they are asked for: the fragments' copies need not wait for them."""
        return self.make_tables(self)

    @cached_property
    def summed(self) -> list[Fragment]:
        return [fragment for fragment in self.fragments if fragment.piece.checked]

    @property
    def most_planes(self) -> int:
        return max(fragment.planes for fragment in self.fragments)


@dataclass
class _Filling:
    """The batch being filled."""

    fragments: list[Fragment] = field(default_factory=list)
    nbytes: int = 0
    tokens: int = 0

    def room(self, slot_bytes: int, piece: Piece, width: int) -> int:
        """Planes of this piece that still fit."""
        if len(self.fragments) == MAX_FRAGMENTS or self.tokens + len(piece.slots) > MAX_TOKENS:
            return 0
        return (slot_bytes - self.nbytes) // width


class Batches:
    """Pieces of one layer group, cut for slots of `slot_bytes` bytes, at least one token of one plane each.

    `first_number` is that of the first piece.
    """

    def __init__(
        self,
        shape: GroupShape,
        rope: RopeSpec,
        slot_bytes: int,
        tile_tokens: int,
        pieces: Sequence[Piece],
        first_number: int = 0,
    ) -> None:
        self._shape = shape
        self._rope = rope
        self._slot_bytes = slot_bytes
        self._tile_tokens = tile_tokens
        self._row_bytes = shape.heads * shape.head_size * shape.item_bytes
        self._first_number = first_number
        self._pieces = pieces
        self._narrow = list(self._cut_wide(pieces))
        # By the planes of a layer range, and the number of the batch in it: as many planes are cut in the same way
        # wherever they begin.
        self._known: dict[tuple[int, int], Tables] = {}

    def of(self, layers: range | None = None) -> Iterator[Batch]:
        """All layers, or some neighbouring ones."""
        some = range(self._shape.layers) if layers is None else layers
        first, end = some.start * self._shape.planes, some.stop * self._shape.planes
        for number, fragments in enumerate(self._fill(first, end)):
            yield Batch(fragments, first, partial(self._tables, (end - first, number)))

    def _fill(self, first: int, end: int) -> Iterator[list[Fragment]]:
        """Planes `first` to `end` of every piece, slot by slot."""
        filling = _Filling()
        for number, piece in self._narrow:
            plane = first
            width = len(piece.slots) * self._row_bytes
            while plane < end:
                count = min(filling.room(self._slot_bytes, piece, width), end - plane)
                if count == 0:
                    yield filling.fragments
                    filling = _Filling()
                    continue
                filling.fragments.append(Fragment(number, piece, plane, count, filling.nbytes, self._row_bytes))
                filling.nbytes += count * width
                filling.tokens += len(piece.slots)
                plane += count
        if filling.fragments:
            yield filling.fragments

    def checksums(self, terms: Mapping[int, int]) -> list[int | None]:
        """Of each piece, out of the sums of its words' terms; None: they were not added up."""
        return [
            with_length(terms[number], piece.block.nbytes) if self._sums(piece) else None
            for number, piece in enumerate(self._pieces, self._first_number)
        ]

    def _sums(self, piece: Piece) -> bool:
        """Whether the terms of its words are added up: then each of a token's planes is whole words."""
        return piece.checked and piece.whole and self._row_bytes % WORD_BYTES == 0

    def _cut_wide(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
        """Pieces of so few tokens that a slot holds a plane of each, checked if terms are added up; their numbers."""
        most = min(MAX_TOKENS, self._slot_bytes // self._row_bytes)
        for number, piece in enumerate(pieces, self._first_number):
            checked = self._sums(piece)
            if 0 < len(piece.slots) <= most and checked == piece.checked:
                yield number, piece
                continue
            for first in range(0, len(piece.slots), most):
                slots = piece.slots[first : first + most]
                yield number, replace(piece, first=piece.first + first, slots=slots, checked=checked)

    def _tables(self, key: tuple[int, int], batch: Batch) -> Tables:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._make_tables(batch)
        return known

    def _make_tables(self, batch: Batch) -> Tables:
        fragments = batch.fragments
        deltas = self._deltas(fragments)
        rotation = {delta: row for row, delta in enumerate(deltas.tolist())}
        cos, sin = self._rope.tables(deltas)
        slots = np.concatenate([fragment.piece.slots for fragment in fragments]).astype(np.int32)
        rotations = [rotation.get(fragment.piece.delta, -1) for fragment in fragments]
        return Tables(self._tiles(batch, rotations), slots, cos, sin)

    def _deltas(self, fragments: list[Fragment]) -> npt.NDArray[np.int64]:
        """Each distance by which something is really rotated, once."""
        moved = {fragment.piece.delta for fragment in fragments} - {0} if self._rope.rotates else set()
        return np.array(sorted(moved), np.int64)

    def _tiles(self, batch: Batch, rotations: list[int]) -> npt.NDArray[np.int64]:
        fragments, item = batch.fragments, self._shape.item_bytes
        facts = np.array(
            [
                (
                    fragment.start // item,
                    fragment.width // item,
                    len(fragment.piece.slots),
                    fragment.first_plane - batch.base,
                    fragment.planes,
                    fragment.piece.checked,
                    (fragment.host_start - batch.base * fragment.pitch) // WORD_BYTES,
                    fragment.pitch // WORD_BYTES,
                )
                for fragment in fragments
            ],
            np.int64,
        )
        starts, pitches, tokens, first_planes, planes, checked, words, plane_words = facts.T
        counts = -(-tokens // self._tile_tokens)
        of = np.repeat(np.arange(len(fragments)), counts)
        # Tokens of the fragment in front of each of its tiles.
        first = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * self._tile_tokens
        sums = np.where(checked != 0, np.cumsum(checked) - 1, -1)
        columns = (
            starts[of],
            pitches[of],
            (np.cumsum(tokens) - tokens)[of] + first,
            np.minimum(self._tile_tokens, tokens[of] - first),
            first,
            first_planes[of],
            planes[of],
            np.array(rotations, np.int64)[of],
            sums[of],
            1 + words[of] + first * self._row_bytes // WORD_BYTES,
            plane_words[of],
        )
        return np.stack(columns, axis=1)


def table_bytes(pairs: int) -> int:
    """Bytes that the tables of the largest batch take for a rope of `pairs` pairs; see `pack`."""
    tiles = (MAX_TOKENS + MAX_FRAGMENTS) * len(TILE) * 8
    return tiles + MAX_TOKENS * 4 + 2 * MAX_FRAGMENTS * pairs * 4 + SUMS_BYTES + 5 * _ALIGN


_ALIGN = 256


@dataclass(frozen=True)
class Packed:
    """Where each table of a batch begins in one buffer, and how long they are together, in bytes.

    `base` is the batch's, in planes.
    """

    tiles: int
    slots: int
    cos: int
    sin: int
    sums: int
    base: int
    nbytes: int


def pack(batch: Batch, buffer: Bytes) -> Packed:
    """Writes the tables one after the other, each at a multiple that a kernel can load widely; sums begin at 0."""
    starts: list[int] = []
    end = 0
    tables = batch.tables
    for table in (tables.tiles, tables.slots, tables.cos, tables.sin, np.zeros(len(batch.summed), np.uint64)):
        starts.append(end)
        raw = table.reshape(-1).view(np.uint8)
        buffer[end : end + len(raw)] = raw
        end += -(-len(raw) // _ALIGN) * _ALIGN
    tiles, slots, cos, sin, sums = starts
    return Packed(tiles, slots, cos, sin, sums, batch.base, end)
