"""Every kernel run once before the service is ready, so that the first match is as fast as the hundredth."""

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.matcher.fold import Fold
from services.matcher.log.base import START, Position
from services.matcher.matching import Query, match, shortfalls
from services.matcher.pages import hashes_of, store_owner, tier_owner
from services.matcher.scoring import scores
from services.matcher.snapshot import parts_of, restore
from services.matcher.table import Table

_STORE, _TIER, _SPACE = "warm-up", "warm-up-tier", bytes(16)
_CHUNK, _CHUNKS = 32, 600
_LIMIT = 64 << 20
_SECONDS = 60.0


def compile_kernels() -> None:
    """The text repeats, so that runs overlap, and has chunks enough for an index to grow and to be rebuilt."""
    tokens = np.arange(_CHUNK * _CHUNKS, dtype=np.uint32)
    tokens[: 4 * _CHUNK] = np.tile(tokens[:_CHUNK], 4)
    fold = Fold(Table(_LIMIT))
    fold.apply(_page(tokens), Position(1, START.chain))
    table = fold.table
    space = table.spaces[_SPACE]
    classes = frozenset([pb.CONTEXT_CLASS_ALONE])
    query = Query(tokens[5 : 10 * _CHUNK + 20], 0, fold.owners_for(_STORE, 1, _TIER), classes)
    with table.grace.reading():
        shortfalls(table, space, query, match(table, space, query, lambda: False))
    scores(table, space, query.tokens, hashes_of(_hashes(3)), classes, _SECONDS, lambda: False)
    copy = restore(parts_of(fold, fold.applied()), fold.position, Table(_LIMIT))
    copy.digest()
    table.remove(_SPACE, pb.DOMAIN_SEGMENT, hashes_of(_hashes(_CHUNKS // 2)), tier_owner(_TIER))
    table.clear(tier_owner(_TIER))
    table.void(store_owner(_STORE))
    while table.sweep():
        pass
    copy.table.memory_limit_bytes = copy.table.size // 2
    copy.table.clear(tier_owner(_TIER))


def _hashes(count: int, first: int = 1) -> bytes:
    return b"".join(number.to_bytes(32, "little") for number in range(first, first + count))


def _page(tokens: np.ndarray) -> bytes:
    """Whole chunks and a short one, owned by a store and by a tier."""
    page = matcher_pb2.PublishRequest(store=_STORE, epoch=1, first_sequence=1)
    lengths = np.full(_CHUNKS, _CHUNK, dtype="<u4")
    lengths[-1] = _CHUNK // 2
    for owner in (
        matcher_pb2.Owner(kind=matcher_pb2.OWNER_KIND_STORE),
        matcher_pb2.Owner(kind=matcher_pb2.OWNER_KIND_L2, l2_id=_TIER),
    ):
        page.batches.add(
            added=matcher_pb2.ChunksAdded(
                space_id=_SPACE,
                owner=owner,
                chunk_tokens=_CHUNK,
                domain=pb.DOMAIN_SEGMENT,
                context_class=pb.CONTEXT_CLASS_ALONE,
                matchable=True,
                document="warm-up",
                chain_hashes=_hashes(_CHUNKS),
                previous_hashes=_hashes(_CHUNKS, 0),
                stored_positions=(np.arange(_CHUNKS, dtype="<u4") * _CHUNK).tobytes(),
                lengths=lengths.tobytes(),
                tokens=tokens[: int(lengths.sum())].tobytes(),
            )
        )
    return page.SerializeToString()
