"""Matchers find what only L2 has: if their log was lost, no store's own stream says it again."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from kvblend.v1 import object_pb2
from services.store.check.findings import Check, Inspection, chunk_name
from services.store.check.kinds import L2_UNKNOWN
from services.store.check.log import Asker, Known, is_known_by_text, not_found, questions
from services.store.check.tier import batches, find, walk
from services.store.objects import ChunkKey, ObjectKey, info_of
from services.store.publishing.changes import Added
from services.store.tiers.base import Tier

_CHUNKS = 64
_TOLD_SECONDS = 1.0

# (groups, ranks) of each chunk.
_Sizes = dict[ChunkKey, tuple[int, int]]


def check_tier_log(inspection: Inspection, tier: Tier, asker: Asker) -> Check:
    """Chunks of which the tier has every object.

    Raises:
        KvblendError: the tier or the matchers do not answer.
    """
    nobody = asker._replace(store="", epoch=0)
    sizes = _whole_chunks(inspection, tier)
    done = 0
    unknown: list[ChunkKey] = []
    for keys in batches(sorted(sizes), _CHUNKS):
        unknown += [known.key for known in _unknown(inspection, tier, nobody, keys, sizes)]
        done += len(keys)
        yield done, len(sizes)
    if unknown:
        # Another store may have written them just now, and be about to tell.
        time.sleep(min(_TOLD_SECONDS, max(0.0, inspection.remaining())))
    for keys in batches(unknown, _CHUNKS):
        for known in _unknown(inspection, tier, nobody, keys, sizes):
            if inspection.fix:
                _tell(inspection, known)
            inspection.findings.add(L2_UNKNOWN, chunk_name(known.key), inspection.fix)


def _unknown(
    inspection: Inspection, tier: Tier, nobody: Asker, keys: Sequence[ChunkKey], sizes: _Sizes
) -> Iterator[Known]:
    for chunks in questions(list(_stored(inspection, tier, keys, sizes))):
        yield from not_found(inspection, nobody, chunks)


def _tell(inspection: Inspection, known: Known) -> None:
    state = inspection.state
    with state.lock:
        state.outbox.append(Added(known.key, state.l2_id, known.info))


def _whole_chunks(inspection: Inspection, tier: Tier) -> _Sizes:
    """Of those that are there in full and that matchers should know by their text."""
    seen: dict[ChunkKey, set[tuple[int, int]]] = defaultdict(set)
    sizes: _Sizes = {}

    def look(meta: object_pb2.ObjectMeta) -> None:
        info, key = info_of(meta), ChunkKey(meta.space_id, meta.domain, meta.chain_hash)
        if is_known_by_text(key, info):
            seen[key].add((meta.group, meta.rank.tensor))
            sizes[key] = info.groups, info.ranks

    walk(inspection, tier, look)
    return {key: size for key, size in sizes.items() if len(seen[key]) == size[0] * size[1]}


def _stored(inspection: Inspection, tier: Tier, keys: Sequence[ChunkKey], sizes: _Sizes) -> Iterator[Known]:
    """Those that are still there."""
    objects = [ObjectKey(key, *place) for key in keys for place in product(*map(range, sizes[key]))]
    found = dict(zip(objects, find(inspection, tier, objects), strict=True))
    for key in keys:
        metas = [found[ObjectKey(key, *place)] for place in product(*map(range, sizes[key]))]
        infos = [info_of(meta) for meta in metas if meta is not None]
        if len(infos) == len(metas) and all(info.fits(infos[0]) for info in infos):
            yield Known(key, infos[0])
