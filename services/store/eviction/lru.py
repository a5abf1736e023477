"""Least recently used first: the plain policy that others are compared with."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from services.store.catalog import Chunk
from services.store.eviction.queues import in_order, touch


class Lru:
    def __init__(self) -> None:
        self._queue: OrderedDict[Chunk, None] = OrderedDict()

    def added(self, chunk: Chunk, _now: float) -> None:
        touch(self._queue, chunk)

    def used(self, chunks: Sequence[Chunk], _now: float) -> None:
        # The last first: a chain's head stays longest.
        for chunk in reversed(chunks):
            touch(self._queue, chunk)

    def kept(self, chunks: Sequence[Chunk], _now: float) -> None:
        self.used(chunks, _now)

    def removed(self, chunk: Chunk) -> None:
        self._queue.pop(chunk, None)

    def victims(self, _now: float) -> Iterator[Chunk]:
        return in_order(self._queue)
