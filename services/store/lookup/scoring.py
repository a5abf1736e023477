"""Score: how many of these tokens each store could serve, for routers that choose an engine. No leases."""

from kvblend.v1 import matcher_pb2, store_pb2
from services.common.errors import KvblendError
from services.store.lookup import prefix
from services.store.lookup.matchers import Matchers
from services.store.lookup.query import Query
from services.store.state import StoreState


def score(
    state: StoreState, matchers: Matchers, query: Query, store: str, timeout: float
) -> store_pb2.StoreServiceScoreResponse:
    """What a matcher knows of all stores; without one, this store's own prefix. `timeout` in seconds."""
    request = matcher_pb2.ScoreRequest(
        space_id=query.space.space_id,
        tokens=query.data,
        chain_hashes=b"".join(
            chunk.chain_hash for chunk in query.chain if chunk.tokens == query.space.shape.chunk_tokens
        ),
        chunk_tokens=query.space.shape.chunk_tokens,
        context_classes=query.context_classes,
    )
    try:
        answer = matchers.score(request, timeout)
    except KvblendError:
        with state.lock:
            own = prefix.walk(state, query, 0).tokens
        alone = store_pb2.TokenScore(store=store, prefix_tokens=own, anywhere_tokens=own)
        return store_pb2.StoreServiceScoreResponse(stores=[alone])
    return store_pb2.StoreServiceScoreResponse(
        stores=[
            store_pb2.TokenScore(
                store=item.store, prefix_tokens=item.prefix_tokens, anywhere_tokens=item.anywhere_tokens
            )
            for item in answer.stores
        ]
    )
