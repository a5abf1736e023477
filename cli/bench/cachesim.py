"""General policies of libcachesim, where that package is installed."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from services.store.eviction.replay import Request

# Their names there, by ours.
POLICIES = {
    "lru*": "LRU",
    "arc*": "ARC",
    "s3-fifo*": "S3FIFO",
    "gdsf*": "GDSF",
    "2q*": "TwoQ",
    "lirs*": "LIRS",
    "w-tinylfu*": "WTinyLFU",
}


def is_installed() -> bool:
    return find_spec("libcachesim") is not None


class CachesimCache:
    """Block by block in the order of a prompt, all of one size."""

    def __init__(self, policy: str, capacity: int) -> None:
        """`policy`: a name of POLICIES. `capacity` in blocks."""
        self._library: Any = import_module("libcachesim")
        self._cache = getattr(self._library, POLICIES[policy])(cache_size=capacity)
        self._asked = 0

    def ask(self, request: Request) -> list[bool]:
        return [self._ask(block) for block in request.blocks]

    def _ask(self, block: int) -> bool:
        wanted = self._library.Request()
        wanted.obj_id, wanted.obj_size, wanted.clock_time = block, 1, self._asked
        self._asked += 1
        return bool(self._cache.get(wanted))
