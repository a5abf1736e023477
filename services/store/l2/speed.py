"""How fast a tier is now: seconds for an answer, and bytes a second of all transfers together.

Transfers share the way to the tier, so each is charged only its share of the time that it took: with n of them
running, a second is 1/n second of each. What a transfer took beyond the tier's latency, so shared, over its bytes is
one sample of the pace. Transfers that still run count, too: one that should long have been done says that the tier has
become slow before it says anything else. An estimate is the median of the latest samples, so that one hiccup decides
nothing; when they are a second old the next sample replaces them: a tier that recovered is believed at once. It is
relied on (`steady`) once a few transfers in a row have taken about the time that was expected, or less.
"""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.store.l2.batches import MOST_BYTES

# What is asked for in one call should all be there after so long.
_TOGETHER_SECONDS = 0.01
_SAMPLES = 5
_FRESH_SECONDS = 1.0
# Of a transfer's time, what is never taken for latency.
_LEAST_SHARE = 0.1
# So many transfers in a row took at most so many times what was expected.
_STEADY_TRANSFERS = 3
_STEADY_FACTOR = 2.0


class _Estimate:
    def __init__(self) -> None:
        self.value: float | None = None
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._at = 0.0

    def add(self, sample: float, now: float) -> None:
        if now - self._at > _FRESH_SECONDS:
            self._samples.clear()
        self._samples.append(sample)
        self.value, self._at = statistics.median(self._samples), now


@dataclass(eq=False)
class _Transfer:
    size: int
    started: float
    # Seconds times transfers that ran, when it started.
    load: float


class Speed:
    """Thread-safe."""

    def __init__(self, max_streams: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_streams`: transfers that may run at once."""
        self._max_streams = max_streams
        self._clock = clock
        self._lock = threading.Lock()
        self._latency = _Estimate()
        self._pace = _Estimate()
        self._as_expected = 0
        self._asking: dict[object, float] = {}
        self._running: dict[_Transfer, None] = {}
        self._load = 0.0
        self._load_at = 0.0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around one small question to the tier."""
        question, started = object(), self._clock()
        with self._lock:
            self._asking[question] = started
        try:
            yield
        finally:
            with self._lock:
                del self._asking[question]
                now = self._clock()
                self._latency.add(now - started, now)

    def measure(self, size: int, move: Callable[[], bool]) -> bool:
        """Makes the transfer of so many bytes. One that fails proves nothing, unless it took too long for that."""
        with self._lock:
            transfer = _Transfer(size, *self._count())
            self._running[transfer] = None
        moved: bool | None = None
        try:
            moved = move()
        finally:
            with self._lock:
                now, load = self._count()
                del self._running[transfer]
                if moved is not None:
                    self._learn(transfer, now, load, moved)
        return moved

    def _learn(self, transfer: _Transfer, now: float, load: float, moved: bool) -> None:
        pace, before = self._pace_of(transfer, now, load), self._pace.value
        if moved and before is not None:
            seconds = now - transfer.started
            expected = (self._latency.value or 0.0) + before / pace * seconds if pace else seconds
            self._as_expected = self._as_expected + 1 if seconds <= _STEADY_FACTOR * expected else 0
        if moved or pace > (before or 0.0):
            self._pace.add(pace, now)

    def _count(self) -> tuple[float, float]:
        """(now, load until now). Needs the lock."""
        now = self._clock()
        self._load += len(self._running) * (now - self._load_at)
        self._load_at = now
        return now, self._load

    def _pace_of(self, transfer: _Transfer, now: float, load: float) -> float:
        """Seconds a byte; a lower bound while it runs."""
        seconds = now - transfer.started
        if seconds <= 0 or not transfer.size:
            return 0.0
        together = max(1.0, (load - transfer.load) / seconds)
        own = max(seconds - (self._latency.value or 0.0), _LEAST_SHARE * seconds)
        return own / (together * transfer.size)

    @property
    def latency(self) -> float:
        """Seconds for an answer; 0: not measured."""
        with self._lock:
            now = self._clock()
            overdue = max((now - started for started in self._asking.values()), default=0.0)
            return max(self._latency.value or 0.0, overdue)

    @property
    def pace(self) -> float | None:
        """Seconds a byte, all transfers together; None: not measured."""
        with self._lock:
            if self._pace.value is None and not self._running:
                return None
            now, load = self._count()
            bounds = (self._pace_of(transfer, now, load) for transfer in self._running)
            return max(self._pace.value or 0.0, max(bounds, default=0.0))

    @property
    def together(self) -> int:
        """Bytes that may be asked for in one call; 0: one object is enough."""
        pace = self.pace
        return min(int(_TOGETHER_SECONDS / pace), MOST_BYTES) if pace else 0

    @property
    def steady(self) -> bool:
        """What is measured may be relied on."""
        pace, measured = self.pace, self._pace.value
        if pace is None or measured is None or self._as_expected < _STEADY_TRANSFERS:
            return False
        return pace <= _STEADY_FACTOR * measured

    def streams(self, size: int) -> int:
        """Transfers of so many bytes that should run at once: enough to hide latency, and one to be ready for the next.

        More would only make the first arrive later.
        """
        pace, latency = self.pace, self.latency
        alone = size * (pace or 0.0)
        wanted = 1 + math.ceil(min(latency / alone, self._max_streams)) if alone else 2
        return min(max(2, wanted), self._max_streams)
