"""Snapshots of a fold: parts that are written while the table goes on changing.

A snapshot is **fuzzy**: each part shows the table at a moment of its own, at or behind the snapshot's position in the
log. Applying the records behind that position again, in order, brings every entry to where it must be: an addition
that is there already changes nothing, a removal or a voided owner takes away what came before it, and what came after
is in a later record, too. Only the context class of an entry can get better by
it, as it would have by the same additions.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.tokens import encode_u32
from services.matcher.fold import Fold, Stream
from services.matcher.kernels import batches
from services.matcher.kernels.texts import gather_tokens
from services.matcher.kernels.types import (
    CLASS,
    DOCUMENT,
    DOMAIN,
    I64,
    LENGTH,
    NONE,
    OFFSET,
    POSITION,
    SPACE,
)
from services.matcher.log.base import PART_BYTES, LogGap, Position
from services.matcher.owners import OwnerName
from services.matcher.pages import hashes_of, store_owner, tier_owner
from services.matcher.table import Batch, Table

FORMAT_VERSION = 1
# Entries of a part: with chunks of 256 tokens a part has 2.3 MB, with 1,024 it still has less than the log's 4 MiB.
_ENTRIES = 512
_TOKENS = 1 << 19


def parts_of(fold: Fold, streams: list[pb.StreamPosition]) -> Iterator[bytes]:
    """The table's parts, `streams` first: the streams' positions at the snapshot's. The table's lock is held for one
    part at a time."""
    yield matcher_pb2.TablePart(format_version=FORMAT_VERSION, streams=streams).SerializeToString()
    table = fold.table
    cursor = 0
    while cursor < table.entries_begun:
        with table.lock:
            last = min(table.entries_begun, cursor + 8 * _ENTRIES)
            entries = batches.alive(cursor, last, table.owners.live(), table.columns)
            entries = _as_many_as_fit(table, entries)
            part = _part(table, entries)
            # Entries with very many owners take much more.
            while part.ByteSize() > PART_BYTES:
                entries = entries[: len(entries) // 2]
                part = _part(table, entries)
            cursor = int(entries[-1]) + 1 if len(entries) else last
        if len(entries):
            yield part.SerializeToString()


def restore(parts: Iterable[bytes], position: Position, table: Table) -> Fold:
    """A fold at `position`, into an empty table.

    Raises:
        LogGap: the snapshot is of a version that this program does not know.
    """
    fold = Fold(table)
    fold.position = position
    for data in parts:
        part = matcher_pb2.TablePart.FromString(data)
        if part.format_version != FORMAT_VERSION:
            raise LogGap(f"the snapshot has format {part.format_version}, not {FORMAT_VERSION}")
        for stream in part.streams:
            fold.streams[stream.store] = Stream(stream.epoch, stream.sequence)
        with table.lock:
            _restore_part(table, part)
            table.settle()
    return fold


def _as_many_as_fit(table: Table, entries: I64) -> I64:
    lengths = table.columns.rows[entries, LENGTH].astype(np.int64)
    return entries[: int(np.searchsorted(np.cumsum(lengths), _TOKENS, side="right"))]


def _part(table: Table, entries: I64) -> matcher_pb2.TablePart:
    columns, rows = table.columns, table.columns.rows[entries]
    spaces, space_indexes = np.unique(rows[:, SPACE], return_inverse=True)
    documents, document_indexes = np.unique(rows[:, DOCUMENT], return_inverse=True)
    part = matcher_pb2.TablePart(
        format_version=FORMAT_VERSION,
        documents=[table.documents.names[number] for number in documents.tolist()],
        owners=list(_owners_of(table, entries)),
        space_indexes=encode_u32(space_indexes),
        document_indexes=encode_u32(document_indexes),
        chain_hashes=columns.names[entries].tobytes(),
        previous_hashes=columns.previous[entries].tobytes(),
        stored_positions=encode_u32(rows[:, POSITION]),
        lengths=encode_u32(rows[:, LENGTH]),
        domains=rows[:, DOMAIN].astype(np.uint8).tobytes(),
        context_classes=rows[:, CLASS].astype(np.uint8).tobytes(),
        matchable=(rows[:, OFFSET] != NONE).astype(np.uint8).tobytes(),
        claimed=columns.claimed[entries].astype("<u8").tobytes(),
        tokens=encode_u32(gather_tokens(entries, columns)),
    )
    for number in spaces.tolist():
        space = table.numbered[number]
        assert space is not None
        part.spaces.add(space_id=space.space_id, chunk_tokens=space.chunk_tokens, tenant=space.tenant)
    return part


def _owners_of(table: Table, entries: I64) -> Iterator[matcher_pb2.TableOwner]:
    for owner, bit in table.owners.items():
        held = np.flatnonzero(batches.held_by(entries, bit.plane, bit.mask, table.columns))
        if len(held):
            is_tier = owner.kind == matcher_pb2.OWNER_KIND_L2
            yield matcher_pb2.TableOwner(
                store="" if is_tier else owner.name, l2_id=owner.name if is_tier else "", entries=encode_u32(held)
            )


def _restore_part(table: Table, part: matcher_pb2.TablePart) -> None:
    of_space = np.frombuffer(part.space_indexes, "<u4")
    documents = np.frombuffer(part.document_indexes, "<u4")
    matchable = np.frombuffer(part.matchable, np.uint8)
    lengths = np.frombuffer(part.lengths, "<u4")
    counts = np.where(matchable, lengths, 0).astype(np.int64)
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    tokens = np.frombuffer(part.tokens, "<u4")
    entries = np.full(len(lengths), NONE, dtype=np.int64)
    numbers = np.array([table.documents.take(name, 0) for name in part.documents], dtype=np.int32)
    for index, space in enumerate(part.spaces):
        rows = np.flatnonzero(of_space == index)
        for number, count in zip(*np.unique(documents[rows], return_counts=True), strict=True):
            table.documents.take(part.documents[number], int(count))
        own = [tokens[bounds[row] : bounds[row + 1]] for row in rows] if len(part.spaces) > 1 else [tokens]
        entries[rows] = table.insert(
            Batch(
                space_id=space.space_id,
                chunk_tokens=space.chunk_tokens,
                tenant=space.tenant,
                names=hashes_of(part.chain_hashes)[rows],
                previous=hashes_of(part.previous_hashes)[rows],
                positions=np.frombuffer(part.stored_positions, "<u4")[rows],
                lengths=lengths[rows],
                tokens=np.concatenate(own),
                domains=np.frombuffer(part.domains, np.uint8)[rows],
                classes=np.frombuffer(part.context_classes, np.uint8)[rows],
                matchable=matchable[rows],
                documents=numbers[documents[rows]],
            )
        )
    held = entries != NONE
    table.columns.claimed[entries[held]] = np.frombuffer(part.claimed, "<u8")[held].astype(np.int64)
    for owner in part.owners:
        table.own(entries[np.frombuffer(owner.entries, "<u4")], _name_of(owner))


def _name_of(owner: matcher_pb2.TableOwner) -> OwnerName:
    return tier_owner(owner.l2_id) if owner.l2_id else store_owner(owner.store)
