from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_FLOAT8_E4M3: _ClassVar[Dtype]
    DTYPE_FLOAT8_E5M2: _ClassVar[Dtype]

class AttentionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTENTION_KIND_UNSPECIFIED: _ClassVar[AttentionKind]
    ATTENTION_KIND_FULL: _ClassVar[AttentionKind]
    ATTENTION_KIND_SLIDING_WINDOW: _ClassVar[AttentionKind]
    ATTENTION_KIND_MLA: _ClassVar[AttentionKind]
    ATTENTION_KIND_RECURRENT: _ClassVar[AttentionKind]

class RopeStyle(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROPE_STYLE_UNSPECIFIED: _ClassVar[RopeStyle]
    ROPE_STYLE_NONE: _ClassVar[RopeStyle]
    ROPE_STYLE_NEOX: _ClassVar[RopeStyle]
    ROPE_STYLE_GPTJ: _ClassVar[RopeStyle]
    ROPE_STYLE_NOT_RELATIVE: _ClassVar[RopeStyle]

class Domain(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DOMAIN_UNSPECIFIED: _ClassVar[Domain]
    DOMAIN_EXACT: _ClassVar[Domain]
    DOMAIN_SEGMENT: _ClassVar[Domain]
    DOMAIN_BLENDED: _ClassVar[Domain]

class ContextClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTEXT_CLASS_UNSPECIFIED: _ClassVar[ContextClass]
    CONTEXT_CLASS_ALONE: _ClassVar[ContextClass]
    CONTEXT_CLASS_SHARED_PREFIX: _ClassVar[ContextClass]
    CONTEXT_CLASS_IN_PROMPT: _ClassVar[ContextClass]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_L1: _ClassVar[Tier]
    TIER_L2: _ClassVar[Tier]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_UNKNOWN_TEXT: _ClassVar[Reason]
    REASON_NOTHING_STORED: _ClassVar[Reason]
    REASON_TOO_SHORT: _ClassVar[Reason]
    REASON_OPAQUE_SPAN: _ClassVar[Reason]
    REASON_LAST_TOKEN: _ClassVar[Reason]
    REASON_CONTEXT_CLASS_NOT_ALLOWED: _ClassVar[Reason]
    REASON_PREFIX_ONLY_SPACE: _ClassVar[Reason]
    REASON_BLENDING_OFF: _ClassVar[Reason]
    REASON_QUOTA: _ClassVar[Reason]
    REASON_SLOWER_THAN_COMPUTE: _ClassVar[Reason]
    REASON_ROPE_NOT_REGISTERED: _ClassVar[Reason]
    REASON_DEADLINE: _ClassVar[Reason]
    REASON_INCOMPLETE_RANKS: _ClassVar[Reason]
    REASON_EVICTED: _ClassVar[Reason]
    REASON_LEASE_REVOKED: _ClassVar[Reason]
    REASON_STALE_EPOCH: _ClassVar[Reason]
    REASON_STALE_GENERATION: _ClassVar[Reason]
    REASON_CHECKSUM_MISMATCH: _ClassVar[Reason]
    REASON_COPY_FAILED: _ClassVar[Reason]
    REASON_OUT_OF_BOUNDS: _ClassVar[Reason]
    REASON_SUPERSEDED: _ClassVar[Reason]
    REASON_NOT_IN_ANSWER: _ClassVar[Reason]
    REASON_MATCHER_UNAVAILABLE: _ClassVar[Reason]
    REASON_STORE_UNAVAILABLE: _ClassVar[Reason]
    REASON_AGENT_UNAVAILABLE: _ClassVar[Reason]
    REASON_L2_UNAVAILABLE: _ClassVar[Reason]
    REASON_SESSION_LOST: _ClassVar[Reason]
    REASON_NO_SPACE: _ClassVar[Reason]
    REASON_NO_STORE: _ClassVar[Reason]
    REASON_ADMISSION: _ClassVar[Reason]
    REASON_BLENDED_NOT_ALLOWED: _ClassVar[Reason]
    REASON_RESERVATION_EXPIRED: _ClassVar[Reason]
    REASON_BEING_WRITTEN: _ClassVar[Reason]
    REASON_CLEARED: _ClassVar[Reason]
DTYPE_UNSPECIFIED: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_FLOAT16: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_FLOAT8_E4M3: Dtype
DTYPE_FLOAT8_E5M2: Dtype
ATTENTION_KIND_UNSPECIFIED: AttentionKind
ATTENTION_KIND_FULL: AttentionKind
ATTENTION_KIND_SLIDING_WINDOW: AttentionKind
ATTENTION_KIND_MLA: AttentionKind
ATTENTION_KIND_RECURRENT: AttentionKind
ROPE_STYLE_UNSPECIFIED: RopeStyle
ROPE_STYLE_NONE: RopeStyle
ROPE_STYLE_NEOX: RopeStyle
ROPE_STYLE_GPTJ: RopeStyle
ROPE_STYLE_NOT_RELATIVE: RopeStyle
DOMAIN_UNSPECIFIED: Domain
DOMAIN_EXACT: Domain
DOMAIN_SEGMENT: Domain
DOMAIN_BLENDED: Domain
CONTEXT_CLASS_UNSPECIFIED: ContextClass
CONTEXT_CLASS_ALONE: ContextClass
CONTEXT_CLASS_SHARED_PREFIX: ContextClass
CONTEXT_CLASS_IN_PROMPT: ContextClass
TIER_UNSPECIFIED: Tier
TIER_L1: Tier
TIER_L2: Tier
REASON_UNSPECIFIED: Reason
REASON_UNKNOWN_TEXT: Reason
REASON_NOTHING_STORED: Reason
REASON_TOO_SHORT: Reason
REASON_OPAQUE_SPAN: Reason
REASON_LAST_TOKEN: Reason
REASON_CONTEXT_CLASS_NOT_ALLOWED: Reason
REASON_PREFIX_ONLY_SPACE: Reason
REASON_BLENDING_OFF: Reason
REASON_QUOTA: Reason
REASON_SLOWER_THAN_COMPUTE: Reason
REASON_ROPE_NOT_REGISTERED: Reason
REASON_DEADLINE: Reason
REASON_INCOMPLETE_RANKS: Reason
REASON_EVICTED: Reason
REASON_LEASE_REVOKED: Reason
REASON_STALE_EPOCH: Reason
REASON_STALE_GENERATION: Reason
REASON_CHECKSUM_MISMATCH: Reason
REASON_COPY_FAILED: Reason
REASON_OUT_OF_BOUNDS: Reason
REASON_SUPERSEDED: Reason
REASON_NOT_IN_ANSWER: Reason
REASON_MATCHER_UNAVAILABLE: Reason
REASON_STORE_UNAVAILABLE: Reason
REASON_AGENT_UNAVAILABLE: Reason
REASON_L2_UNAVAILABLE: Reason
REASON_SESSION_LOST: Reason
REASON_NO_SPACE: Reason
REASON_NO_STORE: Reason
REASON_ADMISSION: Reason
REASON_BLENDED_NOT_ALLOWED: Reason
REASON_RESERVATION_EXPIRED: Reason
REASON_BEING_WRITTEN: Reason
REASON_CLEARED: Reason

class Rope(_message.Message):
    __slots__ = ("style", "rotary_size", "rotary_offset", "inv_freq", "magnitude")
    STYLE_FIELD_NUMBER: _ClassVar[int]
    ROTARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROTARY_OFFSET_FIELD_NUMBER: _ClassVar[int]
    INV_FREQ_FIELD_NUMBER: _ClassVar[int]
    MAGNITUDE_FIELD_NUMBER: _ClassVar[int]
    style: RopeStyle
    rotary_size: int
    rotary_offset: int
    inv_freq: bytes
    magnitude: float
    def __init__(self, style: _Optional[_Union[RopeStyle, str]] = ..., rotary_size: _Optional[int] = ..., rotary_offset: _Optional[int] = ..., inv_freq: _Optional[bytes] = ..., magnitude: _Optional[float] = ...) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("attention", "layers", "kv_heads", "head_size", "window_tokens", "rope")
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    attention: AttentionKind
    layers: int
    kv_heads: int
    head_size: int
    window_tokens: int
    rope: Rope
    def __init__(self, attention: _Optional[_Union[AttentionKind, str]] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., window_tokens: _Optional[int] = ..., rope: _Optional[_Union[Rope, _Mapping]] = ...) -> None: ...

class ModelSpace(_message.Message):
    __slots__ = ("weights_fingerprint", "kv_dtype", "scales_digest", "groups", "tensor_parallel", "pipeline_parallel", "context_parallel", "chunk_tokens", "numerics", "weights_epoch", "display_name")
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SCALES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    weights_fingerprint: bytes
    kv_dtype: Dtype
    scales_digest: bytes
    groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    chunk_tokens: int
    numerics: str
    weights_epoch: int
    display_name: str
    def __init__(self, weights_fingerprint: _Optional[bytes] = ..., kv_dtype: _Optional[_Union[Dtype, str]] = ..., scales_digest: _Optional[bytes] = ..., groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., context_parallel: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., numerics: _Optional[str] = ..., weights_epoch: _Optional[int] = ..., display_name: _Optional[str] = ...) -> None: ...

class Space(_message.Message):
    __slots__ = ("model_space_id", "adapter_digest", "tenant", "cache_salt")
    MODEL_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    model_space_id: bytes
    adapter_digest: bytes
    tenant: str
    cache_salt: bytes
    def __init__(self, model_space_id: _Optional[bytes] = ..., adapter_digest: _Optional[bytes] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class OpaqueSpan(_message.Message):
    __slots__ = ("offset", "length", "digest")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    digest: bytes
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Context(_message.Message):
    __slots__ = ("tokens", "opaque_spans")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_SPANS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    opaque_spans: _containers.RepeatedCompositeFieldContainer[OpaqueSpan]
    def __init__(self, tokens: _Optional[bytes] = ..., opaque_spans: _Optional[_Iterable[_Union[OpaqueSpan, _Mapping]]] = ...) -> None: ...

class Shortfall(_message.Message):
    __slots__ = ("reason", "tokens", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    tokens: int
    detail: str
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., tokens: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("tensor", "pipeline", "context")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    pipeline: int
    context: int
    def __init__(self, tensor: _Optional[int] = ..., pipeline: _Optional[int] = ..., context: _Optional[int] = ...) -> None: ...

class RequestKey(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class SegmentColumns(_message.Message):
    __slots__ = ("query_positions", "stored_positions", "lengths", "skip_tokens", "domains", "context_classes", "document_indexes", "documents", "chunk_counts", "chain_hashes", "chunk_lengths")
    QUERY_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    STORED_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SKIP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CLASSES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_INDEXES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASHES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    query_positions: bytes
    stored_positions: bytes
    lengths: bytes
    skip_tokens: bytes
    domains: bytes
    context_classes: bytes
    document_indexes: bytes
    documents: _containers.RepeatedScalarFieldContainer[str]
    chunk_counts: bytes
    chain_hashes: bytes
    chunk_lengths: bytes
    def __init__(self, query_positions: _Optional[bytes] = ..., stored_positions: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., skip_tokens: _Optional[bytes] = ..., domains: _Optional[bytes] = ..., context_classes: _Optional[bytes] = ..., document_indexes: _Optional[bytes] = ..., documents: _Optional[_Iterable[str]] = ..., chunk_counts: _Optional[bytes] = ..., chain_hashes: _Optional[bytes] = ..., chunk_lengths: _Optional[bytes] = ...) -> None: ...

class StreamPosition(_message.Message):
    __slots__ = ("store", "epoch", "sequence")
    STORE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    store: str
    epoch: int
    sequence: int
    def __init__(self, store: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class ClearScope(_message.Message):
    __slots__ = ("everything", "space_id", "tenant", "document")
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    everything: bool
    space_id: bytes
    tenant: str
    document: DocumentScope
    def __init__(self, everything: bool = ..., space_id: _Optional[bytes] = ..., tenant: _Optional[str] = ..., document: _Optional[_Union[DocumentScope, _Mapping]] = ...) -> None: ...

class DocumentScope(_message.Message):
    __slots__ = ("tenant", "document")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    document: str
    def __init__(self, tenant: _Optional[str] = ..., document: _Optional[str] = ...) -> None: ...

class LatencySummary(_message.Message):
    __slots__ = ("name", "count", "p50_ms", "p99_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_MS_FIELD_NUMBER: _ClassVar[int]
    P99_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    p50_ms: float
    p99_ms: float
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ..., p50_ms: _Optional[float] = ..., p99_ms: _Optional[float] = ...) -> None: ...

class Liveness(_message.Message):
    __slots__ = ("service", "boot_id", "uptime_seconds", "version", "dependencies")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEPENDENCIES_FIELD_NUMBER: _ClassVar[int]
    service: str
    boot_id: bytes
    uptime_seconds: float
    version: str
    dependencies: _containers.RepeatedCompositeFieldContainer[Dependency]
    def __init__(self, service: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., uptime_seconds: _Optional[float] = ..., version: _Optional[str] = ..., dependencies: _Optional[_Iterable[_Union[Dependency, _Mapping]]] = ...) -> None: ...

class Dependency(_message.Message):
    __slots__ = ("name", "ready", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    ready: bool
    detail: str
    def __init__(self, name: _Optional[str] = ..., ready: bool = ..., detail: _Optional[str] = ...) -> None: ...
