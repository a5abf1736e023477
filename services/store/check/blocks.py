"""Headers, catalog, blocks and free lists say the same about every page of the arena."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from kvblend.v1 import common_pb2 as pb
from services.common.arena_format import BlockState
from services.store.arena.allocator import Place
from services.store.catalog import Chunk
from services.store.check.findings import Check, Inspection
from services.store.check.kinds import BLOCK_LEAKED, FREE_LIST, FREE_RUNS, HEADER_DAMAGED, OBJECT_LOST
from services.store.leasing.sessions import is_held

# Looked at under one hold of the lock: well below a millisecond.
_BATCH = 128
_T = TypeVar("_T")


def check_blocks(inspection: Inspection) -> Check:
    """Catalog first, then headers, then blocks: what one step drops, a later one finds freed."""
    state = inspection.state
    with state.lock:
        chunks, in_use = list(state.catalog), state.pool.headers.in_use()
        places = list(state.pool.allocator.blocks())
    total = len(chunks) + len(in_use) + len(places)
    done = 0
    for some in _batches(chunks):
        with state.lock:
            for chunk in some:
                _look_at_chunk(inspection, chunk)
        done += len(some)
        yield done, total
    for headers in _batches(in_use):
        with state.lock:
            owned = _owned(inspection)
            for header in headers:
                _look_at_header(inspection, header, owned)
        done += len(headers)
        yield done, total
    for blocks in _batches(places):
        with state.lock:
            for place in blocks:
                _look_at_block(inspection, place)
        done += len(blocks)
        yield done, total
    _look_at_free_list(inspection)
    if inspection.fix and inspection.findings.messages():
        with state.lock:
            state.arena_usage.recount(state.catalog)


def _batches(items: Iterable[_T]) -> Iterator[list[_T]]:
    rest = iter(items)
    while batch := list(islice(rest, _BATCH)):
        yield batch


def _drop(inspection: Inspection, chunk: Chunk) -> bool:
    """Whether the chunk has left, as damaged ones do."""
    if inspection.fix and chunk.resident:
        inspection.state.remove(chunk, pb.REASON_CHECKSUM_MISMATCH)
    return not chunk.resident


def _look_at_chunk(inspection: Inspection, chunk: Chunk) -> None:
    headers = inspection.state.pool.headers
    if not chunk.resident:
        return
    lost = [header for header in chunk.objects.values() if headers.state_word(header) == BlockState.FREE]
    for header in lost:
        inspection.findings.add(OBJECT_LOST, f"header {header}", _drop(inspection, chunk))


def _owned(inspection: Inspection) -> set[int]:
    """Headers that are in use outside the catalog."""
    state, writes = inspection.state, inspection.writes
    return {*writes.reserved(), *writes.quarantined(), *state.condemned}


def _look_at_header(inspection: Inspection, header: int, owned: set[int]) -> None:
    state = inspection.state
    word = state.pool.headers.state_word(header)
    if word == BlockState.FREE:
        return
    chunk = state.catalog.of_header(header)
    sound = state.pool.is_sound(header) and (chunk is None or word == BlockState.COMMITTED)
    if not sound:
        fixed = chunk is not None and _drop(inspection, chunk)
        inspection.findings.add(HEADER_DAMAGED, f"header {header}", fixed)
    elif chunk is None and header not in owned and not _is_stores_own(inspection, header, word):
        inspection.findings.add(BLOCK_LEAKED, f"header {header}", inspection.fix and _free(inspection, header))


def _is_stores_own(inspection: Inspection, header: int, word: int) -> bool:
    """The store itself is writing it, from L2."""
    own = not any(inspection.state.pool.headers.session(header))
    return own and word == BlockState.RESERVED and bool(inspection.state.l2_id)


def _free(inspection: Inspection, header: int) -> bool:
    """Frees a block that nobody answers for; quarantines it if its writer may be alive."""
    state = inspection.state
    headers = state.pool.headers
    session = headers.session(header)
    written = headers.state(header) in (BlockState.RESERVED, BlockState.QUARANTINED)
    if written and any(session) and is_held(inspection.directory, session):
        inspection.writes.adopt_quarantined(header, session, headers.get(header, "reservation"))
        return True
    if state.leases.is_copied(header):
        return False
    state.pool.free(header)
    return True


def _look_at_block(inspection: Inspection, place: Place) -> None:
    pool = inspection.state.pool
    if not pool.allocator.size_of(*place):
        return
    name = f"slab {place[0]}, byte {place[1]}"
    if not pool.allocator.fits(*place):
        inspection.findings.add(FREE_RUNS, name, False)
    elif pool.is_ownerless(place):
        if inspection.fix:
            pool.reclaim(place)
        inspection.findings.add(BLOCK_LEAKED, name, inspection.fix)


def _look_at_free_list(inspection: Inspection) -> None:
    state = inspection.state
    with state.lock:
        listed, free = state.pool.headers.free_lists()
    wrong = set(listed) ^ set(free)
    count = len(wrong) + len(listed) - len(set(listed))
    if not count:
        return
    if inspection.fix:
        with state.lock:
            state.pool.headers.list_free_again()
    example = f"header {min(wrong, default=listed[0])}"
    inspection.findings.add_many(FREE_LIST, count, count * inspection.fix, example)
