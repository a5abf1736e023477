"""Where blocks lie in the slabs: best fit over runs of pages, in constant time.

Extents tile each slab: blocks in use, and the free runs between them, all of whole pages. A block comes from the
shortest run that holds it, so the hole that one object leaves takes the next object of its size. Free neighbours
merge, so an emptied slab is one run again, whatever sizes were in it.

What best fit cannot help is free space in pieces when a large block is wanted. Then `in_the_way` names a few blocks
whose going makes one run of them. Sizes are bytes, rounded up to pages.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from services.common.arena_format import PAGE
from services.store.arena.free_runs import FreeRuns

Place = tuple[int, int]

# Pieces that are looked at for the one that is completed most cheaply.
_CHOICES = 16


def page_round(size: int) -> int:
    return -(-size // PAGE) * PAGE


class Allocator:
    """Blocks of `slabs` x `slab_bytes`; not thread-safe."""

    def __init__(self, slabs: int, slab_bytes: int, claimed: Iterable[tuple[int, int, int]] = ()) -> None:
        """`claimed`: (slab, offset, size) of blocks that exist already, apart from each other."""
        # Pages are numbered through all slabs. First page of a block -> its pages.
        self._slab_pages = slab_bytes // PAGE
        self._blocks: dict[int, int] = {}
        self._runs = FreeRuns()
        # Where an extent ends -> its first page.
        self._ending: dict[int, int] = {}
        self._used_pages = 0
        self.capacity_bytes = slabs * self._slab_pages * PAGE
        edges = [slab * self._slab_pages for slab in range(slabs)]
        for slab, offset, size in sorted(claimed):
            first, pages = self._page(slab, offset), page_round(size) // PAGE
            self._add_run(edges[slab], first - edges[slab])
            self._add_block(first, pages)
            edges[slab] = first + pages
        for slab, edge in enumerate(edges):
            self._add_run(edge, (slab + 1) * self._slab_pages - edge)

    @property
    def used_bytes(self) -> int:
        return self._used_pages * PAGE

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    @property
    def longest_free_bytes(self) -> int:
        return self._runs.longest * PAGE

    def usable_bytes(self, size: int) -> int:
        """Free bytes that blocks of this size could take; to them the other free bytes are lost."""
        return self._runs.usable(page_round(size) // PAGE) * PAGE

    def allocate(self, size: int) -> Place | None:
        """(slab, offset) of a block of at least `size` bytes, or None if no run is long enough."""
        pages = page_round(size) // PAGE
        first = self._runs.best(pages)
        if first is None:
            return None
        rest = self._runs.remove(first) - pages
        self._add_block(first, pages)
        self._add_run(first + pages, rest)
        return self._place(first)

    def free(self, slab: int, offset: int) -> None:
        """Raises KeyError if no block starts there."""
        first = self._page(slab, offset)
        pages = self._blocks.pop(first)
        self._used_pages -= pages
        end = first + pages
        if end in self._runs and end % self._slab_pages:
            del self._ending[end]
            end += self._runs.remove(end)
        if first % self._slab_pages and self._ending[first] in self._runs:
            first = self._ending.pop(first)
            self._runs.remove(first)
        self._add_run(first, end - first)

    def size_of(self, slab: int, offset: int) -> int:
        """Bytes of the block that starts there; 0: none does."""
        return self._blocks.get(self._page(slab, offset), 0) * PAGE

    def blocks(self) -> Iterator[Place]:
        """Every block as of now, in no order."""
        return map(self._place, list(self._blocks))

    def fits(self, slab: int, offset: int) -> bool:
        """The block that starts there lies exactly between its neighbours."""
        first = self._page(slab, offset)
        end = first + self._blocks[first]
        if self._ending.get(end) != first:
            return False
        after = end % self._slab_pages == 0 or end in self._blocks or end in self._runs
        before = self._ending.get(first)
        if first % self._slab_pages == 0:
            return after
        return after and before is not None and first == before + self._pages(before)

    def in_the_way(self, size: int, cost: Callable[[Place, int], float | None]) -> list[Place]:
        """Blocks that must go to complete one of the longest free runs to `size` bytes, the cheapest of a few choices.

        `cost(place, bytes)`: None for a block that has to stay. Empty: no choice can be completed.
        """
        pages = page_round(size) // PAGE
        best: tuple[float, list[Place]] = (float("inf"), [])
        for first in islice(self._runs.shorter_than(pages), _CHOICES):
            found = self._grow(first, pages, cost)
            if found is not None and found[0] < best[0]:
                best = found
        return best[1]

    def _grow(
        self, first: int, pages: int, cost: Callable[[Place, int], float | None]
    ) -> tuple[float, list[Place]] | None:
        """A free run takes in its cheaper neighbour until it has so many pages: (their cost, they)."""
        low = first // self._slab_pages * self._slab_pages
        high = low + self._slab_pages
        start, end = first, first + self._runs.pages(first)
        going: list[Place] = []
        total = 0.0
        while end - start < pages:
            before = self._ending[start] if start > low else None
            after = end if end < high else None
            # Never two free runs side by side: one that is met here lies behind a block that goes.
            if before is not None and before in self._runs:
                start = before
                continue
            if after is not None and after in self._runs:
                end += self._runs.pages(after)
                continue
            left = None if before is None else cost(self._place(before), self._blocks[before] * PAGE)
            right = None if after is None else cost(self._place(after), self._blocks[after] * PAGE)
            if before is not None and left is not None and (right is None or left <= right):
                total += left
                start = before
                going.append(self._place(before))
            elif after is not None and right is not None:
                total += right
                end += self._blocks[after]
                going.append(self._place(after))
            else:
                return None
        return total, going

    def _pages(self, first: int) -> int:
        """Of the extent that starts there; 0: none does."""
        return self._blocks.get(first) or (self._runs.pages(first) if first in self._runs else 0)

    def _page(self, slab: int, offset: int) -> int:
        return slab * self._slab_pages + offset // PAGE

    def _place(self, page: int) -> Place:
        slab, first = divmod(page, self._slab_pages)
        return slab, first * PAGE

    def _add_block(self, first: int, pages: int) -> None:
        self._blocks[first] = pages
        self._ending[first + pages] = first
        self._used_pages += pages

    def _add_run(self, first: int, pages: int) -> None:
        if pages:
            self._runs.add(first, pages)
            self._ending[first + pages] = first
