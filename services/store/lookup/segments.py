"""The segments leg: what a matcher claims, held against what is truly here.

A matcher's answer is a hint: it may be late, and it comes over the network. Each piece is served only if the
chunk is in the arena in full, its tokens are the prompt's, and its context class may serve.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np

from kvblend.v1 import common_pb2 as pb
from services.common.columns import u32s
from services.common.errors import KvblendError
from services.common.identity import HASH_BYTES
from services.common.tokens import TOKEN_BYTES, encode_u32
from services.store.catalog import Chunk, facts_of
from services.store.lookup.kernels import chunks_of_segments, runs_of_pieces
from services.store.lookup.pieces import Piece, Pieces
from services.store.lookup.query import Query
from services.store.objects import FactColumns, Name
from services.store.state import StoreState


def claims_of(query: Query, columns: pb.SegmentColumns) -> Pieces[Name]:
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
    found = chunks_of_segments(starts, stored, lengths, skips, counts, chunk_lengths, domains, query.count)
    positions, offsets, lengths, stored, chunks, of_chunks = found
    names = zip(repeat(query.space.space_id), of_chunks.tolist(), hashes[chunks].tolist())
    return Pieces(positions, list(names), offsets, lengths, stored)


def check(
    state: StoreState, query: Query, claims: Pieces[Name]
) -> tuple[Pieces[Chunk], list[tuple[Piece[Name], pb.Reason]]]:
    """What may be served of the claims, and those that may not, with why not.

    REASON_EVICTED: the chunk is not in the arena. Needs the lock.
    """
    chunks = state.all_usable(claims.sources)
    refused: list[tuple[Piece[Name], pb.Reason]] = []
    if None in chunks:
        refused += _not_here(state, claims, chunks)
        claims = claims.at(np.flatnonzero([chunk is not None for chunk in chunks]))
    sources = [chunk for chunk in chunks if chunk is not None]
    here = Pieces(claims.positions, sources, claims.offsets, claims.lengths, claims.stored_positions)
    facts = facts_of(here.sources)
    reasons = _reasons_against(query, here, facts)
    here = replace(here, stored_positions=np.array(facts.stored_positions, np.int64) + here.offsets)
    if any(reasons):
        refused += [(claim, reason) for claim, reason in zip(claims, reasons, strict=True) if reason]
        here = here.at(np.flatnonzero([not reason for reason in reasons]))
        state.stats.add("false_claims", reasons.count(pb.REASON_UNKNOWN_TEXT))
    return here, refused


def _not_here(
    state: StoreState, claims: Pieces[Name], chunks: Sequence[Chunk | None]
) -> Iterator[tuple[Piece[Name], pb.Reason]]:
    for claim, chunk in zip(claims, chunks, strict=True):
        if chunk is None:
            known = state.catalog.get_each([claim.source])[0]
            yield claim, pb.REASON_INCOMPLETE_RANKS if known and not known.complete else pb.REASON_EVICTED


def _reasons_against(query: Query, here: Pieces[Chunk], facts: FactColumns) -> Sequence[pb.Reason]:
    """Why each of these must not be served; REASON_UNSPECIFIED: it may. Nothing at all: all may."""
    sizes = (TOKEN_BYTES * here.lengths).tolist()
    tokens = facts.tokens
    if here.offsets.any() or list(map(len, tokens)) != sizes:
        bounds = zip((TOKEN_BYTES * here.offsets).tolist(), sizes, strict=True)
        tokens = [part[offset : offset + size] for part, (offset, size) in zip(tokens, bounds, strict=True)]
    same = list(map(query.data.startswith, tokens, (TOKEN_BYTES * here.positions).tolist()))
    are_opaque = _opaque(query, here)
    kinds = set(zip(facts.context_classes, facts.matchable, strict=True))
    may_serve = all(matchable and of_class in query.context_classes for of_class, matchable in kinds)
    if may_serve and all(same) and not any(are_opaque) and list(map(len, tokens)) == sizes:
        return ()
    return [
        pb.REASON_CONTEXT_CLASS_NOT_ALLOWED
        if of_class not in query.context_classes
        else pb.REASON_OPAQUE_SPAN
        if not matchable or is_opaque
        else pb.REASON_UNSPECIFIED
        if is_same and size == len(part)
        else pb.REASON_UNKNOWN_TEXT
        for of_class, matchable, is_opaque, is_same, size, part in zip(
            facts.context_classes, facts.matchable, are_opaque, same, sizes, tokens, strict=True
        )
    ]


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
    facts = facts_of(pieces.sources)
    domains = np.frombuffer(bytes(facts.domains), np.uint8)
    first, tokens, chunks = runs_of_pieces(
        pieces.positions, pieces.offsets, pieces.lengths, pieces.stored_positions, domains
    )
    documents = [facts.documents[index] for index in first.tolist()]
    numbers = {document: number for number, document in enumerate(dict.fromkeys(documents))}
    return pb.SegmentColumns(
        query_positions=encode_u32(pieces.positions[first]),
        stored_positions=encode_u32(pieces.stored_positions[first]),
        lengths=encode_u32(tokens),
        skip_tokens=encode_u32(pieces.offsets[first]),
        domains=domains[first].tobytes(),
        context_classes=np.frombuffer(bytes(facts.context_classes), np.uint8)[first].tobytes(),
        document_indexes=encode_u32([numbers[document] for document in documents]),
        documents=numbers,
        chunk_counts=encode_u32(chunks),
        chain_hashes=b"".join(facts.chain_hashes),
        chunk_lengths=encode_u32(pieces.lengths),
    )
