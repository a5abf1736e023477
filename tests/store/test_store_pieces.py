"""Pieces of stored chunks as columns: compared with a slow reading, piece by piece."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblend.v1 import common_pb2 as pb
from services.store.lookup.pieces import Piece, Pieces
from services.store.objects import ChunkKey

Claim = Piece[ChunkKey]


@st.composite
def ascending(draw: st.DrawFn) -> list[Claim]:
    pieces: list[Claim] = []
    position = 0
    for number in range(draw(st.integers(0, 6))):
        position += draw(st.integers(0, 3))
        length = draw(st.integers(1, 5))
        key = ChunkKey(b"s" * 16, pb.DOMAIN_SEGMENT, bytes([number]) * 32)
        pieces.append(Piece(position, key, draw(st.integers(0, 4)), length, draw(st.integers(0, 100))))
        position += length
    return pieces


def slowly_trimmed(pieces: list[Claim], first: int, end: int) -> list[Claim]:
    kept = []
    for piece in pieces:
        inside = [position for position in range(piece.position, piece.end) if first <= position < end]
        if inside:
            skip = inside[0] - piece.position
            kept.append(Piece(inside[0], piece.source, piece.offset + skip, len(inside), piece.stored_position + skip))
    return kept


@settings(max_examples=400, deadline=None)
@given(ascending(), st.integers(0, 30), st.integers(0, 30))
def test_trimming_keeps_exactly_the_tokens_inside(pieces: list[Claim], first: int, end: int) -> None:
    columns = Pieces.of_each(pieces)
    assert list(columns) == pieces
    assert (columns.tokens, columns.end) == (sum(piece.length for piece in pieces), max([0, *(p.end for p in pieces)]))
    assert list(columns.trim(first, end)) == slowly_trimmed(pieces, first, end)


@settings(max_examples=200, deadline=None)
@given(ascending(), st.data())
def test_some_of_them_in_order_and_one_after_the_other(pieces: list[Claim], data: st.DataObject) -> None:
    columns = Pieces.of_each(pieces)
    chosen = [number for number in range(len(pieces)) if data.draw(st.booleans())]
    assert list(columns.at(np.array(chosen, np.int64))) == [pieces[number] for number in chosen]
    cut = data.draw(st.integers(0, len(pieces)))
    front, back = columns.between(0, cut), columns.between(cut, len(pieces))
    assert (list(front), list(back)) == (pieces[:cut], pieces[cut:])
    assert list(front.followed_by(back)) == pieces
