"""Names of chunks and objects inside the store."""

from dataclasses import dataclass

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2


@dataclass(frozen=True)
class ChunkKey:
    """One chunk of one space in one domain, over all layer groups and ranks."""

    space_id: bytes
    domain: pb.Domain
    chain_hash: bytes


@dataclass(frozen=True)
class ObjectKey:
    """One chunk's KV of one layer group for one rank: the unit of storage."""

    chunk: ChunkKey
    group: int
    # Dense rank number: (tensor * pipeline_parallel + pipeline) * context_parallel + context.
    rank: int

    def text(self) -> str:
        """Stable printable name, for L2 keys and logs."""
        chunk = self.chunk
        return f"{chunk.space_id.hex()}:{chunk.domain}:{chunk.chain_hash.hex()}:{self.group}:{self.rank}"


def key_of(meta: object_pb2.ObjectMeta, rank: int) -> ObjectKey:
    return ObjectKey(ChunkKey(meta.space_id, meta.domain, meta.chain_hash), meta.group, rank)
