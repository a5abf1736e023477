"""The default policy: what promises the fewest uses for its room and time leaves first."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from kvblend.v1 import common_pb2 as pb
from services.store.catalog import Chunk
from services.store.eviction.ghosts import Ghosts
from services.store.eviction.queues import in_order, touch
from services.store.eviction.reuse import ReuseModel, bucket_of

# Of a chunk by its number of uses, the first being its arrival: more are not told apart.
_USES = 3
_PROMPT, _PROMPT_END, _DOCUMENT, _DUPLICATE, _BLENDED = 0, _USES, _USES + 1, 2 * _USES + 1, 2 * _USES + 2
_CLASSES = 2 * _USES + 3
# BLENDED chunks leave before all others, copies of known text later than the rest of them.
_RANKS = [2] * (2 * _USES + 1) + [1, 0]
# A use of a document counts as much as so many of a prompt's chunk: its owner gave it to be kept.
_DOCUMENT_WEIGHT = 4.0
_WEIGHTS = [1.0] * (_USES + 1) + [_DOCUMENT_WEIGHT] * _USES + [1.0, 1.0]
# Ranks of one request, or its lookups before and after a fetch, ask for the same chunk: one use.
_SAME_USE_SECONDS = 1.0
# Ghosts for each resident chunk: the reuse of twice the age at which chunks leave is known.
_GHOSTS = 4
# Events put off at most until somebody needs an order: to work them off keeps lookups waiting for 3 ms.
_MOST_PENDING = 1 << 11
# For each event so many chunks' time is brought up to date, in turn.
_VISITS = 2


class _Entry:
    __slots__ = ("counted", "known", "last", "of_class", "uses")

    def __init__(self, now: float) -> None:
        self.uses = 0
        self.last = now
        # Its time is in the model up to here.
        self.counted = now
        self.of_class = 0
        # False once it is forgotten.
        self.known = True


def class_of(chunk: Chunk, uses: int) -> int:
    """What the model tells apart."""
    domain = chunk.key.domain
    if domain == pb.DOMAIN_BLENDED:
        return _DUPLICATE if chunk.info.duplicate else _BLENDED
    step = min(uses, _USES) - 1
    if domain == pb.DOMAIN_SEGMENT:
        return _DOCUMENT + step
    # A prompt's continuation seldom breaks off just where the prompt ended.
    return _PROMPT_END if chunk.info.token_count < chunk.info.chunk_tokens else _PROMPT + step


class Density:
    """Chunks wait in one queue a class, by their last use; the oldest of each compete by the model's worth.

    An event costs a few dictionary operations; `used` only notes it, off the caller's path.
    """

    def __init__(self) -> None:
        self._model = ReuseModel(_CLASSES)
        self._entries: dict[Chunk, _Entry] = {}
        self._queues: list[OrderedDict[Chunk, None]] = [OrderedDict() for _ in range(_CLASSES)]
        self._ghosts: Ghosts[_Entry] = Ghosts()
        self._round: deque[_Entry] = deque()
        self._pending: list[tuple[Sequence[Chunk], float]] = []
        self._pending_chunks = 0

    def added(self, chunk: Chunk, now: float) -> None:
        self.settle()
        entry = self._ghosts.take(chunk)
        if entry is None:
            entry = _Entry(now)
            self._round.append(entry)
        else:
            self._count(entry, now, used=True)
        self._entries[chunk] = entry
        entry.uses += 1
        self._enqueue(chunk, entry, now)
        self._tick(now)

    def used(self, chunks: Sequence[Chunk], now: float) -> None:
        self._pending.append((chunks, now))
        self._pending_chunks += len(chunks)
        if self._pending_chunks > _MOST_PENDING:
            self.settle()

    def settle(self) -> None:
        """Works off what `used` has noted."""
        pending, self._pending, self._pending_chunks = self._pending, [], 0
        for chunks, now in pending:
            # The last first: a chain's head stays longest.
            for chunk in reversed(chunks):
                entry = self._entries.get(chunk)
                if entry is None:
                    continue
                if now - entry.last < _SAME_USE_SECONDS:
                    touch(self._queues[entry.of_class], chunk)
                    continue
                self._count(entry, now, used=True)
                entry.uses += 1
                self._requeue(chunk, entry, now)
                self._tick(now)

    def kept(self, chunks: Sequence[Chunk], now: float) -> None:
        self.settle()
        for chunk in reversed(chunks):
            entry = self._entries.get(chunk)
            if entry is not None:
                self._count(entry, now, used=False)
                self._requeue(chunk, entry, now)

    def removed(self, chunk: Chunk) -> None:
        entry = self._entries.pop(chunk, None)
        if entry is None:
            return
        del self._queues[entry.of_class][chunk]
        self._ghosts.put(chunk, entry)
        for forgotten in self._ghosts.shrink(_GHOSTS * len(self._entries)):
            forgotten.known = False

    def victims(self, now: float) -> Iterator[Chunk]:
        self.settle()
        lines = (self._line(of_class, now) for of_class, queue in enumerate(self._queues) if queue)
        for *_, chunk in heapq.merge(*lines):
            if chunk in self._entries:
                yield chunk

    def _line(self, of_class: int, now: float) -> Iterator[tuple[int, float, float, int, Chunk]]:
        worths, weight, rank = self._model.worths[of_class], _WEIGHTS[of_class], _RANKS[of_class]
        for chunk in in_order(self._queues[of_class]):
            last = self._entries[chunk].last
            yield rank, weight * worths[bucket_of(now - last)], last, of_class, chunk

    def _enqueue(self, chunk: Chunk, entry: _Entry, now: float) -> None:
        entry.last = now
        entry.of_class = class_of(chunk, entry.uses)
        touch(self._queues[entry.of_class], chunk)

    def _requeue(self, chunk: Chunk, entry: _Entry, now: float) -> None:
        self._queues[entry.of_class].pop(chunk)
        self._enqueue(chunk, entry, now)

    # What the model learns.

    def _count(self, entry: _Entry, now: float, *, used: bool) -> None:
        self._count_time(entry, now)
        if used:
            self._model.count_use(entry.of_class, now - entry.last)

    def _count_time(self, entry: _Entry, now: float) -> None:
        self._model.count_time(entry.of_class, entry.counted - entry.last, now - entry.last)
        entry.counted = now

    def _tick(self, now: float) -> None:
        for _ in range(min(_VISITS, len(self._round))):
            entry = self._round.popleft()
            self._count_time(entry, now)
            if entry.known:
                self._round.append(entry)
        self._model.tick()
