from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HostCall(_message.Message):
    __slots__ = ("method", "timeout_us", "metadata")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    method: str
    timeout_us: int
    metadata: _containers.RepeatedCompositeFieldContainer[HostMetadata]
    def __init__(self, method: _Optional[str] = ..., timeout_us: _Optional[int] = ..., metadata: _Optional[_Iterable[_Union[HostMetadata, _Mapping]]] = ...) -> None: ...

class HostAnswer(_message.Message):
    __slots__ = ("more", "code", "details", "trailing_metadata", "end_of_stream")
    MORE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    TRAILING_METADATA_FIELD_NUMBER: _ClassVar[int]
    END_OF_STREAM_FIELD_NUMBER: _ClassVar[int]
    more: bool
    code: int
    details: str
    trailing_metadata: _containers.RepeatedCompositeFieldContainer[HostMetadata]
    end_of_stream: bool
    def __init__(self, more: bool = ..., code: _Optional[int] = ..., details: _Optional[str] = ..., trailing_metadata: _Optional[_Iterable[_Union[HostMetadata, _Mapping]]] = ..., end_of_stream: bool = ...) -> None: ...

class HostMetadata(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
