"""Objects that were leased, as an agent is told of them."""

from collections.abc import Sequence

import numpy as np

from kvblend.v1 import store_pb2
from services.common.columns import encode_u64
from services.common.tokens import TOKEN_BYTES, encode_u32
from services.store.catalog import Chunk, facts_of
from services.store.state import StoreState, rank_objects


def object_columns(state: StoreState, chunks: Sequence[Chunk], rank: int) -> store_pb2.ObjectColumns:
    """One rank's objects of complete, resident chunks of one space. Needs the lock."""
    if not chunks:
        return store_pb2.ObjectColumns()
    headers, of_object = rank_objects(chunks, rank)
    names = ("generation", "slab", "offset", "payload_bytes", "checksum")
    generations, slabs, offsets, payload_bytes, checksums = state.pool.headers.columns(headers, *names)
    groups = range(chunks[0].info.groups)
    facts = facts_of(of_object)
    return store_pb2.ObjectColumns(
        headers=encode_u32(headers),
        generations=encode_u64(generations),
        slabs=encode_u32(slabs),
        offsets=encode_u64(offsets),
        payload_bytes=encode_u64(payload_bytes),
        groups=encode_u32(list(groups) * len(chunks)),
        chain_hashes=b"".join(facts.chain_hashes),
        domains=bytes(facts.domains),
        tokens=encode_u32(np.array(list(map(len, facts.tokens))) // TOKEN_BYTES),
        stored_positions=encode_u32(facts.stored_positions),
        checksums=encode_u64(checksums),
        verify=state.must_verify(headers),
    )
