"""The segments leg: what a matcher claims, held against what is truly here.

A matcher's answer is a hint: it may be late, and it comes over the network. Each piece is served only if the
chunk is in the arena in full, its tokens are the prompt's, and its context class may serve.
"""

from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.identity import HASH_BYTES
from services.common.tokens import TOKEN_BYTES
from services.store.catalog import Chunk
from services.store.cover import hashes_of, join_runs, lengths_of
from services.store.objects import ChunkKey
from services.store.query import Piece, Query
from services.store.state import StoreState


def claims_of(query: Query, columns: matcher_pb2.SegmentColumns) -> list[Piece]:
    """A matcher's segments, chunk by chunk.

    Columns that do not fit each other are ignored as a whole; else segments that contradict themselves, the
    prompt or the segments before them.
    """
    starts, stored, lengths = _u32(columns.query_positions), _u32(columns.stored_positions), _u32(columns.lengths)
    skips, counts, chunk_lengths = _u32(columns.skip_tokens), _u32(columns.chunk_counts), _u32(columns.chunk_lengths)
    domains = np.frombuffer(columns.domains, np.uint8)
    if len({column.size for column in (starts, stored, lengths, skips, counts, domains)}) > 1:
        return []
    if counts.sum() != chunk_lengths.size or len(columns.chain_hashes) != HASH_BYTES * chunk_lengths.size:
        return []
    hashes = np.frombuffer(columns.chain_hashes, f"V{HASH_BYTES}")
    # Tokens before each chunk, of all segments'; and the number of each segment's first chunk.
    before, first = _running_sum(chunk_lengths), _running_sum(counts)
    sound = (domains == pb.DOMAIN_EXACT) | (domains == pb.DOMAIN_SEGMENT)
    sound &= before[first[1:]] - before[first[:-1]] == lengths
    sound &= starts + lengths <= query.count
    covered = np.maximum.accumulate(np.where(sound, starts + lengths, 0))
    sound[1:] &= starts[1:] >= covered[:-1]
    # Of each chunk its segment, the tokens of the segment before it, and its own tokens before the segment.
    segment = np.repeat(np.arange(counts.size), counts)
    inside = before[:-1] - before[first[segment]]
    offsets = np.where(np.arange(segment.size) == first[segment], skips[segment], 0)
    kept = np.flatnonzero(sound[segment] & (chunk_lengths > 0))
    segment, inside = segment[kept], inside[kept]
    keys = map(ChunkKey, repeat(query.space.space_id), domains[segment].tolist(), hashes[kept].tolist())
    numbers = starts[segment] + inside, offsets[kept], chunk_lengths[kept], stored[segment] + inside
    positions, offsets_of, lengths_of_pieces, origins = (column.tolist() for column in numbers)
    return list(map(Piece, positions, keys, offsets_of, lengths_of_pieces, origins))


def _u32(column: bytes) -> npt.NDArray[np.int64]:
    """Nothing if the bytes are not whole numbers."""
    whole = column if len(column) % TOKEN_BYTES == 0 else b""
    return np.frombuffer(whole, "<u4").astype(np.int64)


def _running_sum(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[n] -> [n + 1], from 0."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(values)))


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
