"""Which fetch runs next: many lookups at once, each with an order of chunks.

What an engine waits for goes before what is merely kept. Among those that wait, the tenant's session that has had
least moved for it comes first; of one session its lookups as they came; of one lookup its chunks as they stand in the
order, the prompt's first missing chunk first. A lookup has at most one more fetch running than have landed for it: its
first chunk has the whole way to itself, and shows how fast the tier is before more is asked for. What of one lookup
may run at once and is moved in a moment is one transfer.

Equal fetches are joined. A fetch that nobody wants any more gives its place up, or stops between two objects; what a
lookup no longer waits for but would still have (`keep`) runs when there is nothing else to do.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from services.common.logs import get_logger
from services.store.catalog import Chunk
from services.store.l2.found import L2Chunk
from services.store.l2.speed import Speed
from services.store.leasing.leases import HolderKey
from services.store.objects import ChunkKey

_log = get_logger("l2")

Flow = tuple[str, bytes]
# Brings chunks into the arena, pinned there; None: it did not come. Asks now and then whether one is still wanted.
Transfer = Callable[[Sequence[L2Chunk], Callable[[L2Chunk], bool]], Sequence[Chunk | None]]

_JOIN_SECONDS = 10.0


@dataclass(eq=False)
class _Fetch:
    chunk: L2Chunk
    orders: "dict[Order, None]" = field(default_factory=dict)
    running: bool = False
    ended: bool = False
    # Pinned until nobody waits for it any more.
    landed: Chunk | None = None

    @property
    def queued(self) -> bool:
        return not self.running and not self.ended


@dataclass(eq=False)
class Order:
    """One lookup's fetches."""

    # None: nobody's lookup.
    holder: HolderKey | None
    # The tenant and its session.
    flow: Flow
    changed: threading.Condition
    waiting: bool = True
    open: bool = True
    fetches: dict[ChunkKey, _Fetch] = field(default_factory=dict)
    queue: deque[_Fetch] = field(default_factory=deque)
    # How many of the fetches run, have ended, have landed.
    running: int = 0
    ended: int = 0
    landed: int = 0


