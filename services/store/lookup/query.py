"""One lookup's question."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from blake3 import blake3

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.errors import KvblendError
from services.common.identity import Chunk as ChainChunk
from services.common.identity import chain_start, cut_chain, validate_spans
from services.common.tokens import TOKEN_BYTES, TokenArray, decode_tokens
from services.store.objects import ChunkKey
from services.store.spaces import ResolvedSpace

DEFAULT_CLASSES = (pb.CONTEXT_CLASS_ALONE, pb.CONTEXT_CLASS_SHARED_PREFIX)


@dataclass(frozen=True)
class Query:
    space: ResolvedSpace
    data: bytes = field(repr=False)
    spans: Sequence[pb.OpaqueSpan]
    want_segments: bool
    accept_blended: bool
    context_classes: tuple[pb.ContextClass, ...]
    prefill_tokens_per_second: int

    @cached_property
    def tokens(self) -> TokenArray:
        """[n] u32."""
        return decode_tokens(self.data)

    @property
    def count(self) -> int:
        return len(self.data) // TOKEN_BYTES

    @cached_property
    def _chain(self) -> "_LazyChain":
        start = chain_start(self.space.root, b"")
        return _LazyChain(cut_chain(start, self.tokens, self.space.shape.chunk_tokens, self.spans))

    @property
    def chain(self) -> list[ChainChunk]:
        """All chunks of the prompt."""
        return self._chain.upto(self.count)

    def chunk(self, index: int) -> ChainChunk | None:
        """Chunk `index` of the chain; those behind it are not hashed. None: the prompt ends before it."""
        known = self._chain.upto(index + 1)
        return known[index] if index < len(known) else None

    @property
    def domains(self) -> tuple[pb.Domain, ...]:
        """That may serve the prefix, best first."""
        return (pb.DOMAIN_EXACT, pb.DOMAIN_BLENDED) if self.accept_blended else (pb.DOMAIN_EXACT,)

    def prefix_keys(self, chunk: ChainChunk) -> list[ChunkKey]:
        return [ChunkKey(self.space.space_id, domain, chunk.chain_hash) for domain in self.domains]

    @cached_property
    def digest(self) -> bytes:
        """Equal for queries that must get the same answer."""
        flags = bytes([self.want_segments, self.accept_blended, *self.context_classes])
        spans = b"".join(span.SerializeToString(deterministic=True) for span in self.spans)
        # Lengths first: where the tokens end must not be left to what follows them.
        lengths = len(flags).to_bytes(4, "little") + len(self.data).to_bytes(8, "little")
        hasher = blake3(self.space.root + lengths + flags)
        return hasher.update(self.data).update(spans).digest()


class _LazyChain:
    """Chunks that are cut, and hashed, when somebody asks for them."""

    def __init__(self, cutting: Iterator[ChainChunk]) -> None:
        self._cutting = cutting
        self._chunks: list[ChainChunk] = []

    def upto(self, count: int) -> list[ChainChunk]:
        """At least the first `count` chunks, unless there are fewer."""
        if len(self._chunks) < count:
            self._chunks.extend(islice(self._cutting, count - len(self._chunks)))
        return self._chunks


def make_query(request: store_pb2.LookupRequest, space: ResolvedSpace) -> Query:
    """Raises KvblendError INVALID_TOKENS, EMPTY_PROMPT, INVALID_ARGUMENT."""
    if pb.CONTEXT_CLASS_UNSPECIFIED in request.context_classes:
        raise KvblendError("INVALID_ARGUMENT", "context_classes has an unspecified class")
    query = Query(
        space=space,
        data=request.tokens,
        spans=tuple(request.opaque_spans),
        want_segments=request.want_segments,
        accept_blended=request.accept_blended,
        context_classes=tuple(sorted(set(request.context_classes))) or DEFAULT_CLASSES,
        prefill_tokens_per_second=request.prefill_tokens_per_second,
    )
    # Tokens and spans are checked before anything starts.
    validate_spans(query.spans, len(query.tokens))
    return query
