"""The segments leg: what a matcher claims, held against what is truly here.

A matcher's answer is a hint: it may be late, and it comes over the network. Each piece is served only if the
chunk is in the arena in full, its tokens are the prompt's, and its context class may serve.
"""

from collections.abc import Iterator

import numpy as np

from kvblend.v1 import common_pb2 as pb
from services.common.identity import HASH_BYTES
from services.common.tokens import TOKEN_BYTES
from services.store.catalog import Chunk
from services.store.cover import hashes_of, join_runs, lengths_of
from services.store.objects import ChunkKey
from services.store.query import Piece, Query
from services.store.state import StoreState


def claims_of(query: Query, segments: list[pb.Segment]) -> list[Piece]:
    """A matcher's segments, chunk by chunk; segments that contradict themselves or the prompt are ignored."""
    claims: list[Piece] = []
    for segment in segments:
        pieces = list(_pieces(query, segment))
        end = claims[-1].end if claims else 0
        if pieces and pieces[0].position >= end and pieces[-1].end <= query.count:
            claims += pieces
    return claims


def _pieces(query: Query, segment: pb.Segment) -> Iterator[Piece]:
    hashes, lengths = segment.chain_hashes, segment.chunk_lengths
    count = len(lengths) // TOKEN_BYTES
    if len(lengths) % TOKEN_BYTES or len(hashes) != HASH_BYTES * count or segment.domain == pb.DOMAIN_BLENDED:
        return
    position, offset, stored = segment.query_position, segment.skip_tokens, segment.stored_position
    for number, length in enumerate(np.frombuffer(lengths, "<u4").tolist()):
        chain_hash = hashes[HASH_BYTES * number : HASH_BYTES * (number + 1)]
        if length:
            yield Piece(position, ChunkKey(query.space.space_id, segment.domain, chain_hash), offset, length, stored)
        position, offset, stored = position + length, 0, stored + length


def check(state: StoreState, query: Query, claim: Piece) -> tuple[Piece | None, pb.Reason]:
    """The piece that may be served, else (None, why not). REASON_EVICTED: the chunk is not in the arena.

    Needs the lock.
    """
    chunk = state.usable(claim.key)
    if chunk is None:
        known = state.catalog.get(claim.key)
        return None, pb.REASON_INCOMPLETE_RANKS if known and not known.complete else pb.REASON_EVICTED
    if chunk.info.context_class not in query.context_classes:
        return None, pb.REASON_CONTEXT_CLASS_NOT_ALLOWED
    if not chunk.info.matchable:
        return None, pb.REASON_OPAQUE_SPAN
    if not _same_tokens(query, claim, chunk):
        state.stats.add("false_claims")
        return None, pb.REASON_UNKNOWN_TEXT
    return claim._replace(stored_position=chunk.info.stored_position + claim.offset), pb.REASON_UNSPECIFIED


def _same_tokens(query: Query, claim: Piece, chunk: Chunk) -> bool:
    start, size = TOKEN_BYTES * claim.offset, TOKEN_BYTES * claim.length
    asked = TOKEN_BYTES * claim.position
    return chunk.info.tokens[start : start + size] == query.data[asked : asked + size]


def segments_of(state: StoreState, pieces: list[Piece]) -> list[pb.Segment]:
    """Segments of an answer, out of pieces that are leased. Needs the lock."""
    segments = []
    for run in join_runs(pieces):
        first = run[0]
        chunk = state.catalog.get(first.key)
        segments.append(
            pb.Segment(
                query_position=first.position,
                stored_position=first.stored_position,
                length=sum(piece.length for piece in run),
                domain=first.key.domain,
                context_class=chunk.info.context_class if chunk else pb.CONTEXT_CLASS_UNSPECIFIED,
                document=chunk.info.document if chunk else "",
                chain_hashes=hashes_of(run),
                chunk_lengths=lengths_of(run),
                skip_tokens=first.offset,
            )
        )
    return segments
