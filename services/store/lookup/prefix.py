"""The prefix leg: stored chunks that continue each other from the prompt's first token.

Needs no matcher. Whole chunks are found by chain hash. Where the chain breaks, the stored chunk that shares
most tokens with the prompt serves its beginning: KV of a chunk's first tokens depends on nothing after them.
"""

from itertools import islice

import numpy as np

from kvblend.v1 import common_pb2 as pb
from services.common.identity import Chunk as ChainChunk
from services.common.tokens import decode_tokens
from services.store.catalog import Chunk
from services.store.lookup.pieces import Pieces
from services.store.lookup.query import Query
from services.store.state import StoreState

# Stored continuations of one chunk that are compared; the latest first.
_MAX_CONTINUATIONS = 256


def walk(state: StoreState, query: Query, first_chunk: int) -> Pieces[Chunk]:
    """Whole chunks from `first_chunk` of the chain on, up to the first that is not here.

    Needs the lock. Nothing behind that first missing one is hashed.
    """
    chunks: list[Chunk] = []
    size = query.space.shape.chunk_tokens
    for index in range(first_chunk, query.count // size):
        asked = query.chunk(index)
        assert asked is not None
        found = next((found for key in query.prefix_keys(asked) if (found := state.usable(key))), None)
        if found is None:
            break
        chunks.append(found)
    positions = size * np.arange(first_chunk, first_chunk + len(chunks))
    return Pieces(positions, chunks, np.zeros_like(positions), np.full_like(positions, size), positions)


def edge(state: StoreState, query: Query, chunk_index: int) -> Pieces[Chunk]:
    """The best beginning for chunk `chunk_index` of the prompt, which is not here as a whole, if there is one.

    Needs the lock.
    """
    asked = query.chunk(chunk_index)
    if asked is None:
        return Pieces.none()
    wall = state.clock.wall()
    best: tuple[int, Chunk] | None = None
    for child in islice(state.catalog.children(query.space.space_id, asked.previous_hash), _MAX_CONTINUATIONS):
        if child.key.domain not in query.domains or not child.usable(wall):
            continue
        length = _shared(query, asked, child)
        better = best is None or (length, -child.key.domain) > (best[0], -best[1].key.domain)
        if length and better:
            best = length, child
    return Pieces.of([best[1]], [asked.first], [0], [best[0]], [asked.first]) if best else Pieces.none()


def _shared(query: Query, asked: ChainChunk, child: Chunk) -> int:
    """Tokens at the front that the prompt's chunk and a stored one have in common."""
    if child.key.chain_hash == asked.chain_hash:
        return asked.tokens
    if asked.has_opaque_span or not child.info.matchable:
        # More than tokens would have to agree: only the hash can tell.
        return 0
    stored = decode_tokens(child.info.tokens)
    length = min(len(stored), asked.tokens)
    differ = np.flatnonzero(stored[:length] != query.tokens[asked.first : asked.first + length])
    return int(differ[0]) if len(differ) else length


def why_broken(state: StoreState, query: Query, chunk_index: int) -> pb.Reason:
    """Why the chain ends before this chunk, where that is more than unknown text. Needs the lock."""
    asked = query.chunk(chunk_index)
    for key in query.prefix_keys(asked) if asked else ():
        chunk = state.catalog.get(key)
        if chunk is not None and not chunk.complete:
            return pb.REASON_INCOMPLETE_RANKS
    return pb.REASON_UNSPECIFIED
