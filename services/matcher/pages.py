"""Pages of stores' streams: checked, and decoded into what the table does."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError
from services.common.identity import HASH_BYTES, SPACE_ID_BYTES, is_chunk_size
from services.common.tokens import TokenArray, decode_tokens
from services.matcher.kernels.types import U64
from services.matcher.owners import OwnerName
from services.matcher.table import Batch, Table

_LONGEST_NAME = 256
_DOMAINS = frozenset(pb.Domain.values()) - {pb.DOMAIN_UNSPECIFIED}
CONTEXT_CLASSES = frozenset(pb.ContextClass.values()) - {pb.CONTEXT_CLASS_UNSPECIFIED}
# Sequences and positions stay below this; more than any stream will ever have.
_NEVER = 1 << 62


@dataclass(frozen=True)
class Add:
    owner: OwnerName
    batch: Batch

    def __len__(self) -> int:
        """How many sequences of its stream it takes."""
        return len(self.batch)

    def apply(self, table: Table, position: int) -> None:
        table.add(self.batch, self.owner, position)


@dataclass(frozen=True)
class Remove:
    owner: OwnerName
    space_id: bytes
    domain: int
    names: U64
    seen: int

    def __len__(self) -> int:
        return len(self.names)

    def apply(self, table: Table, position: int) -> None:
        del position
        table.remove(self.space_id, self.domain, self.names, self.owner, self.seen)


@dataclass(frozen=True)
class Clear:
    owner: OwnerName
    space_id: bytes
    tenant: str
    document: str

    def __len__(self) -> int:
        return 1

    def apply(self, table: Table, position: int) -> None:
        del position
        table.clear(self.owner, self.space_id, self.tenant, self.document)


Change = Add | Remove | Clear


def store_owner(store: str) -> OwnerName:
    return OwnerName(matcher_pb2.OWNER_KIND_STORE, store)


def tier_owner(l2_id: str) -> OwnerName:
    return OwnerName(matcher_pb2.OWNER_KIND_L2, l2_id)


def decode_page(page: matcher_pb2.PublishRequest) -> list[Change]:
    """What a page does, in order. Raises KvblendError INVALID_ARGUMENT if it is not well-formed."""
    if not 0 < len(page.store) <= _LONGEST_NAME or not page.epoch or not page.first_sequence:
        raise _wrong("a page needs a store, an epoch and a first_sequence of at least 1")
    changes = list(_changes_of(page))
    if page.first_sequence + sum(map(len, changes)) > _NEVER:
        raise _wrong("there are no such sequences")
    return changes


def _changes_of(page: matcher_pb2.PublishRequest) -> Iterator[Change]:
    for batch in page.batches:
        kind = batch.WhichOneof("change")
        if kind == "added":
            yield _added(page.store, batch.added)
        elif kind == "removed":
            removed = batch.removed
            _check_space_id(removed.space_id)
            if removed.domain not in _DOMAINS:
                raise _wrong("chunks need a domain")
            owner, seen = _owner(page.store, removed.owner), min(removed.seen_position, _NEVER)
            yield Remove(owner, removed.space_id, removed.domain, hashes_of(removed.chain_hashes), seen)
        elif kind == "cleared":
            cleared = batch.cleared
            if cleared.space_id:
                _check_space_id(cleared.space_id)
            yield Clear(_owner(page.store, cleared.owner), cleared.space_id, cleared.tenant, cleared.document)
        else:
            raise _wrong("a batch adds, removes or clears")


def hashes_of(data: bytes) -> U64:
    """[N, 4]: hashes as the table compares them."""
    if len(data) % HASH_BYTES:
        raise _wrong(f"hashes have {HASH_BYTES} bytes each")
    return np.frombuffer(data, dtype=np.uint64).reshape(-1, HASH_BYTES // 8)


def _owner(store: str, owner: matcher_pb2.Owner) -> OwnerName:
    if owner.kind == matcher_pb2.OWNER_KIND_STORE:
        return store_owner(store)
    if owner.kind == matcher_pb2.OWNER_KIND_L2 and 0 < len(owner.l2_id) <= _LONGEST_NAME:
        return tier_owner(owner.l2_id)
    raise _wrong("an owner is the store itself or an L2 tier with its l2_id")


def _added(store: str, added: matcher_pb2.ChunksAdded) -> Add:
    _check_space_id(added.space_id)
    if not is_chunk_size(added.chunk_tokens):
        raise _wrong(f"chunk_tokens is {added.chunk_tokens}: a power of two from 16 to 1024 is needed")
    if added.domain not in _DOMAINS or added.context_class not in CONTEXT_CLASSES:
        raise _wrong("chunks need a domain and a context class")
    if max(len(added.tenant), len(added.document)) > _LONGEST_NAME:
        raise _wrong(f"names of tenants and documents have at most {_LONGEST_NAME} characters")
    names, previous = hashes_of(added.chain_hashes), hashes_of(added.previous_hashes)
    positions, lengths = _u32(added.stored_positions), _u32(added.lengths)
    count = len(names)
    if not (len(previous) == len(positions) == len(lengths) == count):
        raise _wrong("the columns of a batch are of different lengths")
    if count and not (lengths.min() > 0 and lengths.max() <= added.chunk_tokens):
        raise _wrong(f"chunks of this space have 1 to {added.chunk_tokens} tokens")
    if count and int(positions.max()) >= 1 << 31:
        raise _wrong("a stored position must be below 2^31")
    matchable = added.matchable and added.domain != pb.DOMAIN_BLENDED
    tokens = _u32(added.tokens if matchable else b"")
    if matchable and len(tokens) != int(lengths.sum(dtype=np.int64)):
        raise _wrong(f"{len(tokens)} tokens for chunks of {int(lengths.sum(dtype=np.int64))} together")
    return Add(
        _owner(store, added.owner),
        Batch(
            space_id=added.space_id,
            chunk_tokens=added.chunk_tokens,
            tenant=added.tenant,
            names=names,
            previous=previous,
            positions=positions,
            lengths=lengths,
            tokens=tokens,
            domains=np.full(count, added.domain, dtype=np.uint8),
            classes=np.full(count, added.context_class, dtype=np.uint8),
            matchable=np.full(count, matchable, dtype=np.uint8),
            documents=added.document,
        ),
    )


def _u32(data: bytes) -> TokenArray:
    return decode_tokens(data, field="a column", allow_empty=True)


def _check_space_id(space_id: bytes) -> None:
    if len(space_id) != SPACE_ID_BYTES:
        raise _wrong(f"space_id has {len(space_id)} bytes; {SPACE_ID_BYTES} are needed")


def _wrong(message: str) -> KvblendError:
    return KvblendError("INVALID_ARGUMENT", message)
