"""ARC (Megiddo and Modha, 2003): seen once and seen more often, their balance moved by ghosts."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from services.store.catalog import Chunk
from services.store.eviction.ghosts import Ghosts
from services.store.eviction.queues import in_order, touch


class Arc:
    def __init__(self) -> None:
        self._once: OrderedDict[Chunk, None] = OrderedDict()
        self._often: OrderedDict[Chunk, None] = OrderedDict()
        self._ghosts_once: Ghosts[None] = Ghosts()
        self._ghosts_often: Ghosts[None] = Ghosts()
        # Chunks that `once` should hold.
        self._target = 0.0

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def added(self, chunk: Chunk, _now: float) -> None:
        if chunk in self._ghosts_once:
            weight = max(1.0, len(self._ghosts_often) / len(self._ghosts_once))
            self._target = min(self._target + weight, len(self) + 1.0)
            self._ghosts_once.take(chunk)
            touch(self._often, chunk)
        elif chunk in self._ghosts_often:
            weight = max(1.0, len(self._ghosts_once) / len(self._ghosts_often))
            self._target = max(self._target - weight, 0.0)
            self._ghosts_often.take(chunk)
            touch(self._often, chunk)
        else:
            touch(self._once, chunk)

    def used(self, chunks: Sequence[Chunk], _now: float) -> None:
        for chunk in reversed(chunks):
            self._once.pop(chunk, None)
            touch(self._often, chunk)

    def kept(self, chunks: Sequence[Chunk], _now: float) -> None:
        for chunk in reversed(chunks):
            touch(self._once if chunk in self._once else self._often, chunk)

    def removed(self, chunk: Chunk) -> None:
        resident = len(self)
        queue, ghosts = (self._once, self._ghosts_once) if chunk in self._once else (self._often, self._ghosts_often)
        if chunk in queue:
            del queue[chunk]
            ghosts.put(chunk, None)
        self._ghosts_once.shrink(max(0, resident - len(self._once)))
        self._ghosts_often.shrink(max(0, 2 * resident - len(self) - len(self._ghosts_once)))

    def victims(self, _now: float) -> Iterator[Chunk]:
        once, often = in_order(self._once), in_order(self._often)
        first, second = next(once, None), next(often, None)
        while first or second:
            if first and (not second or len(self._once) > self._target):
                yield first
                first = next(once, None)
            elif second:
                yield second
                second = next(often, None)
