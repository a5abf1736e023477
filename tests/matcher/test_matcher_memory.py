"""Where entries' places come from and go to: slots, reserved memory, grace periods. Each against an obvious model."""

import gc
import mmap
import threading
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from history import history_of
from hypothesis import given, settings
from hypothesis import strategies as st
from matcher_kit import document_chunks, text

from services.matcher.grace import Grace
from services.matcher.reservation import Reservation
from services.matcher.slabs import _WARM_SLABS, Slabs

SLABS, SLAB = 6, 64
sizes = st.sampled_from([4, 8, 12, 64])
steps = st.lists(st.tuples(sizes, st.integers(-9, 9)), max_size=40)


@given(steps)
@settings(deadline=None)
def test_slots_never_overlap_and_are_given_as_long_as_there_is_room(plan: list[tuple[int, int]]) -> None:
    slabs = Slabs(SLABS, SLAB, 4, 64, lambda first, last: None)
    held: dict[int, int] = {}
    for size, count in plan:
        if count >= 0:
            offsets = slabs.take(size, count).tolist()
            held |= dict.fromkeys(offsets, size)
            assert len(offsets) == count or is_full(held, size)
        else:
            given_back = list(held)[:-count]
            slabs.give(np.array(given_back, dtype=np.int64))
            for offset in given_back:
                del held[offset]
        units = [unit for offset, size in held.items() for unit in range(offset, offset + size)]
        assert len(units) == len(set(units)) == slabs.used
        assert max(units, default=-1) < slabs.begun <= SLABS * SLAB
        # A slot never straddles slabs, and a slab has slots of one size.
        for offset, one in held.items():
            assert offset // SLAB == (offset + one - 1) // SLAB
            assert {other for at, other in held.items() if at // SLAB == offset // SLAB} == {one}


def is_full(held: dict[int, int], size: int) -> bool:
    """No slab is empty, and none with slots of this size has room."""
    inside = [[other for offset, other in held.items() if offset // SLAB == slab] for slab in range(SLABS)]
    return all(slots and (slots[0] != size or len(slots) == SLAB // size) for slots in inside)


def test_a_slab_of_one_size_serves_another_when_it_is_empty() -> None:
    slabs = Slabs(SLABS, SLAB, 4, 64, lambda first, last: None)
    for size in (4, 64, 12, 8) * 3:
        offsets = slabs.take(size, 1000)
        assert len(offsets) == SLABS * (SLAB // size)
        slabs.give(offsets)
        assert slabs.used == 0


def test_memory_of_empty_slabs_goes_back_but_for_a_few() -> None:
    released: list[tuple[int, int]] = []
    count = 4 * _WARM_SLABS
    slabs = Slabs(count, SLAB, 4, 64, lambda first, last: released.append((first, last)))
    offsets = slabs.take(64, count)
    for offset in offsets.tolist():
        slabs.give(np.array([offset]))
    assert len(released) == count - _WARM_SLABS
    assert all(last - first == SLAB and first % SLAB == 0 for first, last in released)
    assert len(slabs.take(64, count)) == count


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * mmap.PAGESIZE


def test_reserved_memory_is_taken_when_it_is_written_and_can_go_back() -> None:
    before = resident_bytes()
    reserved = Reservation((1 << 20, 64), np.uint32)
    assert resident_bytes() - before < 32 << 20
    reserved.array[: 1 << 18] = 7
    assert resident_bytes() - before >= 60 << 20
    reserved.give_back(10, (1 << 18) - 10)
    assert resident_bytes() - before < 32 << 20
    assert not reserved.array[64 : (1 << 18) - 64].any()
    assert (reserved.array[:10] == 7).all()
    assert (reserved.array[(1 << 18) - 10 : 1 << 18] == 7).all()


def test_a_table_that_was_replaced_gives_its_memory_back_at_once() -> None:
    """A reload makes a new table beside the old one: that must not wait for a garbage collection."""
    history: Any = history_of(*document_chunks(text(1, 200)))
    columns = weakref.ref(history.table._store)
    gc.collect()
    gc.disable()
    try:
        del history
        assert columns() is None
    finally:
        gc.enable()


class GraceModel:
    """Who is inside, and what was retired while who was inside."""

    def __init__(self) -> None:
        self.grace = Grace()
        self.inside: dict[int, ExitStack] = {}
        self.waits_for: dict[int, set[int]] = {}
        self.freed: list[int] = []

    def enter(self, reader: int) -> None:
        stack = ExitStack()
        stack.enter_context(self.grace.reading())
        self.inside[reader] = stack

    def leave(self, reader: int) -> None:
        self.inside.pop(reader).close()
        for readers in self.waits_for.values():
            readers.discard(reader)

    def retire(self, number: int) -> None:
        self.waits_for[number] = set(self.inside)
        self.grace.retire(lambda: self.freed.append(number))


@given(st.lists(st.integers(0, 5), max_size=60))
def test_what_is_retired_is_freed_when_those_who_could_see_it_have_left(plan: list[int]) -> None:
    """0, 1: somebody enters or the first leaves; 2: the last leaves; 3, 4: something is retired; 5: it is collected."""
    model = GraceModel()
    for number, step in enumerate(plan):
        if step == 0:
            model.enter(number)
        elif step in (1, 2) and model.inside:
            model.leave(list(model.inside)[0 if step == 1 else -1])
        elif step in (3, 4):
            model.retire(number)
        elif step == 5:
            model.grace.collect()
            free = []
            for retired, readers in model.waits_for.items():
                if readers:
                    break
                free.append(retired)
            assert model.freed == free
            assert model.grace.pending == len(model.waits_for) - len(free)


def test_readers_in_many_threads_come_and_go_and_nothing_waits_for_ever() -> None:
    grace = Grace()
    freed: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with grace.reading():
                pass

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for number in range(2000):
        grace.retire(lambda number=number: freed.append(number))
        grace.collect()
    stop.set()
    for reader in readers:
        reader.join(60)
    grace.collect()
    assert freed == list(range(2000))
    assert grace.pending == 0
