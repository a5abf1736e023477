"""Room for a large block when free space is in pieces: neighbours of one piece leave together."""

from collections.abc import Iterator
from typing import Protocol

from services.store.arena.blocks import BlockPool
from services.store.catalog import Catalog, Chunk

# What a byte costs whatever its age: of equally old neighbours fewer go.
_BASE_COST = 0.1


class _Held(Protocol):
    pool: BlockPool
    catalog: Catalog


def in_the_way(held: _Held, payload_bytes: int, meta_bytes: int, oldest: Chunk, now: float) -> Iterator[Chunk]:
    """Chunks whose going makes one run for a new block; the caller removes each before it asks for the next.

    None while little is free in pieces: then the policy's order is better. Else those that were used least recently:
    a byte costs from 0 (used when the policy's next victim `oldest` was) to 1 (used `now`), and the base.
    """
    oldest_age = max(now - oldest.last_used, 1e-9)

    def cost(header: int, size: int) -> float | None:
        chunk = held.catalog.of_header(header)
        if chunk is None or chunk.protectors or chunk.pinned:
            return None
        return size * (_BASE_COST + max(0.0, 1 - (now - chunk.last_used) / oldest_age))

    for header in held.pool.in_the_way(payload_bytes, meta_bytes, cost):
        chunk = held.catalog.of_header(header)
        if chunk is not None:
            yield chunk
