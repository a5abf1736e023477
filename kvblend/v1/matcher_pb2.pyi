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
    __slots__ = ("store", "epoch", "first_sequence", "events", "reset")
    STORE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    store: str
    epoch: int
    first_sequence: int
    events: _containers.RepeatedCompositeFieldContainer[ChangeEvent]
    reset: bool
    def __init__(self, store: _Optional[str] = ..., epoch: _Optional[int] = ..., first_sequence: _Optional[int] = ..., events: _Optional[_Iterable[_Union[ChangeEvent, _Mapping]]] = ..., reset: bool = ...) -> None: ...

class ChangeEvent(_message.Message):
    __slots__ = ("added", "removed")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    added: ChunkAdded
    removed: ChunkRemoved
    def __init__(self, added: _Optional[_Union[ChunkAdded, _Mapping]] = ..., removed: _Optional[_Union[ChunkRemoved, _Mapping]] = ...) -> None: ...

class ChunkAdded(_message.Message):
    __slots__ = ("space_id", "domain", "chain_hash", "previous_hash", "tokens", "stored_position", "context_class", "document", "owner", "chunk_tokens", "matchable")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_POSITION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CLASS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHABLE_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    domain: _common_pb2.Domain
    chain_hash: bytes
    previous_hash: bytes
    tokens: bytes
    stored_position: int
    context_class: _common_pb2.ContextClass
    document: str
    owner: Owner
    chunk_tokens: int
    matchable: bool
    def __init__(self, space_id: _Optional[bytes] = ..., domain: _Optional[_Union[_common_pb2.Domain, str]] = ..., chain_hash: _Optional[bytes] = ..., previous_hash: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., stored_position: _Optional[int] = ..., context_class: _Optional[_Union[_common_pb2.ContextClass, str]] = ..., document: _Optional[str] = ..., owner: _Optional[_Union[Owner, _Mapping]] = ..., chunk_tokens: _Optional[int] = ..., matchable: bool = ...) -> None: ...

class ChunkRemoved(_message.Message):
    __slots__ = ("space_id", "domain", "chain_hash", "owner", "seen_sequence")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SEEN_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    domain: _common_pb2.Domain
    chain_hash: bytes
    owner: Owner
    seen_sequence: int
    def __init__(self, space_id: _Optional[bytes] = ..., domain: _Optional[_Union[_common_pb2.Domain, str]] = ..., chain_hash: _Optional[bytes] = ..., owner: _Optional[_Union[Owner, _Mapping]] = ..., seen_sequence: _Optional[int] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("boot_id", "applied_sequence", "needs_reset")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    APPLIED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEEDS_RESET_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    applied_sequence: int
    needs_reset: bool
    def __init__(self, boot_id: _Optional[bytes] = ..., applied_sequence: _Optional[int] = ..., needs_reset: bool = ...) -> None: ...

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
    __slots__ = ("segments", "shortfalls", "applied", "scanned_tokens", "candidates", "verified")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SHORTFALLS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    SCANNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[_common_pb2.Segment]
    shortfalls: _containers.RepeatedCompositeFieldContainer[_common_pb2.Shortfall]
    applied: _containers.RepeatedCompositeFieldContainer[_common_pb2.StreamPosition]
    scanned_tokens: int
    candidates: int
    verified: int
    def __init__(self, segments: _Optional[_Iterable[_Union[_common_pb2.Segment, _Mapping]]] = ..., shortfalls: _Optional[_Iterable[_Union[_common_pb2.Shortfall, _Mapping]]] = ..., applied: _Optional[_Iterable[_Union[_common_pb2.StreamPosition, _Mapping]]] = ..., scanned_tokens: _Optional[int] = ..., candidates: _Optional[int] = ..., verified: _Optional[int] = ...) -> None: ...

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
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMatcherStatsResponse(_message.Message):
    __slots__ = ("spaces", "table_bytes", "matches", "candidates", "verified", "refused", "applied", "latencies")
    SPACES_FIELD_NUMBER: _ClassVar[int]
    TABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MATCHES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    spaces: _containers.RepeatedCompositeFieldContainer[SpaceEntries]
    table_bytes: int
    matches: int
    candidates: int
    verified: int
    refused: int
    applied: _containers.RepeatedCompositeFieldContainer[_common_pb2.StreamPosition]
    latencies: _containers.RepeatedCompositeFieldContainer[_common_pb2.LatencySummary]
    def __init__(self, spaces: _Optional[_Iterable[_Union[SpaceEntries, _Mapping]]] = ..., table_bytes: _Optional[int] = ..., matches: _Optional[int] = ..., candidates: _Optional[int] = ..., verified: _Optional[int] = ..., refused: _Optional[int] = ..., applied: _Optional[_Iterable[_Union[_common_pb2.StreamPosition, _Mapping]]] = ..., latencies: _Optional[_Iterable[_Union[_common_pb2.LatencySummary, _Mapping]]] = ...) -> None: ...

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
