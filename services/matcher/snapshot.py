"""Snapshots of a fold, in parts: the table exactly as it was at a position in the log (capture.py), written while it
goes on changing."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.tokens import encode_u32
from services.matcher.capture import Capture
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
from services.matcher.owners import Bit, OwnerName
from services.matcher.pages import hashes_of, store_owner, tier_owner
from services.matcher.table import Batch, Table

FORMAT_VERSION = 1


def parts_of(fold: Fold, streams: list[pb.StreamPosition]) -> Generator[bytes, None, None]:
    """The table's parts, `streams` first: the streams' positions at the snapshot's.

    The picture is of the moment when the first part is asked for. To be exhausted or closed: the table is watched
    until then.
    """
    table = fold.table
    with table.lock:
        owners = table.owners.items()
        capture = Capture(table, lambda entries: _parts(table, entries, owners))
    with closing(capture):
        yield matcher_pb2.TablePart(format_version=FORMAT_VERSION, streams=streams).SerializeToString()
        yield from capture.parts()


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


def _parts(table: Table, entries: I64, owners: list[tuple[OwnerName, Bit]]) -> list[bytes]:
    """One part, or some where entries have very many owners. `owners`: as they were at the snapshot's moment."""
    data = _part(table, entries, owners).SerializeToString()
    if len(data) <= PART_BYTES or len(entries) == 1:
        return [data]
    half = len(entries) // 2
    return [*_parts(table, entries[:half], owners), *_parts(table, entries[half:], owners)]


def _part(table: Table, entries: I64, names: list[tuple[OwnerName, Bit]]) -> matcher_pb2.TablePart:
    columns, rows = table.columns, table.columns.rows[entries]
    spaces, space_indexes = np.unique(rows[:, SPACE], return_inverse=True)
    documents, document_indexes = np.unique(rows[:, DOCUMENT], return_inverse=True)
    part = matcher_pb2.TablePart(
        format_version=FORMAT_VERSION,
        documents=[table.documents.names[number] for number in documents.tolist()],
        owners=list(_owners_of(table, entries, names)),
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


def _owners_of(table: Table, entries: I64, names: list[tuple[OwnerName, Bit]]) -> Iterator[matcher_pb2.TableOwner]:
    for owner, bit in names:
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
