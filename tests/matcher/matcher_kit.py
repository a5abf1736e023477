"""Building what stores publish and matchers are asked, and checking answers, for every test of the matcher."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2

SPACE = b"s" * 16
CHUNK = 16
START = bytes(32)
TIER = "redis"
EVERY_CLASS = [pb.CONTEXT_CLASS_ALONE, pb.CONTEXT_CLASS_SHARED_PREFIX, pb.CONTEXT_CLASS_IN_PROMPT]
ALL_BITS = (1 << 31) - 1


@dataclass(frozen=True)
class Chunk:
    """A chunk and who has it: the publishing store, or with `l2` that tier."""

    chain_hash: bytes
    previous_hash: bytes
    tokens: tuple[int, ...]
    stored_position: int
    space: bytes = SPACE
    domain: int = pb.DOMAIN_SEGMENT
    context_class: int = pb.CONTEXT_CLASS_ALONE
    document: str = ""
    tenant: str = ""
    chunk_tokens: int = CHUNK
    matchable: bool = True
    l2: str = ""

    @property
    def key(self) -> tuple[bytes, int, bytes]:
        return self.space, self.domain, self.chain_hash

    @property
    def end(self) -> int:
        return self.stored_position + len(self.tokens)


@dataclass(frozen=True)
class Added:
    chunks: Sequence[Chunk]

    @property
    def count(self) -> int:
        return len(self.chunks)


@dataclass(frozen=True)
class Removed:
    chunks: Sequence[Chunk]
    seen: int = 0

    @property
    def count(self) -> int:
        return len(self.chunks)


@dataclass(frozen=True)
class Cleared:
    l2: str = ""
    space: bytes = b""
    tenant: str = ""
    document: str = ""
    count: int = field(default=1, init=False)


Change = Added | Removed | Cleared


def token_bytes(tokens: Iterable[int]) -> bytes:
    return np.fromiter(tokens, dtype="<u4").tobytes()


def numbers(column: bytes) -> list[int]:
    return np.frombuffer(column, "<u4").tolist()


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


def name_of(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def document_chunks(tokens: Sequence[int], name: str = "doc", **facts: object) -> list[Chunk]:
    """The chunks of one text, chained. facts: of `Chunk`; `document` is the name if it is not given."""
    size = int(facts.get("chunk_tokens", CHUNK))
    chunks = []
    previous = START
    for first in range(0, len(tokens), size):
        part = tuple(tokens[first : first + size])
        chain_hash = name_of(name, previous, part)
        chunks.append(Chunk(chain_hash, previous, part, first, **({"document": name} | facts)))
        previous = chain_hash
    return chunks


def owner_message(l2: str) -> matcher_pb2.Owner:
    kind = matcher_pb2.OWNER_KIND_L2 if l2 else matcher_pb2.OWNER_KIND_STORE
    return matcher_pb2.Owner(kind=kind, l2_id=l2)


def batches(*changes: Change) -> list[matcher_pb2.ChangeBatch]:
    """Chunks that are alike travel together, in their order."""
    found = []
    for change in changes:
        if isinstance(change, Cleared):
            scope = {"space_id": change.space, "tenant": change.tenant, "document": change.document}
            found.append(matcher_pb2.ChangeBatch(cleared=matcher_pb2.Cleared(owner=owner_message(change.l2), **scope)))
        elif isinstance(change, Removed):
            found += [_removed(list(group), change.seen) for _, group in groupby(change.chunks, _where)]
        else:
            found += [_added(list(group)) for _, group in groupby(change.chunks, _alike)]
    return found


def _where(chunk: Chunk) -> tuple[object, ...]:
    return chunk.space, chunk.domain, chunk.l2


def _alike(chunk: Chunk) -> tuple[object, ...]:
    return (*_where(chunk), chunk.context_class, chunk.document, chunk.tenant, chunk.chunk_tokens, chunk.matchable)


def _added(chunks: list[Chunk]) -> matcher_pb2.ChangeBatch:
    first = chunks[0]
    return matcher_pb2.ChangeBatch(
        added=matcher_pb2.ChunksAdded(
            space_id=first.space,
            owner=owner_message(first.l2),
            chunk_tokens=first.chunk_tokens,
            domain=first.domain,
            context_class=first.context_class,
            matchable=first.matchable,
            document=first.document,
            tenant=first.tenant,
            chain_hashes=b"".join(chunk.chain_hash for chunk in chunks),
            previous_hashes=b"".join(chunk.previous_hash for chunk in chunks),
            stored_positions=token_bytes(chunk.stored_position for chunk in chunks),
            lengths=token_bytes(len(chunk.tokens) for chunk in chunks),
            tokens=token_bytes(token for chunk in chunks for token in chunk.tokens),
        )
    )


def _removed(chunks: list[Chunk], seen: int) -> matcher_pb2.ChangeBatch:
    first = chunks[0]
    return matcher_pb2.ChangeBatch(
        removed=matcher_pb2.ChunksRemoved(
            space_id=first.space,
            owner=owner_message(first.l2),
            domain=first.domain,
            chain_hashes=b"".join(chunk.chain_hash for chunk in chunks),
            seen_position=seen,
        )
    )


def page(
    changes: Sequence[Change], first: int = 1, store: str = "a", epoch: int = 1, reset: bool = False
) -> matcher_pb2.PublishRequest:
    return matcher_pb2.PublishRequest(
        store=store, epoch=epoch, first_sequence=first, batches=batches(*changes), reset=reset
    )


def ask(tokens: Iterable[int], store: str = "a", epoch: int = 1, **fields: object) -> matcher_pb2.MatchRequest:
    request = {"space_id": SPACE, "tokens": token_bytes(tokens), "store": store, "epoch": epoch}
    return matcher_pb2.MatchRequest(**(request | fields))


@dataclass(frozen=True)
class Segment:
    query_position: int
    stored_position: int
    length: int
    skip_tokens: int
    domain: int
    context_class: int
    document: str
    chain_hashes: list[bytes]
    chunk_lengths: list[int]


def segments_of(answer: matcher_pb2.MatchResponse) -> list[Segment]:
    columns = answer.segments
    counts = numbers(columns.chunk_counts)
    hashes = [columns.chain_hashes[at : at + 32] for at in range(0, len(columns.chain_hashes), 32)]
    lengths = numbers(columns.chunk_lengths)
    assert len(hashes) == len(lengths) == sum(counts)
    segments = []
    for fields in zip(
        numbers(columns.query_positions),
        numbers(columns.stored_positions),
        numbers(columns.lengths),
        numbers(columns.skip_tokens),
        columns.domains,
        columns.context_classes,
        (columns.documents[index] for index in numbers(columns.document_indexes)),
        counts,
        strict=True,
    ):
        *facts, count = fields
        segments.append(Segment(*facts, hashes[:count], lengths[:count]))
        hashes, lengths = hashes[count:], lengths[count:]
    return segments


Known = Mapping[tuple[int, bytes], Chunk]


def check_answer(
    request: matcher_pb2.MatchRequest, answer: matcher_pb2.MatchResponse, chunks: Iterable[Chunk]
) -> set[int]:
    """Covered query positions, after everything that an answer says was compared with the stored chunks themselves."""
    return check_segments(request, answer, {(chunk.domain, chunk.chain_hash): chunk for chunk in chunks})


def check_segments(request: matcher_pb2.MatchRequest, answer: matcher_pb2.MatchResponse, known: Known) -> set[int]:
    query = numbers(request.tokens)
    covered: set[int] = set()
    for segment in segments_of(answer):
        parts = [known[segment.domain, chain_hash] for chain_hash in segment.chain_hashes]
        assert sum(segment.chunk_lengths) == segment.length >= 16
        assert segment.stored_position == parts[0].stored_position + segment.skip_tokens
        assert segment.document == parts[0].document
        assert segment.context_class == max(part.context_class for part in parts)
        stored: list[int] = []
        for number, (part, length) in enumerate(zip(parts, segment.chunk_lengths, strict=True)):
            skip = segment.skip_tokens if number == 0 else 0
            assert 0 < length <= len(part.tokens) - skip
            assert number == len(parts) - 1 or length == len(part.tokens) - skip
            assert number == 0 or (part.previous_hash, part.stored_position) == (
                parts[number - 1].chain_hash,
                parts[number - 1].end,
            )
            stored += part.tokens[skip : skip + length]
        positions = range(segment.query_position, segment.query_position + segment.length)
        assert stored == query[positions.start : positions.stop]
        assert positions.start >= max([*covered, request.skip_tokens - 1]) + (1 if covered else 0)
        assert not covered & set(positions)
        covered |= set(positions)
    missing = sum(shortfall.tokens for shortfall in answer.shortfalls)
    assert len(covered) + missing + request.skip_tokens == len(query)
    assert answer.verified <= answer.candidates
    return covered
