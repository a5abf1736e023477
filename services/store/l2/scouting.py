"""Whether a tier that was too slow still is: one chunk is fetched now and then, while nobody waits for it."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from services.store.l2.fetching import Fetches, Order
from services.store.l2.found import L2Chunk
from services.store.objects import ChunkKey
from services.store.spaces import ResolvedSpace

# Between two tries: doubled while lookups keep finding the tier too slow, from the first again when they stop, or when
# it seems to be fast enough.
_FIRST_SECONDS = 0.1
_LAST_SECONDS = 4.0
_FORGET_SECONDS = 30.0
_KEYS = 16
_NOBODY = ("", b"")

Ask = Callable[[ResolvedSpace, Sequence[ChunkKey]], "Future[dict[ChunkKey, L2Chunk]]"]


class Scout:
    """Thread-safe."""

    def __init__(self, fetches: Fetches, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._fetches = fetches
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._asking = False
        self._order: Order | None = None
        self._interval = _FIRST_SECONDS
        self._next = float("-inf")

    def go(self, space: ResolvedSpace, keys: Sequence[ChunkKey], promising: bool) -> None:
        """Asks for these chunks and fetches the first that is there, if it is time to. Returns at once."""
        now = self._clock()
        with self._lock:
            fetching = self._order is not None and self._order.open
            if self._asking or fetching or now < self._next or not keys:
                return
            afresh = promising or now - self._next > _FORGET_SECONDS
            self._interval = _FIRST_SECONDS if afresh else min(2 * self._interval, _LAST_SECONDS)
            self._asking = True
        self._ask(space, keys[:_KEYS]).add_done_callback(self._answered)

    def _answered(self, answer: "Future[dict[ChunkKey, L2Chunk]]") -> None:
        found = [] if answer.cancelled() or answer.exception() else list(answer.result().values())
        order = self._fetches.order(None, _NOBODY, waiting=False)
        self._fetches.add(order, found[:1])
        self._fetches.keep(order)
        with self._lock:
            self._asking, self._order = False, order
            self._next = self._clock() + self._interval
