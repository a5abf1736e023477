"""Answers as messages: columns out of the table's."""

import numpy as np

from kvblend.v1 import common_pb2 as pb
from services.common.tokens import encode_u32
from services.matcher.kernels.types import DOCUMENT, DOMAIN, POSITION
from services.matcher.runs import Cover
from services.matcher.table import Table


def segment_columns(table: Table, cover: Cover) -> pb.SegmentColumns:
    """A cover with the names of its chunks. To be called inside `table.grace`, like the match itself."""
    if not len(cover.starts):
        return pb.SegmentColumns()
    columns = table.columns
    first = columns.rows[cover.first_entries]
    documents, indexes = np.unique(first[:, DOCUMENT], return_inverse=True)
    return pb.SegmentColumns(
        query_positions=encode_u32(cover.starts),
        stored_positions=encode_u32(first[:, POSITION] + cover.skips),
        lengths=encode_u32(cover.ends - cover.starts),
        skip_tokens=encode_u32(cover.skips),
        domains=first[:, DOMAIN].astype(np.uint8).tobytes(),
        context_classes=cover.classes.tobytes(),
        document_indexes=encode_u32(indexes),
        documents=[table.documents.names[number] for number in documents.tolist()],
        chunk_counts=encode_u32(cover.counts),
        chain_hashes=columns.names[cover.entries].tobytes(),
        chunk_lengths=encode_u32(cover.lengths),
    )
