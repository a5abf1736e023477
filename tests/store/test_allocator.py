"""The allocator against an obvious reference, and allocators that are broken on purpose, which must fail it."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from services.common.arena_format import PAGE
from services.store.arena import allocator as module
from services.store.arena.allocator import Allocator, page_round
from services.store.arena.free_runs import FreeRuns

SLABS, SLAB_PAGES = 2, 64
SLAB = SLAB_PAGES * PAGE


class Model(RuleBasedStateMachine):
    """One flag a page says who has it; everything else is counted anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(SLABS, SLAB)
        self.pages: list[int] = [0] * (SLABS * SLAB_PAGES)
        self.blocks: dict[tuple[int, int], int] = {}

    def longest(self) -> int:
        """Pages of the longest run of free ones; runs end with their slab."""
        best = run = 0
        for number, owner in enumerate(self.pages):
            run = 0 if owner else (1 if number % SLAB_PAGES == 0 else run + 1)
            best = max(best, run)
        return best

    def fill(self, place: tuple[int, int], pages: int, owner: int) -> None:
        first = place[0] * SLAB_PAGES + place[1] // PAGE
        assert place[1] % PAGE == 0
        assert place[1] + pages * PAGE <= SLAB, "a block straddles slabs"
        before = self.pages[first : first + pages]
        assert all(bool(was) != bool(owner) for was in before), "blocks overlap"
        self.pages[first : first + pages] = [owner] * pages

    @rule(size=st.integers(1, 20 * PAGE))
    def allocate(self, size: int) -> None:
        pages = page_round(size) // PAGE
        place = self.allocator.allocate(size)
        assert (place is not None) == (pages <= self.longest()), "a run that is long enough is always found"
        if place is not None:
            self.fill(place, pages, 1)
            self.blocks[place] = pages

    @precondition(lambda self: self.blocks)
    @rule(which=st.integers(0, 1000))
    def free(self, which: int) -> None:
        place = sorted(self.blocks)[which % len(self.blocks)]
        self.fill(place, self.blocks.pop(place), 0)
        self.allocator.free(*place)

    @rule()
    def rebuild(self) -> None:
        """As after a restart."""
        claimed = [(*place, pages * PAGE) for place, pages in self.blocks.items()]
        self.allocator = Allocator(SLABS, SLAB, claimed)

    @precondition(lambda self: self.blocks)
    @rule(pages=st.integers(2, 40), keep=st.sets(st.integers(0, 20)))
    def make_way(self, pages: int, keep: set[int]) -> None:
        places = sorted(self.blocks)
        stay = {places[number] for number in keep if number < len(places)}

        def cost(place: tuple[int, int], size: int) -> float | None:
            assert size == self.blocks[place] * PAGE
            return None if place in stay else float(size)

        going = self.allocator.in_the_way(pages * PAGE, cost)
        assert not stay & set(going)
        assert len(set(going)) == len(going)
        for place in going:
            self.fill(place, self.blocks.pop(place), 0)
            self.allocator.free(*place)
        if going:
            assert self.longest() >= pages
            assert self.allocator.allocate(pages * PAGE) is not None
            self.rebuild()

    @invariant()
    def counts_add_up(self) -> None:
        used = sum(self.blocks.values()) * PAGE
        assert self.allocator.used_bytes == used
        assert self.allocator.free_bytes == self.allocator.capacity_bytes - used == self.pages.count(0) * PAGE
        assert self.allocator.longest_free_bytes == self.longest() * PAGE
        assert self.allocator.usable_bytes(PAGE) == self.allocator.free_bytes
        assert sorted(self.allocator.blocks()) == sorted(self.blocks)
        assert all(self.allocator.size_of(*place) == pages * PAGE for place, pages in self.blocks.items())

    def teardown(self) -> None:
        """Everything that is freed is usable again: whole slabs are whole."""
        for place in self.blocks:
            self.allocator.free(*place)
        assert {self.allocator.allocate(SLAB) for _ in range(SLABS)} == {(slab, 0) for slab in range(SLABS)}


