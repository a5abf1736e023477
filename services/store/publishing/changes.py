"""What changes in a store: small values inside it, runs of columns on the wire (matcher.proto)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.tokens import encode_u32
from services.store.objects import ChunkInfo, ChunkKey

# An owner is the id of a lower tier, or this: the store itself.
STORE_OWNER = ""

_HASHES_BYTES = 64
_NUMBERS_BYTES = 8


@dataclass(frozen=True, slots=True)
class Added:
    """The owner has the chunk."""

    key: ChunkKey
    owner: str
    info: ChunkInfo

    @property
    def wire_bytes(self) -> int:
        return _HASHES_BYTES + _NUMBERS_BYTES + len(self.info.tokens)

    @property
    def header(self) -> tuple[object, ...]:
        """Neighbours with equal headers travel as one batch."""
        key, info = self.key, self.info
        return (
            Added,
            key.space_id,
            self.owner,
            info.chunk_tokens,
            key.domain,
            info.context_class,
            info.matchable,
            info.document,
            info.tenant,
        )


@dataclass(frozen=True, slots=True)
class Removed:
    """The owner no longer has the chunk.

    `seen_position`: log position of the answer that claimed it, if the owner is not this store; a claim behind
    that stays.
    """

    key: ChunkKey
    owner: str
    seen_position: int = 0

    @property
    def wire_bytes(self) -> int:
        return _HASHES_BYTES

    @property
    def header(self) -> tuple[object, ...]:
        return Removed, self.key.space_id, self.owner, self.key.domain, self.seen_position


@dataclass(frozen=True, slots=True)
class Cleared:
    """The owner no longer has anything in the scope: a space, a tenant, a tenant's document, or (all empty) at all."""

    owner: str
    space_id: bytes = b""
    tenant: str = ""
    document: str = ""

    @property
    def wire_bytes(self) -> int:
        return _HASHES_BYTES

    @property
    def header(self) -> tuple[object, ...]:
        return Cleared, self.owner, self.space_id, self.tenant, self.document

    def covers(self, added: Added) -> bool:
        return (
            added.owner == self.owner
            and self.space_id in (b"", added.key.space_id)
            and self.tenant in ("", added.info.tenant)
            and self.document in ("", added.info.document)
        )


Change = Added | Removed | Cleared


def cleared_of(scope: pb.ClearScope, owner: str) -> Cleared:
    return Cleared(owner, scope.space_id, scope.tenant or scope.document.tenant, scope.document.document)


def batches_of(changes: Iterable[Change]) -> list[matcher_pb2.ChangeBatch]:
    """The changes in order, runs of one kind together."""
    batches = []
    for _, run in groupby(changes, lambda change: change.header):
        alike = list(run)
        if isinstance(alike[0], Added):
            batches.append(matcher_pb2.ChangeBatch(added=_added(cast(list[Added], alike))))
        elif isinstance(alike[0], Removed):
            batches.append(matcher_pb2.ChangeBatch(removed=_removed(cast(list[Removed], alike))))
        else:
            batches += [matcher_pb2.ChangeBatch(cleared=_cleared(cleared)) for cleared in cast(list[Cleared], alike)]
    return batches


def _added(run: Sequence[Added]) -> matcher_pb2.ChunksAdded:
    key, info = run[0].key, run[0].info
    return matcher_pb2.ChunksAdded(
        space_id=key.space_id,
        owner=_owner(run[0].owner),
        chunk_tokens=info.chunk_tokens,
        domain=key.domain,
        context_class=info.context_class,
        matchable=info.matchable and key.domain != pb.DOMAIN_BLENDED,
        document=info.document,
        tenant=info.tenant,
        chain_hashes=b"".join([item.key.chain_hash for item in run]),
        previous_hashes=b"".join([item.info.previous_hash for item in run]),
        stored_positions=encode_u32([item.info.stored_position for item in run]),
        lengths=encode_u32([item.info.token_count for item in run]),
        tokens=b"".join([item.info.tokens for item in run]),
    )


def _removed(run: Sequence[Removed]) -> matcher_pb2.ChunksRemoved:
    return matcher_pb2.ChunksRemoved(
        space_id=run[0].key.space_id,
        owner=_owner(run[0].owner),
        domain=run[0].key.domain,
        chain_hashes=b"".join([item.key.chain_hash for item in run]),
        seen_position=run[0].seen_position,
    )


def _cleared(cleared: Cleared) -> matcher_pb2.Cleared:
    return matcher_pb2.Cleared(
        owner=_owner(cleared.owner),
        space_id=cleared.space_id,
        tenant=cleared.tenant,
        document=cleared.document,
    )


def _owner(owner: str) -> matcher_pb2.Owner:
    if owner == STORE_OWNER:
        return matcher_pb2.Owner(kind=matcher_pb2.OWNER_KIND_STORE)
    return matcher_pb2.Owner(kind=matcher_pb2.OWNER_KIND_L2, l2_id=owner)
