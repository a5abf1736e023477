"""Who a piece of KV belongs to: model spaces, spaces and chain hashes (DESIGN.md, section 2).

Golden vectors in tests/golden/identity.json hold these values for every release.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from google.protobuf import unknown_fields
from google.protobuf.message import Message

from kvblend.v1 import common_pb2 as pb
from services.common.canonical import Value, encode_record, encode_versioned
from services.common.errors import KvblendError
from services.common.tokens import TokenArray

HASH_VERSION = 1
OBJECT_FORMAT_VERSION = 1
HASH_BYTES = 32
SPACE_ID_BYTES = 16
DEFAULT_TENANT = "default"

_CHAIN_START = b"kvblend chain start 1"


def is_chunk_size(tokens: int) -> bool:
    return 16 <= tokens <= 1024 and tokens & (tokens - 1) == 0


def refuse_unknown_fields(message: Message) -> None:
    """An identity with a field that this release does not know would hash to a wrong space."""
    if len(unknown_fields.UnknownFieldSet(message)):
        raise KvblendError("INVALID_SPACE", "the identity has fields that this release does not know")


def validate_model_space(space: pb.ModelSpace) -> None:
    """Raises KvblendError WEIGHTS_UNKNOWN or INVALID_SPACE."""
    refuse_unknown_fields(space)
    if len(space.weights_fingerprint) != HASH_BYTES:
        raise KvblendError(
            "WEIGHTS_UNKNOWN", f"weights_fingerprint has {len(space.weights_fingerprint)} bytes; 32 are needed"
        )
    if space.kv_dtype == pb.DTYPE_UNSPECIFIED:
        raise KvblendError("INVALID_SPACE", "kv_dtype is not given")
    if not is_chunk_size(space.chunk_tokens):
        raise KvblendError(
            "INVALID_SPACE", f"chunk_tokens is {space.chunk_tokens}; a power of two from 16 to 1024 is needed"
        )
    if not space.groups:
        raise KvblendError("INVALID_SPACE", "at least one layer group is needed")
    for index, group in enumerate(space.groups):
        if group.attention == pb.ATTENTION_KIND_UNSPECIFIED:
            raise KvblendError("INVALID_SPACE", f"layer group {index} has no attention kind")
        if not (group.layers and group.kv_heads and group.head_size):
            raise KvblendError("INVALID_SPACE", f"layer group {index} has no layers, heads or head size")
        rope = group.rope
        if rope.style in (pb.ROPE_STYLE_NEOX, pb.ROPE_STYLE_GPTJ):
            rotated = rope.rotary_size or group.head_size
            if rotated % 2 or rope.rotary_offset + rotated > group.head_size:
                raise KvblendError("INVALID_SPACE", f"layer group {index} rotates {rotated} of {group.head_size}")
            if len(rope.inv_freq) != rotated // 2 * 8:
                raise KvblendError("INVALID_SPACE", f"layer group {index} needs {rotated // 2} f64 inverse frequencies")


def _rope_record(rope: pb.Rope) -> bytes:
    return encode_record(
        {
            1: (rope.style, 0),
            2: (rope.rotary_size, 0),
            3: (rope.rotary_offset, 0),
            4: (blake3(rope.inv_freq).digest(), blake3(b"").digest()),
            5: (rope.magnitude or 1.0, 1.0),
        }
    )


def _group_record(group: pb.LayerGroup) -> bytes:
    return encode_record(
        {
            1: (group.attention, 0),
            2: (group.layers, 0),
            3: (group.kv_heads, 0),
            4: (group.head_size, 0),
            5: (group.window_tokens, 0),
            6: (_rope_record(group.rope), b""),
        }
    )


def _model_space_fields(space: pb.ModelSpace) -> dict[int, tuple[Value, Value]]:
    return {
        1: (space.weights_fingerprint, b""),
        2: (space.kv_dtype, 0),
        3: (space.scales_digest, b""),
        4: ([_group_record(group) for group in space.groups], []),
        5: (space.tensor_parallel or 1, 1),
        6: (space.pipeline_parallel or 1, 1),
        7: (space.context_parallel or 1, 1),
        8: (space.chunk_tokens, 0),
        9: (space.numerics, ""),
        10: (space.weights_epoch, 0),
        11: (HASH_VERSION, 0),
        12: (OBJECT_FORMAT_VERSION, 0),
    }


def model_space_id(space: pb.ModelSpace) -> bytes:
    """16 bytes. Raises as `validate_model_space` does."""
    validate_model_space(space)
    return blake3(encode_versioned(_model_space_fields(space))).digest(SPACE_ID_BYTES)


def space_root(model_space: pb.ModelSpace, space: pb.Space) -> bytes:
    """32 bytes; the first 16 are the space id.

    Raises:
        KvblendError: INVALID_SPACE for an adapter digest, tenant or salt that cannot be.
    """
    refuse_unknown_fields(space)
    if len(space.adapter_digest) not in (0, HASH_BYTES):
        raise KvblendError("INVALID_SPACE", "adapter_digest must have 32 bytes, or none for the base model")
    if len(space.cache_salt) > 256 or len(space.tenant.encode()) > 256:
        raise KvblendError("INVALID_SPACE", "tenant and cache_salt have at most 256 bytes each")
    fields = _model_space_fields(model_space)
    fields[32] = (space.adapter_digest, b"")
    fields[33] = (space.tenant or DEFAULT_TENANT, DEFAULT_TENANT)
    fields[34] = (space.cache_salt, b"")
    return blake3(encode_versioned(fields)).digest()


def space_id_of(root: bytes) -> bytes:
    return root[:SPACE_ID_BYTES]


class Chunk(NamedTuple):
    """One chunk of a chain: tokens [first, first + tokens) of the text it was cut from."""

    first: int
    tokens: int
    chain_hash: bytes
    previous_hash: bytes
    has_opaque_span: bool


def validate_spans(spans: Sequence[pb.OpaqueSpan], tokens: int) -> None:
    """Raises KvblendError INVALID_ARGUMENT unless spans are ascending, apart and inside the text."""
    end = 0
    for span in spans:
        if len(span.digest) != HASH_BYTES or not span.length:
            raise KvblendError("INVALID_ARGUMENT", "an opaque span needs a length and a 32-byte digest")
        if span.offset < end or span.offset + span.length > tokens:
            raise KvblendError("INVALID_ARGUMENT", "opaque spans must be ascending, apart and inside the tokens")
        end = span.offset + span.length


def _extra(spans: Sequence[pb.OpaqueSpan], first: int, count: int) -> bytes:
    """Canonical bytes of the opaque spans' parts in one chunk."""
    parts = []
    for span in spans:
        start = max(span.offset, first)
        end = min(span.offset + span.length, first + count)
        if start < end:
            parts.append(struct.pack("<III", start - first, end - start, start - span.offset) + span.digest)
    return b"".join(parts)


