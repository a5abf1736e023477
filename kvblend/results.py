"""What the client's verbs answer. Every result has `ok` and `reason`; none of them is ever an exception."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2


def reason_name(reason: pb.Reason) -> str:
    """UNKNOWN_TEXT for REASON_UNKNOWN_TEXT."""
    return pb.Reason.Name(reason).removeprefix("REASON_")


def outcome_name(outcome: store_pb2.ChunkOutcome) -> str:
    return store_pb2.ChunkOutcome.Name(outcome).removeprefix("CHUNK_OUTCOME_")


@dataclass(frozen=True, kw_only=True)
class Result:
    """`reason` is an UPPER_SNAKE word of the error table or of `Reason`; empty if all went well."""

    ok: bool = True
    reason: str = ""
    detail: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Segment:
    """`length` tokens at `query_position` of the prompt whose KV is stored from `stored_position` on."""

    query_position: int
    stored_position: int
    length: int
    document: str = ""
    context_class: str = ""


class Segments(Sequence[Segment]):
    """The segments of an answer, made when they are looked at: there may be hundreds."""

    def __init__(self, columns: pb.SegmentColumns) -> None:
        self._columns = columns
        self._lengths = np.frombuffer(columns.lengths, "<u4")

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, index: int) -> Segment: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Segment, ...]: ...

    def __getitem__(self, index: int | slice) -> Segment | tuple[Segment, ...]:
        return self._made[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)

    def __repr__(self) -> str:
        return repr(self._made)

    @cached_property
    def _made(self) -> tuple[Segment, ...]:
        columns = self._columns
        numbers = (columns.query_positions, columns.stored_positions, columns.lengths, columns.document_indexes)
        positions, stored, lengths, documents = (np.frombuffer(column, "<u4").tolist() for column in numbers)
        names = [columns.documents[index] for index in documents]
        classes = [pb.ContextClass.Name(value).removeprefix("CONTEXT_CLASS_") for value in columns.context_classes]
        return tuple(map(Segment, positions, stored, lengths, names, classes))


@dataclass(frozen=True)
class Shortfall:
    """Tokens that are not reused, and why."""

    reason: str
    tokens: int
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class LookupResult(Result):
    """The prefix, then non-overlapping segments behind it, then why there is no more."""

    request_id: str
    attempt: int = 0
    done: bool = True
    prefix_tokens: int = 0
    # Of prefix_tokens, the trailing ones that depend on reused segments.
    blended_tokens: int = 0
    segments: Sequence[Segment] = ()
    shortfalls: tuple[Shortfall, ...] = ()
    l1_chunks: int = 0
    l2_chunks: int = 0

    @property
    def covered_tokens(self) -> int:
        return self.prefix_tokens + sum(segment.length for segment in self.segments)


@dataclass(frozen=True, kw_only=True)
class RetrieveResult(Result):
    """Query ranges (first, length) that now hold KV, and (first, length, reason) that do not."""

    written: tuple[tuple[int, int], ...] = ()
    failed: tuple[tuple[int, int, str], ...] = ()
    bytes: int = 0


@dataclass(frozen=True)
class StoredChunk:
    """Outcome: STORED, PRESENT, BEING_WRITTEN, DECLINED or FAILED; the last two have a reason."""

    first: int
    tokens: int
    domain: str
    outcome: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class StoreResult(Result):
    chunks: tuple[StoredChunk, ...] = ()
    # A matcher replica that has applied this finds what was stored.
    position: pb.StreamPosition | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class ReleaseResult(Result):
    released: int = 0


@dataclass(frozen=True, kw_only=True)
class ClearResult(Result):
    removed_chunks: int = 0
    kept_leased_chunks: int = 0
    removed_l2_chunks: int = 0


@dataclass(frozen=True)
class StoreScore:
    store: str
    prefix_tokens: int
    anywhere_tokens: int


@dataclass(frozen=True, kw_only=True)
class ScoreResult(Result):
    stores: tuple[StoreScore, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FormatResult(Result):
    chunk_tokens: int = 0
    hash_version: int = 0
    object_format_version: int = 0


@dataclass(frozen=True, kw_only=True)
class PingResult(Result):
    boot_id: bytes = b""
    instance_registered: bool = False
    oldest_lease_ms: int = 0
    # (name, ready, detail) of what the agent depends on.
    dependencies: tuple[tuple[str, bool, str], ...] = ()
