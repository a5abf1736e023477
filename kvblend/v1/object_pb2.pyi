from kvblend.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ObjectMeta(_message.Message):
    __slots__ = ("format_version", "space_id", "model_space_id", "tenant", "domain", "chain_hash", "previous_hash", "group", "rank", "tokens", "chunk_tokens", "stored_position", "context_class", "documents", "payload_bytes", "checksum", "groups", "ranks", "matchable", "expires_at", "pinned", "write_id", "parts", "duplicate")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_HASH_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_POSITION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_CLASS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MATCHABLE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    space_id: bytes
    model_space_id: bytes
    tenant: str
    domain: _common_pb2.Domain
    chain_hash: bytes
    previous_hash: bytes
    group: int
    rank: _common_pb2.Rank
    tokens: bytes
    chunk_tokens: int
    stored_position: int
    context_class: _common_pb2.ContextClass
    documents: _containers.RepeatedScalarFieldContainer[str]
    payload_bytes: int
    checksum: int
    groups: int
    ranks: int
    matchable: bool
    expires_at: float
    pinned: bool
    write_id: str
    parts: int
    duplicate: bool
    def __init__(self, format_version: _Optional[int] = ..., space_id: _Optional[bytes] = ..., model_space_id: _Optional[bytes] = ..., tenant: _Optional[str] = ..., domain: _Optional[_Union[_common_pb2.Domain, str]] = ..., chain_hash: _Optional[bytes] = ..., previous_hash: _Optional[bytes] = ..., group: _Optional[int] = ..., rank: _Optional[_Union[_common_pb2.Rank, _Mapping]] = ..., tokens: _Optional[bytes] = ..., chunk_tokens: _Optional[int] = ..., stored_position: _Optional[int] = ..., context_class: _Optional[_Union[_common_pb2.ContextClass, str]] = ..., documents: _Optional[_Iterable[str]] = ..., payload_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., groups: _Optional[int] = ..., ranks: _Optional[int] = ..., matchable: bool = ..., expires_at: _Optional[float] = ..., pinned: bool = ..., write_id: _Optional[str] = ..., parts: _Optional[int] = ..., duplicate: bool = ...) -> None: ...
