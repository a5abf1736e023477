"""The segments leg: what a matcher claims, held against what is truly here.

A matcher's answer is a hint: it may be late, and it comes over the network. Each piece is served only if the
chunk is in the arena in full, its tokens are the prompt's, and its context class may serve.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvblend.v1 import common_pb2 as pb
from services.common.columns import Numbers, u32s
from services.common.errors import KvblendError
from services.common.identity import HASH_BYTES
from services.common.tokens import TOKEN_BYTES, encode_u32
from services.store.catalog import Chunk
from services.store.lookup.pieces import Piece, Pieces
from services.store.lookup.query import Query
from services.store.objects import ChunkKey
from services.store.state import StoreState

Bytes = npt.NDArray[np.uint8]


def claims_of(query: Query, columns: pb.SegmentColumns) -> Pieces[ChunkKey]:
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
        return Pieces.none()
    domains = np.frombuffer(columns.domains, np.uint8)
    if len({column.size for column in (starts, stored, lengths, skips, counts, domains)}) > 1:
        return Pieces.none()
    if counts.sum() != chunk_lengths.size or len(columns.chain_hashes) != HASH_BYTES * chunk_lengths.size:
        return Pieces.none()
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
    keys = list(map(ChunkKey, repeat(query.space.space_id), domains[segment].tolist(), hashes[kept].tolist()))
    return Pieces(starts[segment] + inside, keys, offsets[kept], chunk_lengths[kept], stored[segment] + inside)


def _running_sum(values: Numbers) -> Numbers:
    """[n] -> [n + 1], from 0."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(values)))


def check(
    state: StoreState, query: Query, claims: Pieces[ChunkKey]
) -> tuple[Pieces[Chunk], list[tuple[Piece[ChunkKey], pb.Reason]]]:
    """What may be served of the claims, and those that may not, with why not.

    REASON_EVICTED: the chunk is not in the arena. Needs the lock.
    """
    chunks = state.all_usable(claims.sources)
    refused: list[tuple[Piece[ChunkKey], pb.Reason]] = []
    if None in chunks:
        refused += _not_here(state, claims, chunks)
        claims = claims.at(np.flatnonzero([chunk is not None for chunk in chunks]))
    here = Pieces(
        claims.positions, [chunk for chunk in chunks if chunk], claims.offsets, claims.lengths, claims.stored_positions
    )
    reasons = _reasons_against(state, query, here)
    if any(reasons):
        refused += [(claim, reason) for claim, reason in zip(claims, reasons, strict=True) if reason]
        here = here.at(np.flatnonzero([not reason for reason in reasons]))
    origins = np.array([chunk.info.stored_position for chunk in here.sources], np.int64)
    return replace(here, stored_positions=origins + here.offsets), refused


def _not_here(
    state: StoreState, claims: Pieces[ChunkKey], chunks: Sequence[Chunk | None]
) -> Iterator[tuple[Piece[ChunkKey], pb.Reason]]:
    for claim, chunk in zip(claims, chunks, strict=True):
        if chunk is None:
            known = state.catalog.get(claim.source)
            yield claim, pb.REASON_INCOMPLETE_RANKS if known and not known.complete else pb.REASON_EVICTED


def _reasons_against(state: StoreState, query: Query, here: Pieces[Chunk]) -> list[pb.Reason]:
    """Why each of these must not be served; REASON_UNSPECIFIED: it may."""
    infos = [chunk.info for chunk in here.sources]
    sizes = (TOKEN_BYTES * here.lengths).tolist()
    tokens = [info.tokens for info in infos]
    offsets = TOKEN_BYTES * here.offsets
    for index in np.flatnonzero((offsets > 0) | (np.fromiter(map(len, tokens), np.int64, len(tokens)) != sizes)):
        tokens[index] = tokens[index][offsets[index] : offsets[index] + sizes[index]]
    same = map(query.data.startswith, tokens, (TOKEN_BYTES * here.positions).tolist())
    classes = query.context_classes
    reasons = [
        pb.REASON_CONTEXT_CLASS_NOT_ALLOWED
        if info.context_class not in classes
        else pb.REASON_OPAQUE_SPAN
        if not info.matchable or is_opaque
        else pb.REASON_UNSPECIFIED
        if is_same and size == len(part)
        else pb.REASON_UNKNOWN_TEXT
        for info, is_opaque, is_same, size, part in zip(infos, _opaque(query, here), same, sizes, tokens, strict=True)
    ]
    false = reasons.count(pb.REASON_UNKNOWN_TEXT)
    if false:
        state.stats.add("false_claims", false)
    return reasons


def _opaque(query: Query, here: Pieces[Chunk]) -> list[bool]:
    """Which of these hold tokens of the prompt that stand for something else: that tokens agree says nothing there."""
    found = np.zeros(len(here), bool)
    for span in query.spans:
        found |= (here.positions < span.offset + span.length) & (here.ends > span.offset)
    flags: list[bool] = found.tolist()
    return flags


def columns_of(pieces: Pieces[Chunk]) -> pb.SegmentColumns:
    """An answer's segments, out of pieces that are leased: those that follow each other in the prompt and where they
    were stored form one."""
    if not len(pieces):
        return pb.SegmentColumns()
    keys = [chunk.key for chunk in pieces.sources]
    domains = bytes([key.domain for key in keys])
    first = _run_starts(pieces, np.frombuffer(domains, np.uint8))
    infos = [pieces.sources[index].info for index in first.tolist()]
    documents = [info.document for info in infos]
    numbers = {document: number for number, document in enumerate(dict.fromkeys(documents))}
    return pb.SegmentColumns(
        query_positions=encode_u32(pieces.positions[first]),
        stored_positions=encode_u32(pieces.stored_positions[first]),
        lengths=encode_u32(np.add.reduceat(pieces.lengths, first)),
        skip_tokens=encode_u32(pieces.offsets[first]),
        domains=bytes([domains[index] for index in first]),
        context_classes=bytes([info.context_class for info in infos]),
        document_indexes=encode_u32([numbers[document] for document in documents]),
        documents=numbers,
        chunk_counts=encode_u32(np.diff(first, append=len(pieces))),
        chain_hashes=b"".join([key.chain_hash for key in keys]),
        chunk_lengths=encode_u32(pieces.lengths),
    )


def _run_starts(pieces: Pieces[Chunk], domains: Bytes) -> Numbers:
    """Numbers of the pieces that do not continue the one before them."""
    stored_ends = pieces.stored_positions + pieces.lengths
    continues = (
        (pieces.positions[1:] == pieces.ends[:-1])
        & (pieces.offsets[1:] == 0)
        & (domains[1:] == domains[:-1])
        & (pieces.stored_positions[1:] == stored_ends[:-1])
    )
    return np.flatnonzero(np.append(True, ~continues))
