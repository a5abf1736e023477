"""The segments leg: what a matcher claims, held against what is truly here.

A matcher's answer is a hint: it may be late, and it comes over the network. Each piece is served only if the
chunk is in the arena in full, its tokens are the prompt's, and its context class may serve.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat

import numpy as np

from kvblend.v1 import common_pb2 as pb
from services.common.columns import Numbers, u32s
from services.common.errors import KvblendError
from services.common.identity import HASH_BYTES
from services.common.tokens import TOKEN_BYTES, encode_u32
from services.store.catalog import Chunk
from services.store.objects import ChunkKey
from services.store.query import Piece, Query
from services.store.state import StoreState


def claims_of(query: Query, columns: pb.SegmentColumns) -> list[Piece]:
    """A matcher's segments, chunk by chunk.

    Columns that do not fit each other are ignored as a whole; else segments that contradict themselves, the
    prompt or the segments before them.
    """
    try:
        starts, stored, lengths, skips, counts, chunk_lengths = map(
            u32s,
            (
                columns.query_positions,
                columns.stored_positions,
                columns.lengths,
                columns.skip_tokens,
                columns.chunk_counts,
                columns.chunk_lengths,
            ),
        )
    except KvblendError:
        return []
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


def _running_sum(values: Numbers) -> Numbers:
    """[n] -> [n + 1], from 0."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(values)))


def check(
    state: StoreState, query: Query, claims: Sequence[Piece]
) -> tuple[list[Piece], list[Chunk], list[tuple[Piece, pb.Reason]]]:
    """The pieces that may be served, the chunk behind each, and the claims that may not, with why not.

    REASON_EVICTED: the chunk is not in the arena. Needs the lock.
    """
    pieces: list[Piece] = []
    chunks: list[Chunk] = []
    refused: list[tuple[Piece, pb.Reason]] = []
    classes, same_tokens = query.context_classes, query.data.startswith
    for claim, chunk in zip(claims, state.all_usable([claim.key for claim in claims]), strict=True):
        if chunk is None:
            known = state.catalog.get(claim.key)
            refused.append((claim, pb.REASON_INCOMPLETE_RANKS if known and not known.complete else pb.REASON_EVICTED))
            continue
        info = chunk.info
        position, _, offset, length, stored = claim
        tokens, size = info.tokens, TOKEN_BYTES * length
        if offset or size != len(tokens):
            tokens = tokens[TOKEN_BYTES * offset : TOKEN_BYTES * offset + size]
        if info.context_class not in classes:
            refused.append((claim, pb.REASON_CONTEXT_CLASS_NOT_ALLOWED))
        elif not info.matchable:
            refused.append((claim, pb.REASON_OPAQUE_SPAN))
        elif size != len(tokens) or not same_tokens(tokens, TOKEN_BYTES * position):
            refused.append((claim, pb.REASON_UNKNOWN_TEXT))
            state.stats.add("false_claims")
        else:
            origin = info.stored_position + offset
            pieces.append(claim if stored == origin else claim._replace(stored_position=origin))
            chunks.append(chunk)
    return pieces, chunks, refused


def columns_of(pieces: Sequence[Piece], chunk_of: Mapping[ChunkKey, Chunk]) -> pb.SegmentColumns:
    """An answer's segments, out of pieces that are leased: those that follow each other in the prompt and where they
    were stored form one."""
    if not pieces:
        return pb.SegmentColumns()
    positions, keys, offsets, lengths, stored = zip(*pieces, strict=True)
    starts, lengths_of_all = np.array(positions), np.array(lengths)
    first = _run_starts(starts, lengths_of_all, np.array(offsets), np.array(stored), [key.domain for key in keys])
    ends = np.append(first[1:], len(pieces))
    infos = [chunk_of[keys[index]].info for index in first.tolist()]
    documents = {info.document: 0 for info in infos}
    documents = {document: index for index, document in enumerate(documents)}
    return pb.SegmentColumns(
        query_positions=encode_u32(starts[first]),
        stored_positions=encode_u32(np.array(stored)[first]),
        lengths=encode_u32(np.add.reduceat(lengths_of_all, first)),
        skip_tokens=encode_u32(np.array(offsets)[first]),
        domains=bytes([keys[index].domain for index in first.tolist()]),
        context_classes=bytes([info.context_class for info in infos]),
        document_indexes=encode_u32([documents[info.document] for info in infos]),
        documents=documents,
        chunk_counts=encode_u32(ends - first),
        chain_hashes=b"".join([key.chain_hash for key in keys]),
        chunk_lengths=encode_u32(lengths),
    )


def _run_starts(starts: Numbers, lengths: Numbers, offsets: Numbers, stored: Numbers, domains: list[int]) -> Numbers:
    """Indexes of the pieces that do not continue the one before them."""
    kinds = np.array(domains)
    continues = (
        (starts[1:] == starts[:-1] + lengths[:-1])
        & (offsets[1:] == 0)
        & (kinds[1:] == kinds[:-1])
        & (stored[1:] == stored[:-1] + lengths[:-1])
    )
    return np.flatnonzero(np.append(True, ~continues))
