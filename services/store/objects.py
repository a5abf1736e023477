"""Names of chunks and objects inside the store."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.common.identity import OBJECT_FORMAT_VERSION
from services.common.tokens import TOKEN_BYTES


class ChunkKey(NamedTuple):
    """One chunk of one space in one domain, over all layer groups and ranks."""

    space_id: bytes
    domain: pb.Domain
    chain_hash: bytes


# A ChunkKey, or a tuple that equals it.
Name = tuple[bytes, pb.Domain, bytes]


class Facts(NamedTuple):
    """What answers to a lookup say of a chunk. An answer has hundreds: they are turned to columns as a whole."""

    chain_hash: bytes
    domain: pb.Domain
    tokens: bytes
    stored_position: int
    context_class: pb.ContextClass
    matchable: bool
    document: str


class FactColumns(NamedTuple):
    """Facts of n chunks, each column [n]."""

    chain_hashes: Sequence[bytes] = ()
    domains: Sequence[pb.Domain] = ()
    tokens: Sequence[bytes] = ()
    stored_positions: Sequence[int] = ()
    context_classes: Sequence[pb.ContextClass] = ()
    matchable: Sequence[bool] = ()
    documents: Sequence[str] = ()


class ObjectKey(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """What all objects of a chunk have in common, beside the key."""

    model_space_id: bytes
    tenant: str
    previous_hash: bytes
    tokens: bytes = field(repr=False)
    chunk_tokens: int
    stored_position: int
    context_class: pb.ContextClass
    # The first name that the text was stored under; empty: none.
    document: str
    # Layer groups and ranks that together make the chunk usable.
    groups: int
    ranks: int
    matchable: bool
    # BLENDED, and at least half of its text is stored elsewhere.
    duplicate: bool = False

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def fits(self, other: "ChunkInfo") -> bool:
        """Objects with these infos may form one chunk: all ranks' KV must come from the same position."""
        return (self.tokens, self.stored_position, self.previous_hash, self.groups, self.ranks) == (
            other.tokens,
            other.stored_position,
            other.previous_hash,
            other.groups,
            other.ranks,
        )


def info_of(meta: object_pb2.ObjectMeta) -> ChunkInfo:
    return ChunkInfo(
        model_space_id=meta.model_space_id,
        tenant=meta.tenant,
        previous_hash=meta.previous_hash,
        tokens=meta.tokens,
        chunk_tokens=meta.chunk_tokens,
        stored_position=meta.stored_position,
        context_class=meta.context_class,
        document=meta.documents[0] if meta.documents else "",
        groups=meta.groups,
        ranks=meta.ranks,
        matchable=meta.matchable,
        duplicate=meta.duplicate,
    )


def meta_of(key: ObjectKey, info: ChunkInfo, payload_bytes: int, checksum: int, rank: pb.Rank) -> object_pb2.ObjectMeta:
    """`rank` is the message that `key.rank` numbers."""
    return object_pb2.ObjectMeta(
        format_version=OBJECT_FORMAT_VERSION,
        space_id=key.chunk.space_id,
        model_space_id=info.model_space_id,
        tenant=info.tenant,
        domain=key.chunk.domain,
        chain_hash=key.chunk.chain_hash,
        previous_hash=info.previous_hash,
        group=key.group,
        rank=rank,
        tokens=info.tokens,
        chunk_tokens=info.chunk_tokens,
        stored_position=info.stored_position,
        context_class=info.context_class,
        documents=[info.document] if info.document else [],
        payload_bytes=payload_bytes,
        checksum=checksum,
        groups=info.groups,
        ranks=info.ranks,
        matchable=info.matchable,
        duplicate=info.duplicate,
    )