class Fetches:
    """Thread-safe. The lock is never held while anything else is taken."""

    def __init__(
        self, transfer: Transfer, release: Callable[[Chunk], None], speed: Speed, *, threads: int, max_bytes: int
    ) -> None:
        """`release(chunk)` unpins what landed. `max_bytes` may be wanted at once, running or not."""
        self._transfer = transfer
        self._release = release
        self._speed = speed
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._quiet = threading.Condition(self._lock)
        self._fetches: dict[ChunkKey, _Fetch] = {}
        self._orders: dict[Order, None] = {}
        # Bytes that were moved for each flow that has orders, counted from when others had as few.
        self._served: dict[Flow, float] = {}
        self._bytes = 0
        self._running = 0
        self._stopping = False
        self._threads = [threading.Thread(target=self._run, name=f"l2-fetch-{n}", daemon=True) for n in range(threads)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self._lock:
            self._stopping = True
            self._work.notify_all()
            orders = list(self._orders)
        for order in orders:
            self.drop(order)
        until = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))

    # What lookups do.

    def order(self, holder: HolderKey | None, flow: Flow, *, waiting: bool = True) -> Order:
        """An empty order. Whoever makes it ends it, by `keep` or `drop`."""
        with self._lock:
            order = Order(holder, flow, threading.Condition(self._lock), waiting)
            self._orders[order] = None
            self._served.setdefault(flow, min(self._served.values(), default=0.0))
            return order

    def add(self, order: Order, chunks: Sequence[L2Chunk]) -> list[L2Chunk]:
        """Queues or joins the fetches of these chunks, first things first; those that there is no room for."""
        with self._lock:
            refused = []
            for chunk in chunks if order.open and not self._stopping else ():
                if chunk.key in order.fetches:
                    continue
                fetch = self._fetches.get(chunk.key)
                if fetch is None:
                    if not self._make_room(order.flow, chunk.size):
                        refused.append(chunk)
                        continue
                    fetch = self._fetches[chunk.key] = _Fetch(chunk)
                    self._bytes += chunk.size
                fetch.orders[order] = None
                order.running += fetch.running
                order.fetches[chunk.key] = fetch
                order.queue.append(fetch)
            self._work.notify_all()
            return refused

    def _make_room(self, flow: Flow, size: int) -> bool:
        """What is merely kept makes way, then what somebody has asked for who has more on its way than `flow` would.

        A chunk that is larger than the limit may come alone. Needs the lock.
        """
        while self._bytes and self._bytes + size > self._max_bytes:
            if not self._drop_kept() and not self._drop_from_largest(flow, size):
                return False
        return True

    def _drop_kept(self) -> bool:
        order = next((order for order in self._orders if not order.waiting and order.queue), None)
        if order is None:
            return False
        for fetch in order.queue:
            if fetch.queued:
                self._leave(order, fetch)
        order.queue.clear()
        self._forget_if_done(order)
        return True

    def _drop_from_largest(self, flow: Flow, size: int) -> bool:
        held = self._bytes_of_flows()
        most = max(held.values(), default=0)
        if most <= held.get(flow, 0) + size:
            return False
        for order in [order for order in reversed(self._orders) if order.waiting and held.get(order.flow) == most]:
            fetch = next((fetch for fetch in reversed(order.queue) if fetch.queued and len(fetch.orders) == 1), None)
            if fetch is not None:
                order.queue.remove(fetch)
                self._leave(order, fetch)
                order.changed.notify_all()
                return True
        return False

    def _bytes_of_flows(self) -> dict[Flow, int]:
        """On their way for each; what is merely kept counts when it runs. Needs the lock."""
        bytes_of: dict[Flow, int] = {}
        for fetch in self._fetches.values():
            for flow in {order.flow for order in fetch.orders if order.waiting or fetch.running}:
                bytes_of[flow] = bytes_of.get(flow, 0) + fetch.chunk.size
        return bytes_of

    def wait_answers(self, order: Order, answers: Sequence["Future[Any]"], timeout: float) -> None:
        """Until all are there, or the order is closed."""

        def tell(_: "Future[Any]") -> None:
            with self._lock:
                order.changed.notify_all()

        for answer in answers:
            answer.add_done_callback(tell)
        with self._lock:
            order.changed.wait_for(lambda: not order.open or all(answer.done() for answer in answers), timeout)

    def wait(self, order: Order, seen: int, timeout: float) -> int:
        """How many fetches of the order have ended; waits until it is more than `seen`, or the order is closed."""
        with self._lock:
            order.changed.wait_for(lambda: not order.open or order.ended > seen, timeout)
            return order.ended

    def outcomes(self, order: Order) -> dict[ChunkKey, bool]:
        """Of the fetches that have ended: whether the chunk landed."""
        with self._lock:
            return {key: fetch.landed is not None for key, fetch in order.fetches.items() if fetch.ended}

    def keep(self, order: Order) -> None:
        """Nobody waits for the order now: it comes after those that somebody waits for."""
        with self._lock:
            order.waiting = False
            landed = self._let_go(order, [fetch for fetch in order.fetches.values() if fetch.ended])
            self._forget_if_done(order)
            self._tell_if_quiet()
        self._release_all(landed)

    def drop(self, order: Order) -> None:
        """The order gives its places up. What others joined stays; idempotent."""
        with self._lock:
            order.open = order.waiting = False
            order.queue.clear()
            landed = self._let_go(order, list(order.fetches.values()))
            self._forget_if_done(order)
            order.changed.notify_all()
            self._work.notify_all()
            self._tell_if_quiet()
        self._release_all(landed)

    def drop_request(self, session: bytes, request_id: str) -> None:
        """Every attempt and rank of a request."""
        self._drop_where(lambda holder: (holder.session, holder.request_id) == (session, request_id))

    def give_up(self, holder: HolderKey) -> None:
        """The call that waits for these orders is gone."""
        self._drop_where(lambda other: other == holder, waiting=True)

    def _drop_where(self, matches: Callable[[HolderKey], bool], *, waiting: bool = False) -> None:
        with self._lock:
            orders = [order for order in self._orders if order.holder is not None and matches(order.holder)]
        for order in orders:
            if order.waiting or not waiting:
                self.drop(order)

    def ahead(self, flow: Flow, size: int) -> int:
        """Bytes that move before an order of `size` bytes of this flow is done, beside its own."""
        with self._lock:
            bytes_of = self._bytes_of_flows()
            own = bytes_of.pop(flow, 0)
            return own + sum(min(theirs, own + size) for theirs in bytes_of.values())

    @property
    def wanted_bytes(self) -> int:
        return self._bytes

    def wait_quiet(self, timeout: float) -> None:
        """Until no lookup waits for a fetch."""
        with self._lock:
            self._quiet.wait_for(lambda: self._stopping or not self._is_awaited(), timeout)

    def _is_awaited(self) -> bool:
        return any(order.waiting for fetch in self._fetches.values() for order in fetch.orders)

    def _tell_if_quiet(self) -> None:
        if not self._is_awaited():
            self._quiet.notify_all()

    # Below here: with the lock, unless a method says otherwise.

    def _leave(self, order: Order, fetch: _Fetch) -> Chunk | None:
        """The order no longer wants the fetch; what must be released, if it was the last."""
        if order in fetch.orders:
            del fetch.orders[order]
            order.running -= fetch.running
        order.fetches.pop(fetch.chunk.key, None)
        if fetch.orders:
            return None
        if fetch.queued:
            self._end(fetch)
        landed, fetch.landed = fetch.landed, None
        return landed

    def _let_go(self, order: Order, fetches: Sequence[_Fetch]) -> list[Chunk]:
        left = [self._leave(order, fetch) for fetch in fetches]
        return [chunk for chunk in left if chunk is not None]

    def _end(self, fetch: _Fetch) -> None:
        fetch.ended = True
        del self._fetches[fetch.chunk.key]
        self._bytes -= fetch.chunk.size

    def _forget_if_done(self, order: Order) -> None:
        if not order.waiting and not order.fetches and order in self._orders:
            del self._orders[order]
            order.open = False
            if all(other.flow != order.flow for other in self._orders):
                del self._served[order.flow]

    def _release_all(self, landed: Sequence[Chunk]) -> None:
        """Without the lock."""
        for chunk in landed:
            self._release(chunk)

    def _candidates(self) -> Iterator[tuple[Order, _Fetch]]:
        """What each order would have next, best first."""
        orders = sorted(self._orders, key=lambda order: (not order.waiting, self._served[order.flow]))
        for order in orders:
            fetch = self._next_of(order)
            if fetch is not None:
                yield order, fetch

    @staticmethod
    def _next_of(order: Order) -> _Fetch | None:
        while order.queue and not order.queue[0].queued:
            order.queue.popleft()
        return order.queue[0] if order.queue and order.running <= order.landed else None

    def _take(self) -> list[_Fetch]:
        """What one thread moves now, all of one order."""
        for order, fetch in self._candidates():
            if self._running >= self._speed.streams(fetch.chunk.size):
                return []
            self._running += 1
            taken, left = [fetch], self._speed.together - fetch.chunk.size
            self._start(order, fetch)
            while (behind := self._next_of(order)) is not None and behind.chunk.size <= left:
                taken.append(behind)
                left -= behind.chunk.size
                self._start(order, behind)
            return taken
        return []

    def _start(self, order: Order, fetch: _Fetch) -> None:
        order.queue.popleft()
        self._served[order.flow] += fetch.chunk.size
        fetch.running = True
        for sharer in fetch.orders:
            sharer.running += 1

    def _run(self) -> None:
        """Without the lock."""
        while True:
            with self._lock:
                fetches: list[_Fetch] = []
                while not self._stopping and not (fetches := self._take()):
                    self._work.wait()
                if not fetches:
                    return
            by_key = {fetch.chunk.key: fetch for fetch in fetches}
            landed: Sequence[Chunk | None] = [None] * len(fetches)
            try:
                landed = self._transfer(
                    [fetch.chunk for fetch in fetches],
                    lambda chunk, by_key=by_key: bool(by_key[chunk.key].orders),  # type: ignore[misc]
                )
            except Exception as error:
                _log.error("a fetch failed", exc_info=error)
            self._ended(fetches, landed)

    def _ended(self, fetches: Sequence[_Fetch], landed: Sequence[Chunk | None]) -> None:
        """Without the lock."""
        with self._lock:
            self._running -= 1
            unwanted = [
                chunk for item in zip(fetches, landed, strict=True) if (chunk := self._ended_one(*item)) is not None
            ]
            self._work.notify_all()
            self._tell_if_quiet()
        self._release_all(unwanted)

    def _ended_one(self, fetch: _Fetch, landed: Chunk | None) -> Chunk | None:
        """What nobody wants of it."""
        self._end(fetch)
        fetch.landed = landed
        unwanted: list[Chunk] = []
        for order in list(fetch.orders):
            order.ended += 1
            order.landed += landed is not None
            if order.waiting:
                order.running -= 1
                order.changed.notify_all()
                continue
            unwanted += self._let_go(order, [fetch])
            self._forget_if_done(order)
        fetch.running = False
        if landed is not None and not fetch.orders and not unwanted:
            fetch.landed = None
            return landed
        return unwanted[0] if unwanted else None