def run_model(examples: int, *phases: Phase) -> None:
    fewer = {"phases": phases} if phases else {}
    run_state_machine_as_test(
        Model, settings=settings(max_examples=examples, stateful_step_count=60, deadline=None, database=None, **fewer)
    )


def test_blocks_lie_apart_and_all_that_is_freed_is_usable_again() -> None:
    run_model(150)


def _one_page_less(allocate: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, size: allocate(self, max(1, size - PAGE))


def _forgets_to_merge(free: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: Allocator, slab: int, offset: int) -> None:
        pages = self._blocks.pop(self._page(slab, offset))
        self._used_pages -= pages
        self._add_run(self._page(slab, offset), pages)

    return broken


def _merges_over_slabs(free: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: Allocator, slab: int, offset: int) -> None:
        real, self._slab_pages = self._slab_pages, SLABS * SLAB_PAGES
        try:
            free(self, 0, slab * SLAB + offset)
        finally:
            self._slab_pages = real

    return broken


def _counts_twice(free: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: Allocator, slab: int, offset: int) -> None:
        free(self, slab, offset)
        self._used_pages -= 1

    return broken


def _longest_is_not_found(best: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, pages: best(self, pages + 1)


def _leaves_what_must_stay(grow: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, first, pages, cost: grow(self, first, pages, lambda place, size: cost(place, size) or 1.0)


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (Allocator, "allocate", _one_page_less),
        (Allocator, "free", _forgets_to_merge),
        (Allocator, "free", _merges_over_slabs),
        (Allocator, "free", _counts_twice),
        (FreeRuns, "best", _longest_is_not_found),
        (Allocator, "_grow", _leaves_what_must_stay),
    ],
)
def test_a_broken_allocator_fails(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Callable[[Callable[..., Any]], object]
) -> None:
    monkeypatch.setattr(owner, method, broken(getattr(owner, method)))
    with pytest.raises((AssertionError, KeyError)):
        run_model(200, Phase.generate)


def test_one_size_fills_the_arena_to_the_last_block() -> None:
    allocator = Allocator(SLABS, SLAB)
    places = [allocator.allocate(3 * PAGE) for _ in range(SLABS * (SLAB_PAGES // 3))]
    assert None not in places
    assert len(set(places)) == len(places)
    assert allocator.allocate(3 * PAGE) is None
    assert allocator.allocate(PAGE) is not None


def test_the_hole_that_an_object_leaves_takes_the_next_of_its_size() -> None:
    allocator = Allocator(1, SLAB)
    places = [allocator.allocate(size * PAGE) for size in (5, 3, 7, 3, 5)]
    for place in places[1:4:2]:
        assert place is not None
        allocator.free(*place)
    assert {allocator.allocate(3 * PAGE) for _ in range(2)} == {places[1], places[3]}


def test_what_is_larger_than_a_slab_never_fits() -> None:
    assert Allocator(2, 16 * PAGE).allocate(17 * PAGE) is None


def _steps_per_pair(objects: int) -> float:
    """Lines of the allocator that run for freeing and allocating one block among so many of four sizes."""
    import sys

    rng = random.Random(objects)
    sizes = (1, 2, 3, 5)
    allocator = Allocator(8, objects * 3 // 8 * PAGE)
    live = [place for _ in range(objects) if (place := allocator.allocate(rng.choice(sizes) * PAGE)) is not None]
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        ours = frame.f_code.co_filename in (module.__file__, sys.modules[FreeRuns.__module__].__file__)
        lines += event == "line"
        return trace if ours else None

    pairs = 300
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(pairs):
            number = rng.randrange(len(live))
            allocator.free(*live[number])
            place = allocator.allocate(rng.choice(sizes) * PAGE)
            if place is None:
                live[number] = live.pop()
            else:
                live[number] = place
    finally:
        sys.settrace(before)
    return lines / pairs


def test_a_hundred_times_as_many_objects_cost_no_step_more() -> None:
    assert _steps_per_pair(1_000_000) <= 1.2 * _steps_per_pair(10_000)
