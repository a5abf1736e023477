"""Texts and queries that every process of the bench computes for itself, to the same tokens.

All tokens come from one counter-based generator (splitmix64), so any stretch of any text is computed on its own and
no NumPy version matters. Needs NumPy alone: the peers' workers import this inside their own environment.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CHUNK_TOKENS = 256
# Documents of the library are 8 K tokens long.
DOCUMENT_CHUNKS = 32
VOCABULARY = 128_000
# Where half of a query is covered, its chunks stand at no multiple of anything.
SHIFT = 5

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_STREAM_BITS = 44
_LIBRARY, _CHOICE, _QUERIES = 0, 1, 1 << 16
# Collections of documents of one length: stream = _COLLECTIONS + length.
_COLLECTIONS = 2


def mixed(counters: U64) -> U64:
    """splitmix64's output for each counter: a bijection of 64-bit words."""
    words = counters * np.uint64(_GOLDEN)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _below(limit: int, counters: U64) -> U64:
    scaled: U64 = ((mixed(counters) >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32)
    return scaled


def _counters(stream: int, first: int, count: int) -> U64:
    start = (stream << _STREAM_BITS) + first
    return np.arange(start, start + count, dtype=np.uint64)


def _tokens(stream: int, first: int, count: int) -> U32:
    return _below(VOCABULARY, _counters(stream, first, count)).astype(np.uint32)


@dataclass(frozen=True)
class Text:
    """A document, [n] u32, whose chunks have the ids first_id, first_id + 1, ...; the last one may be short."""

    first_id: int
    tokens: U32

    @property
    def chunks(self) -> int:
        return -(-len(self.tokens) // CHUNK_TOKENS)


def library(first_chunk: int, stop_chunk: int) -> Iterator[Text]:
    """The documents of chunks [first, stop) of the table; both are cut to whole documents from below."""
    for first_id in range(first_chunk, stop_chunk, DOCUMENT_CHUNKS):
        chunks = min(DOCUMENT_CHUNKS, stop_chunk - first_id)
        yield Text(first_id, _tokens(_LIBRARY, first_id * CHUNK_TOKENS, chunks * CHUNK_TOKENS))


def library_tokens(positions: I64) -> U32:
    """Tokens of the library at any positions: chunk c has c * CHUNK_TOKENS and those behind it."""
    return _below(VOCABULARY, positions.astype(np.uint64)).astype(np.uint32)


def collection(length: int, first: int, count: int, first_id: int = 0) -> Iterator[Text]:
    """Documents of one length, as other texts than the library's; ids run on from `first_id`."""
    chunks = -(-length // CHUNK_TOKENS)
    for number in range(first, first + count):
        yield Text(first_id + (number - first) * chunks, _tokens(_COLLECTIONS + length, number * length, length))


@dataclass(frozen=True)
class Query:
    """`tokens` [n] u32, in which the table's chunk chunks[i] stands at positions[i]."""

    tokens: U32
    positions: I64
    chunks: I64


def query(count: int, coverage: int, table_chunks: int, number: int) -> Query:
    """Query `number` of this kind: random tokens, of which `coverage` percent (0, 50, 100) are chunks of the table.

    Chunks are distinct and drawn from the whole table. At 100 % they stand one behind another, at 50 % with gaps of
    their own length, all moved by SHIFT.
    """
    stream = _QUERIES + number
    tokens = _tokens(stream, count, count)
    slots = count // CHUNK_TOKENS
    wanted = slots * coverage // 100
    step = slots // wanted if wanted else 1
    chunks = _distinct(wanted, table_chunks, stream)
    positions = np.arange(wanted, dtype=np.int64) * (step * CHUNK_TOKENS)
    offsets = np.arange(CHUNK_TOKENS)
    tokens[positions[:, None] + offsets] = library_tokens(chunks[:, None] * CHUNK_TOKENS + offsets)
    if step > 1:
        tokens = np.roll(tokens, SHIFT)
        positions += SHIFT
    return Query(tokens, positions, chunks)


def _distinct(wanted: int, limit: int, stream: int) -> I64:
    drawn = _below(limit, _counters(_CHOICE, stream << 20, 3 * wanted)).astype(np.int64)
    _, first = np.unique(drawn, return_index=True)
    return drawn[np.sort(first)[:wanted]]


def shuffled(count: int, number: int) -> I64:
    """A permutation of [0, count)."""
    return np.argsort(mixed(_counters(_CHOICE, (_QUERIES + number) << 20, count)), kind="stable")
