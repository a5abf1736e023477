"""Clear: a scope leaves the arena, L2 and the matchers."""

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.errors import KvblendError
from services.common.identity import SPACE_ID_BYTES
from services.store.l2.second_tier import L2
from services.store.state import StoreState
from services.store.writing.writes import Writes


def validate_scope(scope: pb.ClearScope) -> None:
    """Raises KvblendError INVALID_ARGUMENT unless exactly one thing is named."""
    kind = scope.WhichOneof("scope")
    named = {
        "everything": scope.everything,
        "space_id": len(scope.space_id) == SPACE_ID_BYTES,
        "tenant": bool(scope.tenant),
        "document": bool(scope.document.tenant and scope.document.document),
    }
    if kind is None or not named[kind]:
        raise KvblendError(
            "INVALID_ARGUMENT", "scope must be one of: everything=true, a space id of 16 bytes, a tenant, a document"
        )


def clear(
    state: StoreState, writes: Writes, l2: L2 | None, scope: pb.ClearScope, force: bool, timeout: float
) -> store_pb2.ClearResponse:
    """Without force, leased chunks stay (everywhere in L1) and are counted. `timeout`: seconds for L2.

    Raises:
        KvblendError: L2_UNAVAILABLE if L2 may still hold something; the arena is cleared then.
    """
    removed = kept = 0
    writes.clear(scope)
    with state.lock:
        chunks = state.catalog.matching(scope)
        known = {chunk.key for chunk in chunks}
        for chunk in chunks:
            if chunk.protectors and not force:
                kept += 1
                continue
            state.remove(chunk, pb.REASON_CLEARED)
            removed += 1
    gone = l2.clear(scope, known, timeout) if l2 is not None else 0
    return store_pb2.ClearResponse(removed_chunks=removed, kept_leased_chunks=kept, removed_l2_chunks=gone)
