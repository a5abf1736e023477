"""S3-FIFO (Yang et al., 2023): a small queue that lets one-time chunks go quickly, a main queue, and ghosts."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from services.store.catalog import Chunk
from services.store.eviction.ghosts import Ghosts
from services.store.eviction.queues import in_order, touch

_SMALL_SHARE = 0.1
_MOST_USES = 3


class S3Fifo:
    def __init__(self) -> None:
        self._small: OrderedDict[Chunk, None] = OrderedDict()
        self._main: OrderedDict[Chunk, None] = OrderedDict()
        self._uses: dict[Chunk, int] = {}
        self._ghosts: Ghosts[None] = Ghosts()

    def added(self, chunk: Chunk, _now: float) -> None:
        known = chunk in self._ghosts
        self._ghosts.take(chunk)
        touch(self._main if known else self._small, chunk)
        self._uses[chunk] = 0

    def used(self, chunks: Sequence[Chunk], _now: float) -> None:
        for chunk in chunks:
            self._uses[chunk] = min(self._uses[chunk] + 1, _MOST_USES)

    def kept(self, chunks: Sequence[Chunk], _now: float) -> None:
        """Its place in a queue never changes."""

    def removed(self, chunk: Chunk) -> None:
        if self._uses.pop(chunk, None) is None:
            return
        if chunk in self._small:
            del self._small[chunk]
            self._ghosts.put(chunk, None)
        else:
            del self._main[chunk]
        self._ghosts.shrink(len(self._main))

    def victims(self, _now: float) -> Iterator[Chunk]:
        """Used ones get their second chance first, then all are offered."""
        offered: set[Chunk] = set()
        while (chunk := self._next(offered)) is not None:
            offered.add(chunk)
            yield chunk
        yield from (chunk for queue in (self._small, self._main) for chunk in in_order(queue) if chunk not in offered)

    def _next(self, offered: set[Chunk]) -> Chunk | None:
        for chunk in in_order(self._small):
            if len(self._small) <= _SMALL_SHARE * len(self._uses):
                break
            if self._uses[chunk]:
                del self._small[chunk]
                self._uses[chunk] = 0
                touch(self._main, chunk)
            elif chunk not in offered:
                return chunk
        for chunk in in_order(self._main):
            if self._uses[chunk]:
                self._uses[chunk] -= 1
                touch(self._main, chunk)
            elif chunk not in offered:
                return chunk
        return None