def chain_start(root: bytes, context_hash: bytes) -> bytes:
    """The first `previous`: H(space_root, context). `context_hash` is empty only if KV attended to nothing."""
    return blake3(_CHAIN_START + root + context_hash).digest()


def chain_chunks(
    start: bytes, tokens: TokenArray, chunk_tokens: int, spans: Sequence[pb.OpaqueSpan] = ()
) -> list[Chunk]:
    """Chunks of a text, the last one perhaps partial; chain hashes begin from `start` (32 bytes)."""
    validate_spans(spans, len(tokens))
    return list(cut_chain(start, tokens, chunk_tokens, spans))


def cut_chain(
    start: bytes, tokens: TokenArray, chunk_tokens: int, spans: Sequence[pb.OpaqueSpan] = ()
) -> Iterator[Chunk]:
    """As `chain_chunks`, one chunk after the other; the spans are valid."""
    data = np.ascontiguousarray(tokens, dtype="<u4").view(np.uint8).data
    previous = start
    for first in range(0, len(tokens), chunk_tokens):
        count = min(chunk_tokens, len(tokens) - first)
        extra = _extra(spans, first, count) if spans else b""
        head = previous + struct.pack("<I", count)
        chain_hash = blake3(head + data[4 * first : 4 * (first + count)] + extra).digest()
        yield Chunk(first, count, chain_hash, previous, bool(extra))
        previous = chain_hash


def context_hash(root: bytes, tokens: TokenArray, chunk_tokens: int, spans: Sequence[pb.OpaqueSpan] = ()) -> bytes:
    """Chain hash of what KV attended to: 32 bytes, or empty if there is nothing."""
    if not len(tokens):
        return b""
    return chain_chunks(chain_start(root, b""), tokens, chunk_tokens, spans)[-1].chain_hash
