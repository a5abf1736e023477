"""The allocator against an obvious reference: blocks apart, inside one slab, and nothing lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.store.allocator import Allocator, page_round

PAGE = 4096
SLABS, SLAB_PAGES = 2, 64

steps = st.lists(st.tuples(st.booleans(), st.integers(1, 20 * PAGE), st.integers(0, 1000)), max_size=120)


def overlaps(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    return a[0] == b[0] and a[1] < b[1] + b[2] and b[1] < a[1] + a[2]


@settings(max_examples=150, deadline=None)
@given(steps)
def test_blocks_never_overlap_and_all_comes_back(script: list[tuple[bool, int, int]]) -> None:
    allocator = Allocator(SLABS, SLAB_PAGES * PAGE)
    live: list[tuple[int, int, int]] = []
    for allocate, size, which in script:
        if allocate:
            place = allocator.allocate(size)
            if place is not None:
                block = (*place, page_round(size))
                assert 0 <= block[1] <= SLAB_PAGES * PAGE - block[2]
                assert not any(overlaps(block, other) for other in live)
                live.append(block)
        elif live:
            slab, offset, _ = live.pop(which % len(live))
            allocator.free(slab, offset)
        assert allocator.used_bytes == sum(size for *_, size in live)
    again = Allocator(SLABS, SLAB_PAGES * PAGE, live)
    assert again.used_bytes == allocator.used_bytes
    place = again.allocate(PAGE)
    assert place is None or not any(overlaps((*place, PAGE), other) for other in live)
    for user in (allocator, again):
        if user is again and place is not None:
            again.free(*place)
        for slab, offset, _ in live:
            user.free(slab, offset)
        assert user.used_bytes == 0
        # Whole slabs are whole again.
        assert {user.allocate(SLAB_PAGES * PAGE) for _ in range(SLABS)} == {(slab, 0) for slab in range(SLABS)}


def test_one_size_fills_the_arena_to_the_last_block() -> None:
    allocator = Allocator(SLABS, SLAB_PAGES * PAGE)
    places = [allocator.allocate(3 * PAGE) for _ in range(SLABS * (SLAB_PAGES // 3))]
    assert None not in places
    assert len(set(places)) == len(places)
    assert allocator.allocate(3 * PAGE) is None
    assert allocator.allocate(PAGE) is not None


def test_rare_sizes_cost_what_they_hold() -> None:
    """Last partial chunks come in hundreds of sizes: none may take a large span for itself."""
    allocator = Allocator(1, 4096 * PAGE)
    for pages in range(1, 60):
        assert allocator.allocate(pages * PAGE) is not None
    assert allocator.used_bytes == sum(range(1, 60)) * PAGE
    assert allocator.allocate((4096 - sum(range(1, 60))) * PAGE) is not None


def test_what_is_larger_than_a_slab_never_fits() -> None:
    assert Allocator(2, 16 * PAGE).allocate(17 * PAGE) is None
