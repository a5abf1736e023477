"""What the store makes of a matcher's columns: compared with a slow reading, segment by segment."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from store_kit import Segment, columns_of

from kvblend.v1 import common_pb2 as pb
from services.common.tokens import encode_u32
from services.store.lookup.pieces import Piece
from services.store.lookup.segments import claims_of
from services.store.objects import ChunkKey

PROMPT = 40
QUERY: Any = SimpleNamespace(count=PROMPT, space=SimpleNamespace(space_id=b"s" * 16))
COLUMNS = [
    "query_positions",
    "stored_positions",
    "lengths",
    "skip_tokens",
    "domains",
    "chunk_counts",
    "chain_hashes",
    "chunk_lengths",
]


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    lengths = draw(st.lists(st.integers(0, 6), max_size=4))
    return Segment(
        query_position=draw(st.integers(0, PROMPT + 2)),
        stored_position=draw(st.integers(0, 1 << 31)),
        length=sum(lengths) + draw(st.sampled_from([0, 0, 0, 0, 1])),
        domain=draw(st.sampled_from([pb.DOMAIN_EXACT, pb.DOMAIN_SEGMENT, pb.DOMAIN_SEGMENT, pb.DOMAIN_BLENDED, 0])),
        chain_hashes=b"".join(bytes([draw(st.integers(0, 255))]) * 32 for _ in lengths),
        chunk_lengths=encode_u32(lengths),
        skip_tokens=draw(st.integers(0, 5)),
    )


def slow_claims(found: list[Segment]) -> list[Piece[ChunkKey]]:
    claims: list[Piece[ChunkKey]] = []
    covered = 0
    for segment in found:
        lengths = list(memoryview(segment.chunk_lengths).cast("I"))
        fits = sum(lengths) == segment.length and segment.query_position + segment.length <= PROMPT
        if segment.domain not in (pb.DOMAIN_EXACT, pb.DOMAIN_SEGMENT) or not fits:
            continue
        follows = segment.query_position >= covered
        covered = max(covered, segment.query_position + segment.length)
        position, offset, stored = segment.query_position, segment.skip_tokens, segment.stored_position
        for number, length in enumerate(lengths):
            key = ChunkKey(b"s" * 16, segment.domain, segment.chain_hashes[32 * number : 32 * (number + 1)])
            if length and follows:
                claims.append(Piece(position, key, offset, length, stored))
            position, offset, stored = position + length, 0, stored + length
    return claims


@settings(max_examples=500, deadline=None)
@given(st.lists(segments(), max_size=6), st.booleans())
def test_the_pieces_are_those_of_a_slow_reading(found: list[Segment], ascending: bool) -> None:
    if ascending:
        found.sort(key=lambda segment: segment.query_position)
    claims = list(claims_of(QUERY, columns_of(found)))
    assert claims == slow_claims(found)
    ends = [0, *(claim.end for claim in claims)]
    assert all(claim.position >= end for claim, end in zip(claims, ends, strict=False))
    assert ends[-1] <= PROMPT


@settings(max_examples=300, deadline=None)
@given(
    st.lists(segments(), min_size=1, max_size=3), st.sampled_from(COLUMNS), st.sampled_from([b"", b"\0", b"\xff" * 4])
)
def test_columns_that_do_not_fit_each_other_are_no_claim(found: list[Segment], column: str, more: bytes) -> None:
    columns = columns_of(found)
    before = getattr(columns, column)
    setattr(columns, column, before + more if more else before[:-1])
    if getattr(columns, column) != before:
        assert not len(claims_of(QUERY, columns))


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({column: st.binary(max_size=16) for column in COLUMNS}))
def test_no_bytes_raise(columns: dict[str, bytes]) -> None:
    claims_of(QUERY, pb.SegmentColumns(**columns))
