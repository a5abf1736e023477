"""Prometheus metrics of a process, and recent latencies for `kvblend status`."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from kvblend.v1 import common_pb2 as pb

REGISTRY = CollectorRegistry()

_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_RECENT = 512

CALL_SECONDS = Histogram(
    "kvblend_call_seconds", "Time to serve a call.", ["method", "code"], buckets=_BUCKETS, registry=REGISTRY
)


def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(name, text, labels, registry=REGISTRY)


def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(name, text, labels, registry=REGISTRY)


def serve_metrics(port: int) -> None:
    """Serves the page on loopback-reachable interfaces; 0: not at all."""
    if port:
        start_http_server(port, registry=REGISTRY)


class Latencies:
    """The last durations of each named operation; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: dict[str, deque[float]] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._recent.setdefault(name, deque(maxlen=_RECENT)).append(seconds)
            self._counts[name] = self._counts.get(name, 0) + 1

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def summaries(self) -> list[pb.LatencySummary]:
        with self._lock:
            samples = {name: sorted(values) for name, values in self._recent.items()}
            counts = dict(self._counts)
        return [
            pb.LatencySummary(
                name=name,
                count=counts[name],
                p50_ms=1e3 * values[len(values) // 2],
                p99_ms=1e3 * values[min(len(values) - 1, len(values) * 99 // 100)],
            )
            for name, values in sorted(samples.items())
        ]
