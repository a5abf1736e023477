"""Every object's bytes and description are what was committed."""

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.common.checksums import checksum_of
from services.store.catalog import Chunk
from services.store.check.findings import Check, Inspection, chunk_name
from services.store.check.kinds import META_DAMAGED, META_DISAGREES, PAYLOAD_DAMAGED
from services.store.objects import ObjectKey, info_of, key_of


def check_objects(inspection: Inspection) -> Check:
    """Bytes looked at, of all. Reads without the lock what it has pinned meanwhile, as a copy to L2 does."""
    state = inspection.state
    with state.lock:
        chunks = list(state.catalog)
        total = state.pool.used_bytes
    done = 0
    for chunk in chunks:
        for place in list(chunk.objects):
            done += _look_at(inspection, chunk, place)
            yield min(done, total), total


def _look_at(inspection: Inspection, chunk: Chunk, place: tuple[int, int]) -> int:
    """Bytes read of the object (group, rank); 0 if it has left."""
    state = inspection.state
    with state.lock:
        if not chunk.resident or not state.pool.is_sound(chunk.objects[place]):
            return 0
        header = chunk.objects[place]
        state.leases.pin(chunk, header)
    try:
        with state.lock:
            meta = state.pool.read_meta(header)
            checksum = state.pool.headers.get(header, "checksum")
            payload = state.pool.payload(header)
        flaw = _flaw(ObjectKey(chunk.key, *place), chunk, meta, checksum, payload)
    finally:
        with state.lock:
            state.leases.unpin(chunk, header)
    _conclude(inspection, chunk, header, flaw)
    return len(payload)


def _flaw(key: ObjectKey, chunk: Chunk, meta: object_pb2.ObjectMeta | None, checksum: int, payload: memoryview) -> str:
    """Empty: there is none."""
    if meta is None:
        return META_DAMAGED
    same = key_of(meta, meta.rank.tensor) == key and info_of(meta).fits(chunk.info)
    if not same or meta.checksum != checksum or meta.payload_bytes != len(payload):
        return META_DISAGREES
    return "" if checksum_of(payload) == checksum else PAYLOAD_DAMAGED


def _conclude(inspection: Inspection, chunk: Chunk, header: int, flaw: str) -> None:
    state = inspection.state
    with state.lock:
        # One that left meanwhile was nobody's to read any more.
        if not chunk.resident:
            return
        if not flaw:
            state.unverified.discard(header)
            return
        if inspection.fix:
            state.stats.add("checksum_failures")
            state.remove(chunk, pb.REASON_CHECKSUM_MISMATCH)
    inspection.findings.add(flaw, chunk_name(chunk.key), inspection.fix)
