from kvblend.v1 import common_pb2 as _common_pb2
from kvblend.v1 import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandleKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDLE_KIND_UNSPECIFIED: _ClassVar[HandleKind]
    HANDLE_KIND_SHARED_MEMORY: _ClassVar[HandleKind]
    HANDLE_KIND_CUDA_IPC: _ClassVar[HandleKind]
    HANDLE_KIND_CUDA_VMM: _ClassVar[HandleKind]

class PlaneKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLANE_KIND_UNSPECIFIED: _ClassVar[PlaneKind]
    PLANE_KIND_KEY: _ClassVar[PlaneKind]
    PLANE_KIND_VALUE: _ClassVar[PlaneKind]
    PLANE_KIND_LATENT: _ClassVar[PlaneKind]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_COMPLETE: _ClassVar[EventKind]
    EVENT_KIND_CUDA_IPC: _ClassVar[EventKind]
    EVENT_KIND_SEMAPHORE: _ClassVar[EventKind]

class LookupState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOOKUP_STATE_UNSPECIFIED: _ClassVar[LookupState]
    LOOKUP_STATE_RUNNING: _ClassVar[LookupState]
    LOOKUP_STATE_DONE: _ClassVar[LookupState]
HANDLE_KIND_UNSPECIFIED: HandleKind
HANDLE_KIND_SHARED_MEMORY: HandleKind
HANDLE_KIND_CUDA_IPC: HandleKind
HANDLE_KIND_CUDA_VMM: HandleKind
PLANE_KIND_UNSPECIFIED: PlaneKind
PLANE_KIND_KEY: PlaneKind
PLANE_KIND_VALUE: PlaneKind
PLANE_KIND_LATENT: PlaneKind
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_COMPLETE: EventKind
EVENT_KIND_CUDA_IPC: EventKind
EVENT_KIND_SEMAPHORE: EventKind
LOOKUP_STATE_UNSPECIFIED: LookupState
LOOKUP_STATE_RUNNING: LookupState
LOOKUP_STATE_DONE: LookupState

class EngineSessionRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class EngineSessionResponse(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    def __init__(self, boot_id: _Optional[bytes] = ...) -> None: ...

class DescriptorsPacket(_message.Message):
    __slots__ = ("instance_id", "chunk_bytes", "more")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    chunk_bytes: _containers.RepeatedScalarFieldContainer[int]
    more: bool
    def __init__(self, instance_id: _Optional[str] = ..., chunk_bytes: _Optional[_Iterable[int]] = ..., more: bool = ...) -> None: ...

class DescriptorsAnswer(_message.Message):
    __slots__ = ("chunks", "slot", "refusal")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    slot: bytes
    refusal: str
    def __init__(self, chunks: _Optional[int] = ..., slot: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...

class DeviceHandle(_message.Message):
    __slots__ = ("kind", "handle", "device_uuid", "allocation_offset", "bytes", "exporter_pid")
    KIND_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPORTER_PID_FIELD_NUMBER: _ClassVar[int]
    kind: HandleKind
    handle: bytes
    device_uuid: str
    allocation_offset: int
    bytes: int
    exporter_pid: int
    def __init__(self, kind: _Optional[_Union[HandleKind, str]] = ..., handle: _Optional[bytes] = ..., device_uuid: _Optional[str] = ..., allocation_offset: _Optional[int] = ..., bytes: _Optional[int] = ..., exporter_pid: _Optional[int] = ...) -> None: ...

class Plane(_message.Message):
    __slots__ = ("group", "layer", "kind", "handle", "byte_offset", "block_stride", "token_stride", "head_stride", "element_stride", "heads", "head_size")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BYTE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRIDE_FIELD_NUMBER: _ClassVar[int]
    HEAD_STRIDE_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_STRIDE_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    group: int
    layer: int
    kind: PlaneKind
    handle: int
    byte_offset: int
    block_stride: int
    token_stride: int
    head_stride: int
    element_stride: int
    heads: int
    head_size: int
    def __init__(self, group: _Optional[int] = ..., layer: _Optional[int] = ..., kind: _Optional[_Union[PlaneKind, str]] = ..., handle: _Optional[int] = ..., byte_offset: _Optional[int] = ..., block_stride: _Optional[int] = ..., token_stride: _Optional[int] = ..., head_stride: _Optional[int] = ..., element_stride: _Optional[int] = ..., heads: _Optional[int] = ..., head_size: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("block_tokens", "blocks", "dtype", "planes")
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    block_tokens: int
    blocks: int
    dtype: _common_pb2.Dtype
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    def __init__(self, block_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., dtype: _Optional[_Union[_common_pb2.Dtype, str]] = ..., planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ...) -> None: ...

class RegisterKvCacheRequest(_message.Message):
    __slots__ = ("instance_id", "model_space", "rank", "handles", "layout", "semaphores")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_SPACE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SEMAPHORES_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    model_space: _common_pb2.ModelSpace
    rank: _common_pb2.Rank
    handles: _containers.RepeatedCompositeFieldContainer[DeviceHandle]
    layout: KvLayout
    semaphores: DeviceHandle
    def __init__(self, instance_id: _Optional[str] = ..., model_space: _Optional[_Union[_common_pb2.ModelSpace, _Mapping]] = ..., rank: _Optional[_Union[_common_pb2.Rank, _Mapping]] = ..., handles: _Optional[_Iterable[_Union[DeviceHandle, _Mapping]]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., semaphores: _Optional[_Union[DeviceHandle, _Mapping]] = ...) -> None: ...

class RegisterKvCacheResponse(_message.Message):
    __slots__ = ("boot_id", "model_space_id", "chunk_tokens", "hash_version", "object_format_version", "epoch", "store")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_VERSION_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    model_space_id: bytes
    chunk_tokens: int
    hash_version: int
    object_format_version: int
    epoch: int
    store: str
    def __init__(self, boot_id: _Optional[bytes] = ..., model_space_id: _Optional[bytes] = ..., chunk_tokens: _Optional[int] = ..., hash_version: _Optional[int] = ..., object_format_version: _Optional[int] = ..., epoch: _Optional[int] = ..., store: _Optional[str] = ...) -> None: ...

class UnregisterKvCacheRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class UnregisterKvCacheResponse(_message.Message):
    __slots__ = ("existed",)
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    existed: bool
    def __init__(self, existed: bool = ...) -> None: ...

class SlotMap(_message.Message):
    __slots__ = ("block_ids", "first_slot")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_SLOT_FIELD_NUMBER: _ClassVar[int]
    block_ids: bytes
    first_slot: int
    def __init__(self, block_ids: _Optional[bytes] = ..., first_slot: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("kind", "handle", "value", "semaphore")
    KIND_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SEMAPHORE_FIELD_NUMBER: _ClassVar[int]
    kind: EventKind
    handle: bytes
    value: int
    semaphore: int
    def __init__(self, kind: _Optional[_Union[EventKind, str]] = ..., handle: _Optional[bytes] = ..., value: _Optional[int] = ..., semaphore: _Optional[int] = ...) -> None: ...

class ProveLayoutRequest(_message.Message):
    __slots__ = ("instance_id", "slots", "tokens", "event", "expected_checksums")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    slots: SlotMap
    tokens: int
    event: Event
    expected_checksums: bytes
    def __init__(self, instance_id: _Optional[str] = ..., slots: _Optional[_Union[SlotMap, _Mapping]] = ..., tokens: _Optional[int] = ..., event: _Optional[_Union[Event, _Mapping]] = ..., expected_checksums: _Optional[bytes] = ...) -> None: ...

class ProveLayoutResponse(_message.Message):
    __slots__ = ("proven", "detail")
    PROVEN_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    proven: bool
    detail: str
    def __init__(self, proven: bool = ..., detail: _Optional[str] = ...) -> None: ...

class RopeProof(_message.Message):
    __slots__ = ("position_a", "key_a", "position_b", "key_b")
    POSITION_A_FIELD_NUMBER: _ClassVar[int]
    KEY_A_FIELD_NUMBER: _ClassVar[int]
    POSITION_B_FIELD_NUMBER: _ClassVar[int]
    KEY_B_FIELD_NUMBER: _ClassVar[int]
    position_a: int
    key_a: bytes
    position_b: int
    key_b: bytes
    def __init__(self, position_a: _Optional[int] = ..., key_a: _Optional[bytes] = ..., position_b: _Optional[int] = ..., key_b: _Optional[bytes] = ...) -> None: ...

class RegisterRopeRequest(_message.Message):
    __slots__ = ("instance_id", "ropes", "proofs")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROPES_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    ropes: _containers.RepeatedCompositeFieldContainer[_common_pb2.Rope]
    proofs: _containers.RepeatedCompositeFieldContainer[RopeProof]
    def __init__(self, instance_id: _Optional[str] = ..., ropes: _Optional[_Iterable[_Union[_common_pb2.Rope, _Mapping]]] = ..., proofs: _Optional[_Iterable[_Union[RopeProof, _Mapping]]] = ...) -> None: ...

class RegisterRopeResponse(_message.Message):
    __slots__ = ("relative_error",)
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    relative_error: float
    def __init__(self, relative_error: _Optional[float] = ...) -> None: ...

class AgentServiceLookupRequest(_message.Message):
    __slots__ = ("instance_id", "request", "space", "tokens", "opaque_spans", "want_segments", "accept_blended", "context_classes", "prefill_tokens_per_second", "no_wait", "at_least")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_SPANS_FIELD_NUMBER: _ClassVar[int]
    WANT_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_BLENDED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CLASSES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    request: _common_pb2.RequestKey
    space: _common_pb2.Space
    tokens: bytes
    opaque_spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpaqueSpan]
    want_segments: bool
    accept_blended: bool
    context_classes: _containers.RepeatedScalarFieldContainer[_common_pb2.ContextClass]
    prefill_tokens_per_second: int
    no_wait: bool
    at_least: _containers.RepeatedCompositeFieldContainer[_common_pb2.StreamPosition]
    def __init__(self, instance_id: _Optional[str] = ..., request: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., space: _Optional[_Union[_common_pb2.Space, _Mapping]] = ..., tokens: _Optional[bytes] = ..., opaque_spans: _Optional[_Iterable[_Union[_common_pb2.OpaqueSpan, _Mapping]]] = ..., want_segments: bool = ..., accept_blended: bool = ..., context_classes: _Optional[_Iterable[_Union[_common_pb2.ContextClass, str]]] = ..., prefill_tokens_per_second: _Optional[int] = ..., no_wait: bool = ..., at_least: _Optional[_Iterable[_Union[_common_pb2.StreamPosition, _Mapping]]] = ...) -> None: ...

class LookupAnswer(_message.Message):
    __slots__ = ("state", "request", "prefix_tokens", "blended_tokens", "segments", "shortfalls", "l1_chunks", "l2_chunks")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SHORTFALLS_FIELD_NUMBER: _ClassVar[int]
    L1_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    L2_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    state: LookupState
    request: _common_pb2.RequestKey
    prefix_tokens: int
    blended_tokens: int
    segments: _common_pb2.SegmentColumns
    shortfalls: _containers.RepeatedCompositeFieldContainer[_common_pb2.Shortfall]
    l1_chunks: int
    l2_chunks: int
    def __init__(self, state: _Optional[_Union[LookupState, str]] = ..., request: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., prefix_tokens: _Optional[int] = ..., blended_tokens: _Optional[int] = ..., segments: _Optional[_Union[_common_pb2.SegmentColumns, _Mapping]] = ..., shortfalls: _Optional[_Iterable[_Union[_common_pb2.Shortfall, _Mapping]]] = ..., l1_chunks: _Optional[int] = ..., l2_chunks: _Optional[int] = ...) -> None: ...

class AgentServiceLookupResponse(_message.Message):
    __slots__ = ("answer",)
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    answer: LookupAnswer
    def __init__(self, answer: _Optional[_Union[LookupAnswer, _Mapping]] = ...) -> None: ...

class GetLookupRequest(_message.Message):
    __slots__ = ("instance_id", "request_id", "wait_ms")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    request_id: str
    wait_ms: int
    def __init__(self, instance_id: _Optional[str] = ..., request_id: _Optional[str] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class GetLookupResponse(_message.Message):
    __slots__ = ("answer",)
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    answer: LookupAnswer
    def __init__(self, answer: _Optional[_Union[LookupAnswer, _Mapping]] = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("first", "length")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    first: int
    length: int
    def __init__(self, first: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ReleaseLookupRequest(_message.Message):
    __slots__ = ("instance_id", "request_id", "ranges")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    request_id: str
    ranges: _containers.RepeatedCompositeFieldContainer[TokenRange]
    def __init__(self, instance_id: _Optional[str] = ..., request_id: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ...) -> None: ...

class ReleaseLookupResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...

class RetrieveRequest(_message.Message):
    __slots__ = ("instance_id", "request", "slots", "ranges", "skip_first_tokens", "event", "keep_leases", "steps")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    KEEP_LEASES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    request: _common_pb2.RequestKey
    slots: SlotMap
    ranges: _containers.RepeatedCompositeFieldContainer[TokenRange]
    skip_first_tokens: int
    event: Event
    keep_leases: bool
    steps: LayerSteps
    def __init__(self, instance_id: _Optional[str] = ..., request: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., slots: _Optional[_Union[SlotMap, _Mapping]] = ..., ranges: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., skip_first_tokens: _Optional[int] = ..., event: _Optional[_Union[Event, _Mapping]] = ..., keep_leases: bool = ..., steps: _Optional[_Union[LayerSteps, _Mapping]] = ...) -> None: ...

class LayerSteps(_message.Message):
    __slots__ = ("count", "first", "value")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    count: int
    first: int
    value: int
    def __init__(self, count: _Optional[int] = ..., first: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...

class FailedRange(_message.Message):
    __slots__ = ("range", "reason")
    RANGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    range: TokenRange
    reason: _common_pb2.Reason
    def __init__(self, range: _Optional[_Union[TokenRange, _Mapping]] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ...) -> None: ...

class RetrieveResponse(_message.Message):
    __slots__ = ("written", "failed", "bytes")
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    written: _containers.RepeatedCompositeFieldContainer[TokenRange]
    failed: _containers.RepeatedCompositeFieldContainer[FailedRange]
    bytes: int
    def __init__(self, written: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[FailedRange, _Mapping]]] = ..., bytes: _Optional[int] = ...) -> None: ...

class StoreKvRequest(_message.Message):
    __slots__ = ("instance_id", "request", "space", "kind", "context", "tokens", "opaque_spans", "first_position", "document", "slots", "event", "reused", "allow_blended", "no_store")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_SPANS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    ALLOW_BLENDED_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    request: _common_pb2.RequestKey
    space: _common_pb2.Space
    kind: _store_pb2.StoreKind
    context: _common_pb2.Context
    tokens: bytes
    opaque_spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpaqueSpan]
    first_position: int
    document: _store_pb2.DocumentOptions
    slots: SlotMap
    event: Event
    reused: _containers.RepeatedCompositeFieldContainer[TokenRange]
    allow_blended: bool
    no_store: bool
    def __init__(self, instance_id: _Optional[str] = ..., request: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., space: _Optional[_Union[_common_pb2.Space, _Mapping]] = ..., kind: _Optional[_Union[_store_pb2.StoreKind, str]] = ..., context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., tokens: _Optional[bytes] = ..., opaque_spans: _Optional[_Iterable[_Union[_common_pb2.OpaqueSpan, _Mapping]]] = ..., first_position: _Optional[int] = ..., document: _Optional[_Union[_store_pb2.DocumentOptions, _Mapping]] = ..., slots: _Optional[_Union[SlotMap, _Mapping]] = ..., event: _Optional[_Union[Event, _Mapping]] = ..., reused: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., allow_blended: bool = ..., no_store: bool = ...) -> None: ...

class StoredChunk(_message.Message):
    __slots__ = ("first_token", "tokens", "domain", "outcome", "reason")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    tokens: int
    domain: _common_pb2.Domain
    outcome: _store_pb2.ChunkOutcome
    reason: _common_pb2.Reason
    def __init__(self, first_token: _Optional[int] = ..., tokens: _Optional[int] = ..., domain: _Optional[_Union[_common_pb2.Domain, str]] = ..., outcome: _Optional[_Union[_store_pb2.ChunkOutcome, str]] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ...) -> None: ...

class StoreKvResponse(_message.Message):
    __slots__ = ("chunks", "position")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[StoredChunk]
    position: _common_pb2.StreamPosition
    def __init__(self, chunks: _Optional[_Iterable[_Union[StoredChunk, _Mapping]]] = ..., position: _Optional[_Union[_common_pb2.StreamPosition, _Mapping]] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("instance_id", "request_id")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    request_id: str
    def __init__(self, instance_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AgentServiceClearRequest(_message.Message):
    __slots__ = ("scope", "force")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    scope: _common_pb2.ClearScope
    force: bool
    def __init__(self, scope: _Optional[_Union[_common_pb2.ClearScope, _Mapping]] = ..., force: bool = ...) -> None: ...

class AgentServiceClearResponse(_message.Message):
    __slots__ = ("removed_chunks", "kept_leased_chunks", "removed_l2_chunks")
    REMOVED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_LEASED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_L2_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    removed_chunks: int
    kept_leased_chunks: int
    removed_l2_chunks: int
    def __init__(self, removed_chunks: _Optional[int] = ..., kept_leased_chunks: _Optional[int] = ..., removed_l2_chunks: _Optional[int] = ...) -> None: ...

class AgentServiceScoreRequest(_message.Message):
    __slots__ = ("instance_id", "space", "tokens", "opaque_spans")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_SPANS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    space: _common_pb2.Space
    tokens: bytes
    opaque_spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpaqueSpan]
    def __init__(self, instance_id: _Optional[str] = ..., space: _Optional[_Union[_common_pb2.Space, _Mapping]] = ..., tokens: _Optional[bytes] = ..., opaque_spans: _Optional[_Iterable[_Union[_common_pb2.OpaqueSpan, _Mapping]]] = ...) -> None: ...

class AgentServiceScoreResponse(_message.Message):
    __slots__ = ("stores",)
    STORES_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[_store_pb2.TokenScore]
    def __init__(self, stores: _Optional[_Iterable[_Union[_store_pb2.TokenScore, _Mapping]]] = ...) -> None: ...

class GetFormatRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class GetFormatResponse(_message.Message):
    __slots__ = ("chunk_tokens", "hash_version", "object_format_version")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_VERSION_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    hash_version: int
    object_format_version: int
    def __init__(self, chunk_tokens: _Optional[int] = ..., hash_version: _Optional[int] = ..., object_format_version: _Optional[int] = ...) -> None: ...

class BlockAllocation(_message.Message):
    __slots__ = ("request_id", "block_ids", "cached_tokens", "new_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    block_ids: bytes
    cached_tokens: int
    new_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., block_ids: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ..., new_tokens: _Optional[int] = ...) -> None: ...

class ReportBlockAllocationRequest(_message.Message):
    __slots__ = ("instance_id", "allocations")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    allocations: _containers.RepeatedCompositeFieldContainer[BlockAllocation]
    def __init__(self, instance_id: _Optional[str] = ..., allocations: _Optional[_Iterable[_Union[BlockAllocation, _Mapping]]] = ...) -> None: ...

class ReportBlockAllocationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAgentStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAgentStatsResponse(_message.Message):
    __slots__ = ("instances", "retrieved_bytes", "stored_bytes", "retrieved_tokens", "failed_tokens", "latencies", "device")
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    RETRIEVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETRIEVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[InstanceStats]
    retrieved_bytes: int
    stored_bytes: int
    retrieved_tokens: int
    failed_tokens: int
    latencies: _containers.RepeatedCompositeFieldContainer[_common_pb2.LatencySummary]
    device: str
    def __init__(self, instances: _Optional[_Iterable[_Union[InstanceStats, _Mapping]]] = ..., retrieved_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., retrieved_tokens: _Optional[int] = ..., failed_tokens: _Optional[int] = ..., latencies: _Optional[_Iterable[_Union[_common_pb2.LatencySummary, _Mapping]]] = ..., device: _Optional[str] = ...) -> None: ...

class InstanceStats(_message.Message):
    __slots__ = ("instance_id", "display_name", "rope_proven", "mapped_bytes", "open_requests", "allocated_blocks_reported")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    ROPE_PROVEN_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BLOCKS_REPORTED_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    display_name: str
    rope_proven: bool
    mapped_bytes: int
    open_requests: int
    allocated_blocks_reported: int
    def __init__(self, instance_id: _Optional[str] = ..., display_name: _Optional[str] = ..., rope_proven: bool = ..., mapped_bytes: _Optional[int] = ..., open_requests: _Optional[int] = ..., allocated_blocks_reported: _Optional[int] = ...) -> None: ...

class PingAgentRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class PingAgentResponse(_message.Message):
    __slots__ = ("liveness", "instance_registered", "oldest_lease_ms", "epoch")
    LIVENESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    liveness: _common_pb2.Liveness
    instance_registered: bool
    oldest_lease_ms: int
    epoch: int
    def __init__(self, liveness: _Optional[_Union[_common_pb2.Liveness, _Mapping]] = ..., instance_registered: bool = ..., oldest_lease_ms: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...
