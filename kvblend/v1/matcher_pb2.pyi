from kvblend.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OwnerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OWNER_KIND_UNSPECIFIED: _ClassVar[OwnerKind]
    OWNER_KIND_STORE: _ClassVar[OwnerKind]
    OWNER_KIND_L2: _ClassVar[OwnerKind]
OWNER_KIND_UNSPECIFIED: OwnerKind
OWNER_KIND_STORE: OwnerKind
OWNER_KIND_L2: OwnerKind

class Owner(_message.Message):
    __slots__ = ("kind", "l2_id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    L2_ID_FIELD_NUMBER: _ClassVar[int]
    kind: OwnerKind
    l2_id: str
    def __init__(self, kind: _Optional[_Union[OwnerKind, str]] = ..., l2_id: _Optional[str] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("store", "epoch", "first_sequence", "batches", "reset")
    STORE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    store: str
    epoch: int
    first_sequence: int
    batches: _containers.RepeatedCompositeFieldContainer[ChangeBatch]
    reset: bool
    def __init__(self, store: _Optional[str] = ..., epoch: _Optional[int] = ..., first_sequence: _Optional[int] = ..., batches: _Optional[_Iterable[_Union[ChangeBatch, _Mapping]]] = ..., reset: bool = ...) -> None: ...

class ChangeBatch(_message.Message):
    __slots__ = ("added", "removed", "cleared")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    added: ChunksAdded
    removed: ChunksRemoved
    cleared: Cleared
    def __init__(self, added: _Optional[_Union[ChunksAdded, _Mapping]] = ..., removed: _Optional[_Union[ChunksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[Cleared, _Mapping]] = ...) -> None: ...

class ChunksAdded(_message.Message):
    __slots__ = ("space_id", "owner", "chunk_tokens", "domain", "context_class", "matchable", "document", "tenant", "chain_hashes", "previous_hashes", "stored_positions", "lengths", "tokens")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CLASS_FIELD_NUMBER: _ClassVar[int]
    MATCHABLE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASHES_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_HASHES_FIELD_NUMBER: _ClassVar[int]
    STORED_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    owner: Owner
    chunk_tokens: int
    domain: _common_pb2.Domain
    context_class: _common_pb2.ContextClass
    matchable: bool
    document: str
    tenant: str
    chain_hashes: bytes
    previous_hashes: bytes
    stored_positions: bytes
    lengths: bytes
    tokens: bytes
    def __init__(self, space_id: _Optional[bytes] = ..., owner: _Optional[_Union[Owner, _Mapping]] = ..., chunk_tokens: _Optional[int] = ..., domain: _Optional[_Union[_common_pb2.Domain, str]] = ..., context_class: _Optional[_Union[_common_pb2.ContextClass, str]] = ..., matchable: bool = ..., document: _Optional[str] = ..., tenant: _Optional[str] = ..., chain_hashes: _Optional[bytes] = ..., previous_hashes: _Optional[bytes] = ..., stored_positions: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class ChunksRemoved(_message.Message):
    __slots__ = ("space_id", "owner", "domain", "chain_hashes", "seen_position")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASHES_FIELD_NUMBER: _ClassVar[int]
    SEEN_POSITION_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    owner: Owner
    domain: _common_pb2.Domain
    chain_hashes: bytes
    seen_position: int
    def __init__(self, space_id: _Optional[bytes] = ..., owner: _Optional[_Union[Owner, _Mapping]] = ..., domain: _Optional[_Union[_common_pb2.Domain, str]] = ..., chain_hashes: _Optional[bytes] = ..., seen_position: _Optional[int] = ...) -> None: ...

class Cleared(_message.Message):
    __slots__ = ("owner", "space_id", "tenant", "document")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    space_id: bytes
    tenant: str
    document: str
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., space_id: _Optional[bytes] = ..., tenant: _Optional[str] = ..., document: _Optional[str] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("durable_sequence", "log_position")
    DURABLE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOG_POSITION_FIELD_NUMBER: _ClassVar[int]
    durable_sequence: int
    log_position: int
    def __init__(self, durable_sequence: _Optional[int] = ..., log_position: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("space_id", "tokens", "skip_tokens", "context_classes", "store", "epoch", "l2_id", "at_least", "opaque_spans")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CLASSES_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    L2_ID_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_SPANS_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    tokens: bytes
    skip_tokens: int
    context_classes: _containers.RepeatedScalarFieldContainer[_common_pb2.ContextClass]
    store: str
    epoch: int
    l2_id: str
    at_least: _containers.RepeatedCompositeFieldContainer[_common_pb2.StreamPosition]
    opaque_spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpaqueSpan]
    def __init__(self, space_id: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., skip_tokens: _Optional[int] = ..., context_classes: _Optional[_Iterable[_Union[_common_pb2.ContextClass, str]]] = ..., store: _Optional[str] = ..., epoch: _Optional[int] = ..., l2_id: _Optional[str] = ..., at_least: _Optional[_Iterable[_Union[_common_pb2.StreamPosition, _Mapping]]] = ..., opaque_spans: _Optional[_Iterable[_Union[_common_pb2.OpaqueSpan, _Mapping]]] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("segments", "shortfalls", "log_position", "log_age_ms", "scanned_tokens", "candidates", "verified")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SHORTFALLS_FIELD_NUMBER: _ClassVar[int]
    LOG_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOG_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    SCANNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    segments: _common_pb2.SegmentColumns
    shortfalls: _containers.RepeatedCompositeFieldContainer[_common_pb2.Shortfall]
    log_position: int
    log_age_ms: int
    scanned_tokens: int
    candidates: int
    verified: int
    def __init__(self, segments: _Optional[_Union[_common_pb2.SegmentColumns, _Mapping]] = ..., shortfalls: _Optional[_Iterable[_Union[_common_pb2.Shortfall, _Mapping]]] = ..., log_position: _Optional[int] = ..., log_age_ms: _Optional[int] = ..., scanned_tokens: _Optional[int] = ..., candidates: _Optional[int] = ..., verified: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("space_id", "tokens", "chain_hashes", "chunk_tokens", "context_classes")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASHES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CLASSES_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    tokens: bytes
    chain_hashes: bytes
    chunk_tokens: int
    context_classes: _containers.RepeatedScalarFieldContainer[_common_pb2.ContextClass]
    def __init__(self, space_id: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., chain_hashes: _Optional[bytes] = ..., chunk_tokens: _Optional[int] = ..., context_classes: _Optional[_Iterable[_Union[_common_pb2.ContextClass, str]]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("stores",)
    STORES_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[StoreScore]
    def __init__(self, stores: _Optional[_Iterable[_Union[StoreScore, _Mapping]]] = ...) -> None: ...

class StoreScore(_message.Message):
    __slots__ = ("store", "l2_id", "prefix_tokens", "anywhere_tokens")
    STORE_FIELD_NUMBER: _ClassVar[int]
    L2_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANYWHERE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    store: str
    l2_id: str
    prefix_tokens: int
    anywhere_tokens: int
    def __init__(self, store: _Optional[str] = ..., l2_id: _Optional[str] = ..., prefix_tokens: _Optional[int] = ..., anywhere_tokens: _Optional[int] = ...) -> None: ...

class GetMatcherStatsRequest(_message.Message):
    __slots__ = ("with_digest",)
    WITH_DIGEST_FIELD_NUMBER: _ClassVar[int]
    with_digest: bool
    def __init__(self, with_digest: bool = ...) -> None: ...

class GetMatcherStatsResponse(_message.Message):
    __slots__ = ("spaces", "table_bytes", "memory_limit_bytes", "matches", "candidates", "verified", "refused", "evicted", "applied", "log", "latencies", "state_digest")
    SPACES_FIELD_NUMBER: _ClassVar[int]
    TABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MATCHES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    spaces: _containers.RepeatedCompositeFieldContainer[SpaceEntries]
    table_bytes: int
    memory_limit_bytes: int
    matches: int
    candidates: int
    verified: int
    refused: int
    evicted: int
    applied: _containers.RepeatedCompositeFieldContainer[_common_pb2.StreamPosition]
    log: LogState
    latencies: _containers.RepeatedCompositeFieldContainer[_common_pb2.LatencySummary]
    state_digest: bytes
    def __init__(self, spaces: _Optional[_Iterable[_Union[SpaceEntries, _Mapping]]] = ..., table_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ..., matches: _Optional[int] = ..., candidates: _Optional[int] = ..., verified: _Optional[int] = ..., refused: _Optional[int] = ..., evicted: _Optional[int] = ..., applied: _Optional[_Iterable[_Union[_common_pb2.StreamPosition, _Mapping]]] = ..., log: _Optional[_Union[LogState, _Mapping]] = ..., latencies: _Optional[_Iterable[_Union[_common_pb2.LatencySummary, _Mapping]]] = ..., state_digest: _Optional[bytes] = ...) -> None: ...

class LogState(_message.Message):
    __slots__ = ("kind", "applied_position", "end_position", "age_ms", "snapshot_position", "error")
    KIND_FIELD_NUMBER: _ClassVar[int]
    APPLIED_POSITION_FIELD_NUMBER: _ClassVar[int]
    END_POSITION_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_POSITION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    kind: str
    applied_position: int
    end_position: int
    age_ms: int
    snapshot_position: int
    error: str
    def __init__(self, kind: _Optional[str] = ..., applied_position: _Optional[int] = ..., end_position: _Optional[int] = ..., age_ms: _Optional[int] = ..., snapshot_position: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class SpaceEntries(_message.Message):
    __slots__ = ("space_id", "chunks", "tokens")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    chunks: int
    tokens: int
    def __init__(self, space_id: _Optional[bytes] = ..., chunks: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class PingMatcherRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingMatcherResponse(_message.Message):
    __slots__ = ("liveness",)
    LIVENESS_FIELD_NUMBER: _ClassVar[int]
    liveness: _common_pb2.Liveness
    def __init__(self, liveness: _Optional[_Union[_common_pb2.Liveness, _Mapping]] = ...) -> None: ...

class TablePart(_message.Message):
    __slots__ = ("format_version", "streams", "spaces", "documents", "owners", "space_indexes", "document_indexes", "chain_hashes", "previous_hashes", "stored_positions", "lengths", "domains", "context_classes", "matchable", "claimed", "tokens")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    SPACES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    SPACE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_INDEXES_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASHES_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_HASHES_FIELD_NUMBER: _ClassVar[int]
    STORED_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CLASSES_FIELD_NUMBER: _ClassVar[int]
    MATCHABLE_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    streams: _containers.RepeatedCompositeFieldContainer[_common_pb2.StreamPosition]
    spaces: _containers.RepeatedCompositeFieldContainer[TableSpace]
    documents: _containers.RepeatedScalarFieldContainer[str]
    owners: _containers.RepeatedCompositeFieldContainer[TableOwner]
    space_indexes: bytes
    document_indexes: bytes
    chain_hashes: bytes
    previous_hashes: bytes
    stored_positions: bytes
    lengths: bytes
    domains: bytes
    context_classes: bytes
    matchable: bytes
    claimed: bytes
    tokens: bytes
    def __init__(self, format_version: _Optional[int] = ..., streams: _Optional[_Iterable[_Union[_common_pb2.StreamPosition, _Mapping]]] = ..., spaces: _Optional[_Iterable[_Union[TableSpace, _Mapping]]] = ..., documents: _Optional[_Iterable[str]] = ..., owners: _Optional[_Iterable[_Union[TableOwner, _Mapping]]] = ..., space_indexes: _Optional[bytes] = ..., document_indexes: _Optional[bytes] = ..., chain_hashes: _Optional[bytes] = ..., previous_hashes: _Optional[bytes] = ..., stored_positions: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., domains: _Optional[bytes] = ..., context_classes: _Optional[bytes] = ..., matchable: _Optional[bytes] = ..., claimed: _Optional[bytes] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class TableSpace(_message.Message):
    __slots__ = ("space_id", "chunk_tokens", "tenant")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    chunk_tokens: int
    tenant: str
    def __init__(self, space_id: _Optional[bytes] = ..., chunk_tokens: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class TableOwner(_message.Message):
    __slots__ = ("store", "l2_id", "entries")
    STORE_FIELD_NUMBER: _ClassVar[int]
    L2_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    store: str
    l2_id: str
    entries: bytes
    def __init__(self, store: _Optional[str] = ..., l2_id: _Optional[str] = ..., entries: _Optional[bytes] = ...) -> None: ...
