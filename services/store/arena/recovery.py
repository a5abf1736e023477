"""What a started store finds in its arena: the catalog is rebuilt by scanning the headers.

Committed objects are served again. Blocks whose writer may still be copying stay quarantined.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvblend.v1 import object_pb2
from services.common.arena_format import FLAG_IN_L2, FLAG_PINNED, PAGE, BlockState
from services.common.failpoints import passage
from services.common.identity import OBJECT_FORMAT_VERSION
from services.common.logs import get_logger
from services.store.arena.arena import Arena
from services.store.arena.blocks import BlockPool
from services.store.arena.headers import HeaderTable
from services.store.check.kinds import HEADER_DAMAGED, META_DAMAGED, META_DISAGREES
from services.store.leasing.sessions import Sessions, is_held, sessions_on_disk
from services.store.objects import info_of, key_of
from services.store.state import StoreState
from services.store.writing.writes import Writes

_log = get_logger("recovery")

_IN_USE = (BlockState.RESERVED, BlockState.COMMITTED, BlockState.QUARANTINED)


@dataclass(frozen=True)
class Found:
    pool: BlockPool
    committed: list[int]
    written: list[int]
    # Headers that nothing can be made of: in no state that there is, or in places that cannot be theirs.
    misplaced: list[int]


def open_pool(arena: Arena) -> Found:
    """Blocks in use get their places back; the others' headers are freed."""
    headers = HeaderTable(arena.catalog, arena.headers)
    misplaced = [header for header in headers.in_use() if headers.state_word(header) not in set(BlockState)]
    for header in headers.in_state(BlockState.CONDEMNED):
        # Its readers compare epochs; nobody writes into it.
        headers.free(header)
    kept = []
    for header in headers.in_state(*_IN_USE):
        passage("recovery.header")
        state = headers.state(header)
        if state != BlockState.COMMITTED and not is_held(arena.directory, headers.session(header)):
            headers.free(header)
        else:
            kept.append(header)
    sound = list(_sound(arena, headers, kept))
    misplaced += sorted(set(kept) - set(sound))
    for header in misplaced:
        _log.warning("header names a place that cannot be its own, dropped", header=header)
        headers.free(header)
    pool = BlockPool(arena, headers, sound)
    committed = [header for header in sound if headers.state(header) == BlockState.COMMITTED]
    return Found(pool, committed, sorted(set(sound) - set(committed)), misplaced)


def _place(headers: HeaderTable, header: int) -> tuple[int, int, int]:
    return headers.get(header, "slab"), headers.get(header, "offset"), headers.get(header, "capacity_bytes")


def _sound(arena: Arena, headers: HeaderTable, kept: list[int]) -> Iterator[int]:
    """Headers whose blocks are whole pages, inside the arena and apart from each other."""
    edge = (0, 0)
    for slab, offset, size, header in sorted((*_place(headers, header), header) for header in kept):
        whole = size > 0 and not offset % PAGE and not size % PAGE
        if whole and slab < arena.slabs and offset + size <= arena.slab_bytes and (slab, offset) >= edge:
            edge = (slab, offset + size)
            yield header


def restore(found: Found, arena: Arena, state: StoreState, writes: Writes, sessions: Sessions) -> Counter[str]:
    """Fills catalog, quarantine and sessions: what had to be dropped, by the kind of damage.

    The state is connected afterwards: nothing is published here.
    """
    dropped = Counter({HEADER_DAMAGED: len(found.misplaced)})
    for session_id in sessions_on_disk(arena.directory):
        sessions.adopt(session_id)
    headers = found.pool.headers
    for header in found.written:
        writes.adopt_quarantined(header, headers.session(header), headers.get(header, "reservation"))
    with state.lock:
        for header in found.committed:
            passage("recovery.object")
            meta = found.pool.read_meta(header)
            if meta is None or not _restore_object(state, header, meta):
                dropped[META_DAMAGED if meta is None else META_DISAGREES] += 1
                _log.warning("committed object cannot be used, dropped", header=header)
                found.pool.free(header)
            elif not arena.was_clean:
                state.unverified.add(header)
    if found.committed or found.written:
        _log.info("arena found", committed=len(found.committed), quarantined=len(found.written), clean=arena.was_clean)
    return +dropped


def _restore_object(state: StoreState, header: int, meta: object_pb2.ObjectMeta) -> bool:
    key, info = key_of(meta, meta.rank.tensor), info_of(meta)
    whole = meta.format_version == OBJECT_FORMAT_VERSION and meta.payload_bytes == state.pool.headers.get(
        header, "payload_bytes"
    )
    if not whole or not state.catalog.accepts(key.chunk, info, key.group, key.rank):
        return False
    chunk = state.adopt(key, header, meta)
    flags = state.pool.headers.get(header, "flags")
    if flags & FLAG_PINNED:
        state.usage.pin(chunk)
    chunk.in_l2 = bool(flags & FLAG_IN_L2)
    state.set_expiry(chunk, state.pool.headers.expires_at(header))
    return True
