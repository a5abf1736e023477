"""L2 has what is marked as being there, and every part of what its headers promise."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from kvblend.v1 import object_pb2
from services.common.errors import KvblendError
from services.store.catalog import Chunk
from services.store.check.findings import Check, Inspection, chunk_name
from services.store.check.kinds import L2_MISSING, L2_TORN
from services.store.objects import ChunkKey, ObjectKey, key_of
from services.store.publishing.changes import Removed
from services.store.tiers.base import Tier

_CHUNKS = 64
_OBJECTS = 256
_CALL_SECONDS = 5.0
_T = TypeVar("_T")


def check_tier(inspection: Inspection, tier: Tier) -> Check:
    """Marked chunks looked for, then all of the tier's objects. Headers that nobody can read go while it looks.

    Raises:
        KvblendError: L2_UNAVAILABLE if it does not answer; what was found until then stays found.
    """
    with inspection.state.lock:
        marked = [chunk for chunk in inspection.state.catalog if chunk.in_l2]
    done = 0
    for chunks in batches(marked, _CHUNKS):
        # Twice: one that is being written anew is gone for a moment.
        for chunk in _missing(inspection, tier, _missing(inspection, tier, chunks)):
            if inspection.fix:
                _disclaim(inspection, chunk.key)
            inspection.findings.add(L2_MISSING, chunk_name(chunk.key), inspection.fix)
        done += len(chunks)
        yield done, len(marked)
    stored = _all_objects(inspection, tier)
    total = len(marked) + len(stored)
    for objects in batches(stored, _OBJECTS):
        for key in _torn(inspection, tier, objects):
            fixed = inspection.fix and tier.delete([key], _seconds(inspection)) > 0
            if fixed:
                _disclaim(inspection, key.chunk)
            inspection.findings.add(L2_TORN, chunk_name(key.chunk), fixed)
        done += len(objects)
        yield done, total


def batches(items: Sequence[_T], size: int) -> Iterator[list[_T]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def _seconds(inspection: Inspection) -> float:
    return max(0.0, min(_CALL_SECONDS, inspection.remaining()))


def _answered(tier: Tier, since: float, allowed: float) -> None:
    """A tier that is down or slow answers misses too: nothing is concluded from those."""
    health = tier.health()
    if not health.ready or time.monotonic() - since >= allowed:
        raise KvblendError("L2_UNAVAILABLE", health.detail or "L2 did not answer in time")


def _missing(inspection: Inspection, tier: Tier, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Those still marked that the tier does not have in full."""
    with inspection.state.lock:
        wanted = [
            (chunk, ObjectKey(chunk.key, *place))
            for chunk in chunks
            if chunk.resident and chunk.in_l2
            for place in chunk.objects
        ]
    if not wanted:
        return []
    metas = find(inspection, tier, [key for _, key in wanted])
    missing = {chunk for (chunk, _), meta in zip(wanted, metas, strict=True) if meta is None}
    return [chunk for chunk in chunks if chunk in missing]


def _disclaim(inspection: Inspection, key: ChunkKey) -> None:
    """The mark goes, and the claim that matchers know; whoever has the chunk may write it again."""
    state = inspection.state
    with state.lock:
        state.left_l2([key])
        state.outbox.append(Removed(key, state.l2_id))


def find(inspection: Inspection, tier: Tier, keys: Sequence[ObjectKey]) -> list[object_pb2.ObjectMeta | None]:
    """As the tier's own. Raises KvblendError L2_UNAVAILABLE if it did not answer."""
    since, allowed = time.monotonic(), _seconds(inspection)
    metas = tier.find(keys, allowed)
    _answered(tier, since, allowed)
    return metas


def walk(inspection: Inspection, tier: Tier, look: Callable[[object_pb2.ObjectMeta], None]) -> None:
    """Every header of the tier is looked at, perhaps more than once, and on several threads.

    Raises:
        KvblendError: L2_UNAVAILABLE if it could not be finished.
    """

    def keep(meta: object_pb2.ObjectMeta) -> bool:
        look(meta)
        return False

    since, allowed = time.monotonic(), max(0.0, inspection.remaining())
    tier.delete_where(keep, allowed)
    _answered(tier, since, allowed)


def _all_objects(inspection: Inspection, tier: Tier) -> list[tuple[ObjectKey, object_pb2.ObjectMeta]]:
    """The parts that every header of the tier promises; of its meta nothing else is kept, as there may be millions."""
    found: dict[ObjectKey, object_pb2.ObjectMeta] = {}

    def look(meta: object_pb2.ObjectMeta) -> None:
        found[key_of(meta, meta.rank.tensor)] = object_pb2.ObjectMeta(write_id=meta.write_id, parts=meta.parts)

    walk(inspection, tier, look)
    return list(found.items())


def _torn(
    inspection: Inspection, tier: Tier, objects: Sequence[tuple[ObjectKey, object_pb2.ObjectMeta]]
) -> list[ObjectKey]:
    """Those of which parts are gone, whose header is still the same."""
    torn = _lacking(inspection, tier, objects)
    if not torn:
        return []
    now = find(inspection, tier, [key for key, _ in torn])
    same = [
        (key, meta)
        for (key, meta), found in zip(torn, now, strict=True)
        if found is not None and found.write_id == meta.write_id
    ]
    return [key for key, _ in _lacking(inspection, tier, same)]


def _lacking(
    inspection: Inspection, tier: Tier, objects: Sequence[tuple[ObjectKey, object_pb2.ObjectMeta]]
) -> list[tuple[ObjectKey, object_pb2.ObjectMeta]]:
    if not objects:
        return []
    lacking = tier.lacking(objects, _seconds(inspection))
    if lacking is None:
        raise KvblendError("L2_UNAVAILABLE", tier.health().detail or "L2 did not answer in time")
    return [item for item, lacks in zip(objects, lacking, strict=True) if lacks]
