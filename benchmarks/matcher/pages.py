"""The bench's texts as the contract's messages: what stores publish and ask."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.matcher import data
from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2

SPACE = b"bench-of-matcher"
EPOCH = 1
CLASSES = (pb.CONTEXT_CLASS_ALONE, pb.CONTEXT_CLASS_SHARED_PREFIX)
STORE_OWNER = matcher_pb2.Owner(kind=matcher_pb2.OWNER_KIND_STORE)
HASH_BYTES = 32
# Before the first chunk of a text.
_NOTHING = np.zeros((1, 4), dtype=np.uint64)


def names(ids: npt.NDArray[np.int64]) -> data.U64:
    """Chain hashes of chunks, [n, 4] words: as random as digests are, with the id behind."""
    numbers = ids.astype(np.uint64)
    return np.stack([data.mixed(numbers * np.uint64(4) + np.uint64(word)) for word in range(3)] + [numbers], axis=1)


def ids_of(chain_hashes: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(chain_hashes, dtype="<u8").reshape(-1, 4)[:, 3].astype(np.int64)


def added(texts: Sequence[data.Text]) -> matcher_pb2.ChunksAdded:
    """All chunks of some documents."""
    hashes, previous, positions, lengths = [], [], [], []
    for text in texts:
        own = names(text.first_id + np.arange(text.chunks))
        hashes.append(own)
        previous += [_NOTHING, own[:-1]]
        starts = np.arange(text.chunks, dtype="<u4") * data.CHUNK_TOKENS
        positions.append(starts)
        lengths.append(np.minimum(len(text.tokens) - starts, data.CHUNK_TOKENS))
    return matcher_pb2.ChunksAdded(
        space_id=SPACE,
        owner=STORE_OWNER,
        chunk_tokens=data.CHUNK_TOKENS,
        domain=pb.DOMAIN_SEGMENT,
        context_class=pb.CONTEXT_CLASS_ALONE,
        matchable=True,
        document="bench",
        tenant="bench",
        chain_hashes=np.concatenate(hashes).astype("<u8").tobytes(),
        previous_hashes=np.concatenate(previous).astype("<u8").tobytes(),
        stored_positions=np.concatenate(positions).astype("<u4").tobytes(),
        lengths=np.concatenate(lengths).astype("<u4").tobytes(),
        tokens=np.concatenate([text.tokens for text in texts]).astype("<u4").tobytes(),
    )


def page(store: str, first_sequence: int, texts: Sequence[data.Text]) -> matcher_pb2.PublishRequest:
    return page_of(store, first_sequence, matcher_pb2.ChangeBatch(added=added(texts)))


def page_of(store: str, first_sequence: int, batch: matcher_pb2.ChangeBatch) -> matcher_pb2.PublishRequest:
    return matcher_pb2.PublishRequest(store=store, epoch=EPOCH, first_sequence=first_sequence, batches=[batch])


def removing(chunks: matcher_pb2.ChunksAdded) -> matcher_pb2.ChangeBatch:
    """The store no longer has what it added."""
    return matcher_pb2.ChangeBatch(
        removed=matcher_pb2.ChunksRemoved(
            space_id=SPACE, owner=STORE_OWNER, domain=chunks.domain, chain_hashes=chunks.chain_hashes
        )
    )


def ask(store: str, tokens: data.U32, at_least: int = 0) -> matcher_pb2.MatchRequest:
    """What `store` may have of these tokens; `at_least`: only once its sequence has been applied."""
    request = matcher_pb2.MatchRequest(
        space_id=SPACE, tokens=tokens.astype("<u4").tobytes(), context_classes=CLASSES, store=store, epoch=EPOCH
    )
    if at_least:
        request.at_least.add(store=store, epoch=EPOCH, sequence=at_least)
    return request
