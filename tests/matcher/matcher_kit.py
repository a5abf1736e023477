"""Building and checking matches, for every test of the matcher."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2

SPACE = b"s" * 16
CHUNK = 16
STORE_OWNER = matcher_pb2.Owner(kind=matcher_pb2.OWNER_KIND_STORE)
L2_OWNER = matcher_pb2.Owner(kind=matcher_pb2.OWNER_KIND_L2, l2_id="redis")
START = bytes(32)


def token_bytes(tokens: Iterable[int]) -> bytes:
    return np.fromiter(tokens, dtype="<u4").tobytes()


def name_of(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def document_chunks(
    tokens: Sequence[int],
    name: str = "doc",
    *,
    space: bytes = SPACE,
    domain: pb.Domain = pb.DOMAIN_SEGMENT,
    context_class: pb.ContextClass = pb.CONTEXT_CLASS_ALONE,
    owner: matcher_pb2.Owner = STORE_OWNER,
    chunk_tokens: int = CHUNK,
    matchable: bool = True,
) -> list[matcher_pb2.ChunkAdded]:
    """The chunks of one text, chained."""
    chunks = []
    previous = START
    for first in range(0, len(tokens), chunk_tokens):
        part = tokens[first : first + chunk_tokens]
        chain_hash = name_of(name, previous, tuple(part))
        chunks.append(
            matcher_pb2.ChunkAdded(
                space_id=space,
                domain=domain,
                chain_hash=chain_hash,
                previous_hash=previous,
                tokens=token_bytes(part),
                stored_position=first,
                context_class=context_class,
                document=name,
                owner=owner,
                chunk_tokens=chunk_tokens,
                matchable=matchable,
            )
        )
        previous = chain_hash
    return chunks


def added(*chunks: matcher_pb2.ChunkAdded) -> list[matcher_pb2.ChangeEvent]:
    return [matcher_pb2.ChangeEvent(added=chunk) for chunk in chunks]


def removed(chunk: matcher_pb2.ChunkAdded, seen_sequence: int = 0) -> matcher_pb2.ChangeEvent:
    return matcher_pb2.ChangeEvent(
        removed=matcher_pb2.ChunkRemoved(
            space_id=chunk.space_id,
            domain=chunk.domain,
            chain_hash=chunk.chain_hash,
            owner=chunk.owner,
            seen_sequence=seen_sequence,
        )
    )


def page(
    events: list[matcher_pb2.ChangeEvent], first: int = 1, store: str = "a", epoch: int = 1, reset: bool = False
) -> matcher_pb2.PublishRequest:
    return matcher_pb2.PublishRequest(store=store, epoch=epoch, first_sequence=first, events=events, reset=reset)


def ask(tokens: Iterable[int], store: str = "a", epoch: int = 1, **fields: object) -> matcher_pb2.MatchRequest:
    request = {"space_id": SPACE, "tokens": token_bytes(tokens), "store": store, "epoch": epoch}
    return matcher_pb2.MatchRequest(**(request | fields))


def check_answer(
    request: matcher_pb2.MatchRequest,
    answer: matcher_pb2.MatchResponse,
    chunks: Iterable[matcher_pb2.ChunkAdded],
) -> set[int]:
    """Covered query positions, after every segment was compared with the stored tokens themselves."""
    stored = {chunk.chain_hash: np.frombuffer(chunk.tokens, "<u4") for chunk in chunks}
    places = {chunk.chain_hash: chunk.stored_position for chunk in chunks}
    query = np.frombuffer(request.tokens, "<u4")
    covered: set[int] = set()
    for segment in answer.segments:
        lengths = np.frombuffer(segment.chunk_lengths, "<u4").tolist()
        hashes = [segment.chain_hashes[at : at + 32] for at in range(0, len(segment.chain_hashes), 32)]
        assert len(hashes) == len(lengths)
        assert sum(lengths) == segment.length >= 16
        assert segment.stored_position == places[hashes[0]] + segment.skip_tokens
        text = []
        for number, (chain_hash, length) in enumerate(zip(hashes, lengths, strict=True)):
            skip = segment.skip_tokens if number == 0 else 0
            assert number in (0, len(hashes) - 1) or length == len(stored[chain_hash])
            text += stored[chain_hash][skip : skip + length].tolist()
        positions = range(segment.query_position, segment.query_position + segment.length)
        assert text == query[positions.start : positions.stop].tolist()
        assert not covered & set(positions)
        assert positions.start >= request.skip_tokens
        covered |= set(positions)
    missing = sum(shortfall.tokens for shortfall in answer.shortfalls)
    assert len(covered) + missing + request.skip_tokens == len(query)
    return covered
