"""What the matcher knows: the fold over the log's records. Two replicas that applied the same records know the same."""

import hashlib
from dataclasses import dataclass

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError
from services.common.logs import get_logger
from services.matcher.kernels import batches
from services.matcher.kernels.types import U64
from services.matcher.log.base import START, Position
from services.matcher.owners import OwnerName
from services.matcher.pages import decode_page, store_owner, tier_owner
from services.matcher.table import Table

_log = get_logger("fold")


@dataclass(frozen=True)
class Stream:
    """One store's stream, as far as it was applied."""

    epoch: int
    applied: int


class Fold:
    """The table and the streams that made it. One thread applies; others read."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.streams: dict[str, Stream] = {}
        self.position: Position = START

    def apply(self, data: bytes, position: Position) -> None:
        """Applies the record at `position`, the one behind the last that was applied."""
        page = matcher_pb2.PublishRequest.FromString(data)
        stream = self.streams.get(page.store)
        if page.reset or (stream is not None and page.epoch > stream.epoch):
            self.table.void(store_owner(page.store))
        changes = decode_page(page)
        for change in changes:
            try:
                change.apply(self.table, position.number)
            except KvblendError as error:
                # Too many owners: the same on every replica.
                _log.error("a change was left out", store=page.store, why=str(error))
        self.streams[page.store] = Stream(page.epoch, page.first_sequence + sum(map(len, changes)) - 1)
        self.position = position

    def owners_for(self, store: str, epoch: int, l2_id: str) -> frozenset[OwnerName]:
        """What a store at this epoch can reach: its own chunks, if its epoch is known here, and its L2's."""
        owners = set()
        stream = self.streams.get(store)
        if stream is not None and stream.epoch == epoch:
            owners.add(store_owner(store))
        if l2_id:
            owners.add(tier_owner(l2_id))
        return frozenset(owners)

    def has_applied(self, position: pb.StreamPosition) -> bool:
        stream = self.streams.get(position.store)
        return stream is not None and (stream.epoch, stream.applied) >= (position.epoch, position.sequence)

    def applied(self) -> list[pb.StreamPosition]:
        return [
            pb.StreamPosition(store=store, epoch=stream.epoch, sequence=stream.applied)
            for store, stream in sorted(self.streams.items())
        ]

    def digest(self, timeout: float = 60.0) -> bytes:
        """16 bytes: the same for the same knowledge, whatever ids entries have here.

        Raises KvblendError DEADLINE_EXCEEDED if the table cannot be had within `timeout` seconds. It is kept from
        changing for about a second for a million entries.
        """
        table = self.table
        with table.locked(timeout):
            spaces = np.zeros(len(table.numbered), dtype=np.uint64)
            for space in table.spaces.values():
                spaces[space.number] = _hash64(space.space_id, space.chunk_tokens, space.tenant)
            documents = np.array([_hash64(name) for name in table.documents.names], dtype=np.uint64)
            owners: U64 = np.zeros((table.owners.planes, 32), dtype=np.uint64)
            for name, bit in table.owners.items():
                owners[bit.plane, int(bit.mask).bit_length() - 1] = _hash64(*name)
            alive = batches.alive(0, table.entries_begun, table.owners.live(), table.columns)
            sums = batches.digest_entries(alive, spaces, documents, owners, table.columns)
            streams = repr([(name, stream.epoch, stream.applied) for name, stream in sorted(self.streams.items())])
            return hashlib.blake2b(f"{sums}{streams}".encode(), digest_size=16).digest()


def _hash64(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
