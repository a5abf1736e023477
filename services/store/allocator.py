"""Where blocks lie in the slabs: size classes over spans of pages.

A class is one object size, rounded up to a page. It takes its blocks from spans, runs of pages inside one
slab. A class's spans grow with its use: a rare size (a document's last partial chunk) costs one block,
a common one gets spans of up to a 64th of a slab, where allocating and freeing are a pop and a push. An
empty span goes back and merges with its neighbours, so whole slabs become free again.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

from services.common.arena_format import PAGE

Place = tuple[int, int]


def page_round(size: int) -> int:
    return -(-size // PAGE) * PAGE


class _Runs:
    """Free runs of pages; best fit, neighbours merged."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []
        self._end_of: dict[Place, int] = {}
        self._start_of: dict[Place, int] = {}

    def add(self, slab: int, start: int, end: int) -> None:
        before = self._start_of.get((slab, start))
        if before is not None:
            self._remove(slab, before, start)
            start = before
        after = self._end_of.get((slab, end))
        if after is not None:
            self._remove(slab, end, after)
            end = after
        insort(self._by_size, (end - start, slab, start))
        self._end_of[slab, start] = end
        self._start_of[slab, end] = start

    def _remove(self, slab: int, start: int, end: int) -> None:
        del self._by_size[bisect_left(self._by_size, (end - start, slab, start))]
        del self._end_of[slab, start]
        del self._start_of[slab, end]

    def take(self, size: int) -> Place | None:
        index = bisect_left(self._by_size, (size, -1, -1))
        if index == len(self._by_size):
            return None
        length, slab, start = self._by_size[index]
        self._remove(slab, start, start + length)
        if length > size:
            self.add(slab, start + size, start + length)
        return slab, start


class _Span:
    __slots__ = ("blocks", "free", "size", "slab", "start")

    def __init__(self, slab: int, start: int, size: int, blocks: int) -> None:
        self.slab, self.start, self.size, self.blocks = slab, start, size, blocks
        self.free = [start + size * block for block in range(blocks)]


class Allocator:
    """Blocks of `slabs` x `slab_bytes`; not thread-safe."""

    def __init__(self, slabs: int, slab_bytes: int, claimed: Iterable[tuple[int, int, int]] = ()) -> None:
        """`claimed`: (slab, offset, size) of blocks that exist already, apart from each other."""
        self._slab_bytes = slab_bytes
        self._span_bytes = slab_bytes // 64
        self._runs = _Runs()
        self._span_of: dict[Place, _Span] = {}
        # Of each class: its spans that have a free block, and how many blocks are in use.
        self._open: dict[int, dict[_Span, None]] = {}
        self._used: dict[int, int] = {}
        self.used_bytes = 0
        self.capacity_bytes = slabs * slab_bytes
        edges = [0] * slabs
        for slab, offset, wanted in sorted(claimed):
            size = page_round(wanted)
            if edges[slab] < offset:
                self._runs.add(slab, edges[slab], offset)
            span = _Span(slab, offset, size, 1)
            span.free.clear()
            self._count(span, offset, 1)
            edges[slab] = offset + size
        for slab, edge in enumerate(edges):
            if edge < slab_bytes:
                self._runs.add(slab, edge, slab_bytes)

    def _count(self, span: _Span, offset: int, change: int) -> None:
        if change > 0:
            self._span_of[span.slab, offset] = span
        else:
            del self._span_of[span.slab, offset]
        self._used[span.size] = self._used.get(span.size, 0) + change
        self.used_bytes += change * span.size

    def allocate(self, size: int) -> Place | None:
        """(slab, offset) of a block of at least `size` bytes, or None if there is no room for it now."""
        size = page_round(size)
        if size > self._slab_bytes:
            return None
        spans = self._open.setdefault(size, {})
        if not spans and not self._grow(size):
            return None
        span = next(iter(spans))
        offset = span.free.pop()
        if not span.free:
            del spans[span]
        self._count(span, offset, 1)
        return span.slab, offset

    def _grow(self, size: int) -> bool:
        blocks = min(max(1, self._used.get(size, 0)), max(1, self._span_bytes // size))
        while blocks:
            place = self._runs.take(size * blocks)
            if place is not None:
                self._open[size][_Span(*place, size, blocks)] = None
                return True
            blocks //= 2
        return False

    def free(self, slab: int, offset: int) -> None:
        """Raises KeyError if no block starts there."""
        span = self._span_of[slab, offset]
        self._count(span, offset, -1)
        span.free.append(offset)
        spans = self._open.setdefault(span.size, {})
        if len(span.free) == span.blocks:
            spans.pop(span, None)
            self._runs.add(span.slab, span.start, span.start + span.size * span.blocks)
        else:
            spans[span] = None
