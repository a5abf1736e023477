from kvblend.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StoreKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORE_KIND_UNSPECIFIED: _ClassVar[StoreKind]
    STORE_KIND_PROMPT: _ClassVar[StoreKind]
    STORE_KIND_DOCUMENT: _ClassVar[StoreKind]

class ChunkOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHUNK_OUTCOME_UNSPECIFIED: _ClassVar[ChunkOutcome]
    CHUNK_OUTCOME_GRANTED: _ClassVar[ChunkOutcome]
    CHUNK_OUTCOME_PRESENT: _ClassVar[ChunkOutcome]
    CHUNK_OUTCOME_BEING_WRITTEN: _ClassVar[ChunkOutcome]
    CHUNK_OUTCOME_DECLINED: _ClassVar[ChunkOutcome]
    CHUNK_OUTCOME_STORED: _ClassVar[ChunkOutcome]
    CHUNK_OUTCOME_FAILED: _ClassVar[ChunkOutcome]

class CheckPart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECK_PART_UNSPECIFIED: _ClassVar[CheckPart]
    CHECK_PART_BLOCKS: _ClassVar[CheckPart]
    CHECK_PART_OBJECTS: _ClassVar[CheckPart]
    CHECK_PART_LOG: _ClassVar[CheckPart]
    CHECK_PART_L2: _ClassVar[CheckPart]
    CHECK_PART_L2_LOG: _ClassVar[CheckPart]
STORE_KIND_UNSPECIFIED: StoreKind
STORE_KIND_PROMPT: StoreKind
STORE_KIND_DOCUMENT: StoreKind
CHUNK_OUTCOME_UNSPECIFIED: ChunkOutcome
CHUNK_OUTCOME_GRANTED: ChunkOutcome
CHUNK_OUTCOME_PRESENT: ChunkOutcome
CHUNK_OUTCOME_BEING_WRITTEN: ChunkOutcome
CHUNK_OUTCOME_DECLINED: ChunkOutcome
CHUNK_OUTCOME_STORED: ChunkOutcome
CHUNK_OUTCOME_FAILED: ChunkOutcome
CHECK_PART_UNSPECIFIED: CheckPart
CHECK_PART_BLOCKS: CheckPart
CHECK_PART_OBJECTS: CheckPart
CHECK_PART_LOG: CheckPart
CHECK_PART_L2: CheckPart
CHECK_PART_L2_LOG: CheckPart

