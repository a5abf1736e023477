"""What is remembered of chunks that have left, without their names."""

from collections import OrderedDict
from typing import Generic, TypeVar

from services.store.catalog import Chunk

_T = TypeVar("_T")
# Some 200 bytes each.
MAX_GHOSTS = 1 << 18


class Ghosts(Generic[_T]):
    """A bounded memory, the longest gone forgotten first.

    Known by the hash of their key: two that share one only make an estimate a little worse.
    """

    def __init__(self) -> None:
        self._gone: OrderedDict[int, _T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._gone)

    def __contains__(self, chunk: Chunk) -> bool:
        return hash(chunk.key) in self._gone

    def put(self, chunk: Chunk, memory: _T) -> None:
        self._gone[hash(chunk.key)] = memory
        self._gone.move_to_end(hash(chunk.key))

    def take(self, chunk: Chunk) -> _T | None:
        """Forgets it and returns what was remembered."""
        return self._gone.pop(hash(chunk.key), None)

    def shrink(self, most: int) -> list[_T]:
        """Forgets the longest gone until at most so many are left, and returns their memories."""
        bound = min(most, MAX_GHOSTS)
        return [self._gone.popitem(last=False)[1] for _ in range(len(self._gone) - bound)]
