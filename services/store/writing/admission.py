"""Which offered chunks are wanted at all: kinds, domains, and duplicates of known text.

A blended prompt's chunk of which at least half came from segments holds text that is stored already. It is
taken only when the same chain is offered again within a window, and such duplicates may hold a tenth of L1.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.errors import KvblendError
from services.common.identity import Chunk as ChainChunk
from services.common.identity import chain_chunks, chain_start, context_hash
from services.common.tokens import TOKEN_BYTES, decode_tokens
from services.store.objects import ChunkInfo, ChunkKey
from services.store.spaces import ResolvedSpace
from services.store.writing.writes import Wish

_MAX_DOCUMENT_BYTES = 256
_DUPLICATES_SHARE = 0.1
# Offers that are remembered: 32 bytes and change each.
_MAX_OFFERS = 100_000


class Admission:
    """Not thread-safe: called under the state's lock."""

    def __init__(self, window: float, capacity_bytes: int, clock: Callable[[], float]) -> None:
        """`window` and `clock` in seconds."""
        self._window = window
        self._capacity = capacity_bytes
        self._clock = clock
        self._offered: OrderedDict[tuple[bytes, int], float] = OrderedDict()

    def admits(self, chain_hash: bytes, rank: int, from_segments: int, tokens: int, duplicate_bytes: int) -> bool:
        """`duplicate_bytes`: what such copies hold now. Ranks are counted apart, so that they agree."""
        if not is_duplicate(from_segments, tokens):
            return True
        now = self._clock()
        offer = (chain_hash, rank)
        before = self._offered.pop(offer, None)
        self._offered[offer] = now
        if len(self._offered) > _MAX_OFFERS:
            self._offered.popitem(last=False)
        again = before is not None and now - before <= self._window
        return again and duplicate_bytes <= _DUPLICATES_SHARE * self._capacity


def is_duplicate(from_segments: int, tokens: int) -> bool:
    """At least half of a chunk's tokens came from segments: its text is stored already."""
    return 2 * from_segments >= tokens


def cut(request: store_pb2.ReserveRequest, space: ResolvedSpace) -> list[ChainChunk]:
    """The request's chunks under the chain of its kind.

    Raises:
        KvblendError: INVALID_ARGUMENT, INVALID_TOKENS, EMPTY_PROMPT.
    """
    tokens = decode_tokens(request.tokens)
    size = space.shape.chunk_tokens
    behind = decode_tokens(request.context.tokens, field="context.tokens", allow_empty=True)
    if len(request.document.document.encode()) > _MAX_DOCUMENT_BYTES:
        raise KvblendError("INVALID_ARGUMENT", f"document has more than {_MAX_DOCUMENT_BYTES} bytes")
    if request.exact_tokens > len(tokens):
        raise KvblendError("INVALID_ARGUMENT", "exact_tokens is more than there are tokens")
    if request.kind == store_pb2.STORE_KIND_PROMPT:
        if len(behind) or request.first_position:
            raise KvblendError("INVALID_ARGUMENT", "a prompt starts at position 0 with nothing before it")
        return chain_chunks(chain_start(space.root, b""), tokens, size, request.opaque_spans)
    if request.kind != store_pb2.STORE_KIND_DOCUMENT:
        raise KvblendError("INVALID_ARGUMENT", "kind is neither a prompt nor a document")
    if request.exact_tokens != len(tokens):
        raise KvblendError("INVALID_ARGUMENT", "a document's exact_tokens must be the number of its tokens")
    if request.first_position < len(behind):
        raise KvblendError("INVALID_ARGUMENT", f"first_position lies within the {len(behind)} tokens of the context")
    before = context_hash(space.root, behind, size, request.context.opaque_spans)
    return chain_chunks(chain_start(space.root, before), tokens, size, request.opaque_spans)


def segment_shares(request: store_pb2.ReserveRequest, chunks: int) -> Sequence[int]:
    """Tokens of each chunk that came from segments. Raises KvblendError INVALID_ARGUMENT."""
    if not request.segment_tokens:
        return [0] * chunks
    if len(request.segment_tokens) != TOKEN_BYTES * chunks:
        raise KvblendError("INVALID_ARGUMENT", f"segment_tokens must have one u32 for each of {chunks} chunks")
    shares: list[int] = np.frombuffer(request.segment_tokens, "<u4").tolist()
    return shares


def wishes_of(
    request: store_pb2.ReserveRequest,
    space: ResolvedSpace,
    chunks: Sequence[ChainChunk],
    admits: Callable[[ChainChunk, int], bool],
) -> list[Wish]:
    """`admits(chunk, tokens from segments)` decides about BLENDED chunks."""
    document = request.kind == store_pb2.STORE_KIND_DOCUMENT
    behind = pb.CONTEXT_CLASS_SHARED_PREFIX if request.context.tokens else pb.CONTEXT_CLASS_ALONE
    wishes = []
    for chunk, share in zip(chunks, segment_shares(request, len(chunks)), strict=True):
        exact = chunk.first + chunk.tokens <= request.exact_tokens
        domain = pb.DOMAIN_SEGMENT if document else pb.DOMAIN_EXACT if exact else pb.DOMAIN_BLENDED
        declined = pb.REASON_UNSPECIFIED
        if domain == pb.DOMAIN_BLENDED:
            if not request.allow_blended:
                declined = pb.REASON_BLENDED_NOT_ALLOWED
            elif not admits(chunk, share):
                declined = pb.REASON_ADMISSION
        info = ChunkInfo(
            model_space_id=space.model_space_id,
            tenant=space.tenant,
            previous_hash=chunk.previous_hash,
            tokens=request.tokens[TOKEN_BYTES * chunk.first : TOKEN_BYTES * (chunk.first + chunk.tokens)],
            chunk_tokens=space.shape.chunk_tokens,
            stored_position=request.first_position + chunk.first,
            context_class=behind if document else pb.CONTEXT_CLASS_IN_PROMPT,
            document=request.document.document,
            groups=space.shape.groups,
            ranks=space.shape.ranks,
            matchable=not chunk.has_opaque_span and not space.shape.prefix_only,
            duplicate=domain == pb.DOMAIN_BLENDED and is_duplicate(share, chunk.tokens),
        )
        wishes.append(Wish(chunk, ChunkKey(space.space_id, domain, chunk.chain_hash), info, declined))
    return wishes