class SessionRequest(_message.Message):
    __slots__ = ("session_id", "agent")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    agent: str
    def __init__(self, session_id: _Optional[bytes] = ..., agent: _Optional[str] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("boot_id", "arena", "revoked_leases")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    REVOKED_LEASES_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    arena: ArenaInfo
    revoked_leases: int
    def __init__(self, boot_id: _Optional[bytes] = ..., arena: _Optional[_Union[ArenaInfo, _Mapping]] = ..., revoked_leases: _Optional[int] = ...) -> None: ...

class ArenaInfo(_message.Message):
    __slots__ = ("directory", "epoch", "slabs", "slab_bytes", "headers", "format_version", "store")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    directory: str
    epoch: int
    slabs: int
    slab_bytes: int
    headers: int
    format_version: int
    store: str
    def __init__(self, directory: _Optional[str] = ..., epoch: _Optional[int] = ..., slabs: _Optional[int] = ..., slab_bytes: _Optional[int] = ..., headers: _Optional[int] = ..., format_version: _Optional[int] = ..., store: _Optional[str] = ...) -> None: ...

class RegisterModelSpaceRequest(_message.Message):
    __slots__ = ("model_space",)
    MODEL_SPACE_FIELD_NUMBER: _ClassVar[int]
    model_space: _common_pb2.ModelSpace
    def __init__(self, model_space: _Optional[_Union[_common_pb2.ModelSpace, _Mapping]] = ...) -> None: ...

class RegisterModelSpaceResponse(_message.Message):
    __slots__ = ("model_space_id", "chunk_tokens", "hash_version", "object_format_version")
    MODEL_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_VERSION_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    model_space_id: bytes
    chunk_tokens: int
    hash_version: int
    object_format_version: int
    def __init__(self, model_space_id: _Optional[bytes] = ..., chunk_tokens: _Optional[int] = ..., hash_version: _Optional[int] = ..., object_format_version: _Optional[int] = ...) -> None: ...

class ObjectPlace(_message.Message):
    __slots__ = ("header", "generation", "slab", "offset", "payload_bytes", "group")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    header: int
    generation: int
    slab: int
    offset: int
    payload_bytes: int
    group: int
    def __init__(self, header: _Optional[int] = ..., generation: _Optional[int] = ..., slab: _Optional[int] = ..., offset: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session_id", "request", "rank", "space", "tokens", "opaque_spans", "want_segments", "accept_blended", "context_classes", "prefill_tokens_per_second", "at_least")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_SPANS_FIELD_NUMBER: _ClassVar[int]
    WANT_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_BLENDED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CLASSES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    request: _common_pb2.RequestKey
    rank: _common_pb2.Rank
    space: _common_pb2.Space
    tokens: bytes
    opaque_spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpaqueSpan]
    want_segments: bool
    accept_blended: bool
    context_classes: _containers.RepeatedScalarFieldContainer[_common_pb2.ContextClass]
    prefill_tokens_per_second: int
    at_least: _containers.RepeatedCompositeFieldContainer[_common_pb2.StreamPosition]
    def __init__(self, session_id: _Optional[bytes] = ..., request: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., rank: _Optional[_Union[_common_pb2.Rank, _Mapping]] = ..., space: _Optional[_Union[_common_pb2.Space, _Mapping]] = ..., tokens: _Optional[bytes] = ..., opaque_spans: _Optional[_Iterable[_Union[_common_pb2.OpaqueSpan, _Mapping]]] = ..., want_segments: bool = ..., accept_blended: bool = ..., context_classes: _Optional[_Iterable[_Union[_common_pb2.ContextClass, str]]] = ..., prefill_tokens_per_second: _Optional[int] = ..., at_least: _Optional[_Iterable[_Union[_common_pb2.StreamPosition, _Mapping]]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("objects", "summary")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    objects: ObjectColumns
    summary: LookupSummary
    def __init__(self, objects: _Optional[_Union[ObjectColumns, _Mapping]] = ..., summary: _Optional[_Union[LookupSummary, _Mapping]] = ...) -> None: ...

class ObjectColumns(_message.Message):
    __slots__ = ("headers", "generations", "slabs", "offsets", "payload_bytes", "groups", "chain_hashes", "domains", "tokens", "stored_positions", "checksums", "verify")
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASHES_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    headers: bytes
    generations: bytes
    slabs: bytes
    offsets: bytes
    payload_bytes: bytes
    groups: bytes
    chain_hashes: bytes
    domains: bytes
    tokens: bytes
    stored_positions: bytes
    checksums: bytes
    verify: bytes
    def __init__(self, headers: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., slabs: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., payload_bytes: _Optional[bytes] = ..., groups: _Optional[bytes] = ..., chain_hashes: _Optional[bytes] = ..., domains: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., stored_positions: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., verify: _Optional[bytes] = ...) -> None: ...

class LookupSummary(_message.Message):
    __slots__ = ("prefix_tokens", "blended_tokens", "prefix_hashes", "prefix_lengths", "segments", "shortfalls", "epoch", "l1_chunks", "l2_chunks")
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SHORTFALLS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    L1_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    L2_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    prefix_tokens: int
    blended_tokens: int
    prefix_hashes: bytes
    prefix_lengths: bytes
    segments: _common_pb2.SegmentColumns
    shortfalls: _containers.RepeatedCompositeFieldContainer[_common_pb2.Shortfall]
    epoch: int
    l1_chunks: int
    l2_chunks: int
    def __init__(self, prefix_tokens: _Optional[int] = ..., blended_tokens: _Optional[int] = ..., prefix_hashes: _Optional[bytes] = ..., prefix_lengths: _Optional[bytes] = ..., segments: _Optional[_Union[_common_pb2.SegmentColumns, _Mapping]] = ..., shortfalls: _Optional[_Iterable[_Union[_common_pb2.Shortfall, _Mapping]]] = ..., epoch: _Optional[int] = ..., l1_chunks: _Optional[int] = ..., l2_chunks: _Optional[int] = ...) -> None: ...

class ObjectRef(_message.Message):
    __slots__ = ("header", "generation")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    header: int
    generation: int
    def __init__(self, header: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class BeginCopyRequest(_message.Message):
    __slots__ = ("session_id", "request", "rank", "objects")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    request: _common_pb2.RequestKey
    rank: _common_pb2.Rank
    objects: _containers.RepeatedCompositeFieldContainer[ObjectRef]
    def __init__(self, session_id: _Optional[bytes] = ..., request: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., rank: _Optional[_Union[_common_pb2.Rank, _Mapping]] = ..., objects: _Optional[_Iterable[_Union[ObjectRef, _Mapping]]] = ...) -> None: ...

class BeginCopyResponse(_message.Message):
    __slots__ = ("reasons", "epoch")
    REASONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    reasons: _containers.RepeatedScalarFieldContainer[_common_pb2.Reason]
    epoch: int
    def __init__(self, reasons: _Optional[_Iterable[_Union[_common_pb2.Reason, str]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class EndCopyRequest(_message.Message):
    __slots__ = ("session_id", "request", "rank", "objects", "corrupt", "keep")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    request: _common_pb2.RequestKey
    rank: _common_pb2.Rank
    objects: _containers.RepeatedCompositeFieldContainer[ObjectRef]
    corrupt: _containers.RepeatedCompositeFieldContainer[ObjectRef]
    keep: bool
    def __init__(self, session_id: _Optional[bytes] = ..., request: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., rank: _Optional[_Union[_common_pb2.Rank, _Mapping]] = ..., objects: _Optional[_Iterable[_Union[ObjectRef, _Mapping]]] = ..., corrupt: _Optional[_Iterable[_Union[ObjectRef, _Mapping]]] = ..., keep: bool = ...) -> None: ...

class EndCopyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseLeasesRequest(_message.Message):
    __slots__ = ("session_id", "request", "rank", "objects")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    request: _common_pb2.RequestKey
    rank: _common_pb2.Rank
    objects: _containers.RepeatedCompositeFieldContainer[ObjectRef]
    def __init__(self, session_id: _Optional[bytes] = ..., request: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., rank: _Optional[_Union[_common_pb2.Rank, _Mapping]] = ..., objects: _Optional[_Iterable[_Union[ObjectRef, _Mapping]]] = ...) -> None: ...

class ReleaseLeasesResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...

class EndRequestsRequest(_message.Message):
    __slots__ = ("session_id", "request_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[bytes] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class EndRequestsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DocumentOptions(_message.Message):
    __slots__ = ("document", "pinned", "ttl_seconds")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    document: str
    pinned: bool
    ttl_seconds: int
    def __init__(self, document: _Optional[str] = ..., pinned: bool = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session_id", "request", "rank", "space", "kind", "context", "tokens", "opaque_spans", "first_position", "document", "exact_tokens", "segment_tokens", "allow_blended")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_SPANS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    EXACT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_BLENDED_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    request: _common_pb2.RequestKey
    rank: _common_pb2.Rank
    space: _common_pb2.Space
    kind: StoreKind
    context: _common_pb2.Context
    tokens: bytes
    opaque_spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpaqueSpan]
    first_position: int
    document: DocumentOptions
    exact_tokens: int
    segment_tokens: bytes
    allow_blended: bool
    def __init__(self, session_id: _Optional[bytes] = ..., request: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., rank: _Optional[_Union[_common_pb2.Rank, _Mapping]] = ..., space: _Optional[_Union[_common_pb2.Space, _Mapping]] = ..., kind: _Optional[_Union[StoreKind, str]] = ..., context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., tokens: _Optional[bytes] = ..., opaque_spans: _Optional[_Iterable[_Union[_common_pb2.OpaqueSpan, _Mapping]]] = ..., first_position: _Optional[int] = ..., document: _Optional[_Union[DocumentOptions, _Mapping]] = ..., exact_tokens: _Optional[int] = ..., segment_tokens: _Optional[bytes] = ..., allow_blended: bool = ...) -> None: ...

class ChunkGrant(_message.Message):
    __slots__ = ("first_token", "tokens", "chain_hash", "domain", "outcome", "reason", "places")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    tokens: int
    chain_hash: bytes
    domain: _common_pb2.Domain
    outcome: ChunkOutcome
    reason: _common_pb2.Reason
    places: _containers.RepeatedCompositeFieldContainer[ObjectPlace]
    def __init__(self, first_token: _Optional[int] = ..., tokens: _Optional[int] = ..., chain_hash: _Optional[bytes] = ..., domain: _Optional[_Union[_common_pb2.Domain, str]] = ..., outcome: _Optional[_Union[ChunkOutcome, str]] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ..., places: _Optional[_Iterable[_Union[ObjectPlace, _Mapping]]] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation_id", "chunks", "ttl_ms", "epoch")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkGrant]
    ttl_ms: int
    epoch: int
    def __init__(self, reservation_id: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[ChunkGrant, _Mapping]]] = ..., ttl_ms: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class WrittenObject(_message.Message):
    __slots__ = ("object", "checksum")
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    object: ObjectRef
    checksum: int
    def __init__(self, object: _Optional[_Union[ObjectRef, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session_id", "reservation_id", "written")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    reservation_id: int
    written: _containers.RepeatedCompositeFieldContainer[WrittenObject]
    def __init__(self, session_id: _Optional[bytes] = ..., reservation_id: _Optional[int] = ..., written: _Optional[_Iterable[_Union[WrittenObject, _Mapping]]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("reasons", "position")
    REASONS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    reasons: _containers.RepeatedScalarFieldContainer[_common_pb2.Reason]
    position: _common_pb2.StreamPosition
    def __init__(self, reasons: _Optional[_Iterable[_Union[_common_pb2.Reason, str]]] = ..., position: _Optional[_Union[_common_pb2.StreamPosition, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session_id", "reservation_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    reservation_id: int
    def __init__(self, session_id: _Optional[bytes] = ..., reservation_id: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportDrainedRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ...) -> None: ...

class ReportDrainedResponse(_message.Message):
    __slots__ = ("freed_objects",)
    FREED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    freed_objects: int
    def __init__(self, freed_objects: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("scope", "force")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    scope: _common_pb2.ClearScope
    force: bool
    def __init__(self, scope: _Optional[_Union[_common_pb2.ClearScope, _Mapping]] = ..., force: bool = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("removed_chunks", "kept_leased_chunks", "removed_l2_chunks")
    REMOVED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_LEASED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_L2_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    removed_chunks: int
    kept_leased_chunks: int
    removed_l2_chunks: int
    def __init__(self, removed_chunks: _Optional[int] = ..., kept_leased_chunks: _Optional[int] = ..., removed_l2_chunks: _Optional[int] = ...) -> None: ...

class StoreServiceScoreRequest(_message.Message):
    __slots__ = ("space", "tokens", "opaque_spans")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_SPANS_FIELD_NUMBER: _ClassVar[int]
    space: _common_pb2.Space
    tokens: bytes
    opaque_spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpaqueSpan]
    def __init__(self, space: _Optional[_Union[_common_pb2.Space, _Mapping]] = ..., tokens: _Optional[bytes] = ..., opaque_spans: _Optional[_Iterable[_Union[_common_pb2.OpaqueSpan, _Mapping]]] = ...) -> None: ...

class StoreServiceScoreResponse(_message.Message):
    __slots__ = ("stores",)
    STORES_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[TokenScore]
    def __init__(self, stores: _Optional[_Iterable[_Union[TokenScore, _Mapping]]] = ...) -> None: ...

class TokenScore(_message.Message):
    __slots__ = ("store", "prefix_tokens", "anywhere_tokens")
    STORE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANYWHERE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    store: str
    prefix_tokens: int
    anywhere_tokens: int
    def __init__(self, store: _Optional[str] = ..., prefix_tokens: _Optional[int] = ..., anywhere_tokens: _Optional[int] = ...) -> None: ...

class GetStoreStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStoreStatsResponse(_message.Message):
    __slots__ = ("spaces", "tiers", "held_leases", "busy_leases", "reserved_objects", "quarantined_objects", "lookups", "requested_tokens", "prefix_hit_tokens", "segment_hit_tokens", "evicted_chunks", "stored_chunks", "outbox_events", "checksum_failures", "latencies", "position", "reserved_bytes", "quarantined_bytes", "arena", "l2", "tenants")
    SPACES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    HELD_LEASES_FIELD_NUMBER: _ClassVar[int]
    BUSY_LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STORED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    OUTBOX_EVENTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    L2_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    spaces: _containers.RepeatedCompositeFieldContainer[SpaceUsage]
    tiers: _containers.RepeatedCompositeFieldContainer[TierUsage]
    held_leases: int
    busy_leases: int
    reserved_objects: int
    quarantined_objects: int
    lookups: int
    requested_tokens: int
    prefix_hit_tokens: int
    segment_hit_tokens: int
    evicted_chunks: int
    stored_chunks: int
    outbox_events: int
    checksum_failures: int
    latencies: _containers.RepeatedCompositeFieldContainer[_common_pb2.LatencySummary]
    position: _common_pb2.StreamPosition
    reserved_bytes: int
    quarantined_bytes: int
    arena: ArenaUsage
    l2: SecondTierStats
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, spaces: _Optional[_Iterable[_Union[SpaceUsage, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[TierUsage, _Mapping]]] = ..., held_leases: _Optional[int] = ..., busy_leases: _Optional[int] = ..., reserved_objects: _Optional[int] = ..., quarantined_objects: _Optional[int] = ..., lookups: _Optional[int] = ..., requested_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., segment_hit_tokens: _Optional[int] = ..., evicted_chunks: _Optional[int] = ..., stored_chunks: _Optional[int] = ..., outbox_events: _Optional[int] = ..., checksum_failures: _Optional[int] = ..., latencies: _Optional[_Iterable[_Union[_common_pb2.LatencySummary, _Mapping]]] = ..., position: _Optional[_Union[_common_pb2.StreamPosition, _Mapping]] = ..., reserved_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., arena: _Optional[_Union[ArenaUsage, _Mapping]] = ..., l2: _Optional[_Union[SecondTierStats, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...

class SecondTierStats(_message.Message):
    __slots__ = ("queued_writes", "written_chunks", "failed_writes", "dropped_writes", "lost_writes", "fetching_bytes", "fetched_chunks", "fetched_bytes", "bytes_per_second", "latency_us")
    QUEUED_WRITES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_WRITES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_WRITES_FIELD_NUMBER: _ClassVar[int]
    LOST_WRITES_FIELD_NUMBER: _ClassVar[int]
    FETCHING_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LATENCY_US_FIELD_NUMBER: _ClassVar[int]
    queued_writes: int
    written_chunks: int
    failed_writes: int
    dropped_writes: int
    lost_writes: int
    fetching_bytes: int
    fetched_chunks: int
    fetched_bytes: int
    bytes_per_second: int
    latency_us: int
    def __init__(self, queued_writes: _Optional[int] = ..., written_chunks: _Optional[int] = ..., failed_writes: _Optional[int] = ..., dropped_writes: _Optional[int] = ..., lost_writes: _Optional[int] = ..., fetching_bytes: _Optional[int] = ..., fetched_chunks: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., bytes_per_second: _Optional[int] = ..., latency_us: _Optional[int] = ...) -> None: ...

class ArenaUsage(_message.Message):
    __slots__ = ("whole_bytes", "partial_bytes", "rounding_bytes", "other_bytes", "free_bytes", "longest_free_bytes", "huge_page_bytes")
    WHOLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUNDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    OTHER_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LONGEST_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HUGE_PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    whole_bytes: int
    partial_bytes: int
    rounding_bytes: int
    other_bytes: int
    free_bytes: int
    longest_free_bytes: int
    huge_page_bytes: int
    def __init__(self, whole_bytes: _Optional[int] = ..., partial_bytes: _Optional[int] = ..., rounding_bytes: _Optional[int] = ..., other_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., longest_free_bytes: _Optional[int] = ..., huge_page_bytes: _Optional[int] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "bytes", "reserved_bytes", "pinned_bytes", "quota_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    bytes: int
    reserved_bytes: int
    pinned_bytes: int
    quota_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ...) -> None: ...

class SpaceUsage(_message.Message):
    __slots__ = ("space_id", "display_name", "tenant", "chunks", "bytes")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    display_name: str
    tenant: str
    chunks: int
    bytes: int
    def __init__(self, space_id: _Optional[bytes] = ..., display_name: _Optional[str] = ..., tenant: _Optional[str] = ..., chunks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class TierUsage(_message.Message):
    __slots__ = ("tier", "used_bytes", "capacity_bytes", "objects", "ready", "detail")
    TIER_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    used_bytes: int
    capacity_bytes: int
    objects: int
    ready: bool
    detail: str
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., ready: bool = ..., detail: _Optional[str] = ...) -> None: ...

class CheckStoreRequest(_message.Message):
    __slots__ = ("fix",)
    FIX_FIELD_NUMBER: _ClassVar[int]
    fix: bool
    def __init__(self, fix: bool = ...) -> None: ...

class CheckStoreResponse(_message.Message):
    __slots__ = ("part", "done", "total", "ended", "unfinished", "findings")
    PART_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    part: CheckPart
    done: int
    total: int
    ended: bool
    unfinished: str
    findings: _containers.RepeatedCompositeFieldContainer[CheckFinding]
    def __init__(self, part: _Optional[_Union[CheckPart, str]] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., ended: bool = ..., unfinished: _Optional[str] = ..., findings: _Optional[_Iterable[_Union[CheckFinding, _Mapping]]] = ...) -> None: ...

class CheckFinding(_message.Message):
    __slots__ = ("kind", "text", "remedy", "count", "fixed", "examples")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    remedy: str
    count: int
    fixed: int
    examples: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., remedy: _Optional[str] = ..., count: _Optional[int] = ..., fixed: _Optional[int] = ..., examples: _Optional[_Iterable[str]] = ...) -> None: ...

class PingStoreRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingStoreResponse(_message.Message):
    __slots__ = ("liveness", "arena")
    LIVENESS_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    liveness: _common_pb2.Liveness
    arena: ArenaInfo
    def __init__(self, liveness: _Optional[_Union[_common_pb2.Liveness, _Mapping]] = ..., arena: _Optional[_Union[ArenaInfo, _Mapping]] = ...) -> None: ...
