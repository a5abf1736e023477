"""A whole matcher in this process: service, replica and log; and logs that fail on demand."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

from matcher_kit import Added, Change, Chunk, Segment, check_answer, page, segments_of

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.lifecycle import Boot
from services.common.metrics import Latencies
from services.matcher.fold import Fold
from services.matcher.kernels.types import Hashing
from services.matcher.log.base import Log
from services.matcher.log.memory import MemoryLog
from services.matcher.log.rules import unavailable
from services.matcher.replica import Replica
from services.matcher.service import MatcherService
from services.matcher.table import Table

SECONDS = 30.0
CONTEXT: Any = SimpleNamespace(time_remaining=lambda: 2 * SECONDS)
LIMIT = 64 << 20


class Matcher:
    """One replica with its service. `match` sees everything that was published here before."""

    def __init__(self, log: Log, snapshot_bytes: int = 1 << 40, hashing: Hashing | None = None) -> None:
        self._is_ready = threading.Event()
        self.replica = Replica(log, lambda: Fold(Table(LIMIT, hashing)), snapshot_bytes, self._is_ready.set)
        self.service = MatcherService(self.replica, Boot("matcher"), Latencies())
        self._published: dict[str, pb.StreamPosition] = {}

    def start(self) -> None:
        self.replica.start()
        assert self._is_ready.wait(SECONDS)

    def close(self) -> None:
        # The log first: it wakes the follower.
        self.replica.log.close()
        self.replica.close()

    @property
    def table(self) -> Table:
        return self.replica.fold.table

    @property
    def stats(self) -> matcher_pb2.GetMatcherStatsResponse:
        return self.service.GetMatcherStats(matcher_pb2.GetMatcherStatsRequest(with_digest=True), CONTEXT)

    def publish(self, *changes: Change, **where: Any) -> matcher_pb2.PublishResponse:
        request = page(changes, **where)
        answer = self.service.Publish(request, CONTEXT)
        if answer.durable_sequence:
            self._published[request.store] = pb.StreamPosition(
                store=request.store, epoch=request.epoch, sequence=answer.durable_sequence
            )
        return answer

    def add(self, *chunks: Chunk, **where: Any) -> matcher_pb2.PublishResponse:
        return self.publish(Added(chunks), **where)

    def settle(self) -> None:
        """Until what was published here is applied."""
        self.replica.wait_applied(list(self._published.values()), SECONDS)

    def match(self, request: matcher_pb2.MatchRequest, context: Any = CONTEXT) -> matcher_pb2.MatchResponse:
        self.settle()
        return self.service.Match(request, context)

    def segments(self, request: matcher_pb2.MatchRequest) -> list[Segment]:
        return segments_of(self.match(request))

    def covered(self, chunks: list[Chunk], request: matcher_pb2.MatchRequest) -> set[int]:
        return check_answer(request, self.match(request), chunks)

    def reasons(self, request: matcher_pb2.MatchRequest) -> dict[str, int]:
        shortfalls = self.match(request).shortfalls
        return {pb.Reason.Name(s.reason).removeprefix("REASON_"): s.tokens for s in shortfalls}


@contextmanager
def running(log: Log | None = None, **options: Any) -> Iterator[Matcher]:
    matcher = Matcher(log or MemoryLog(), **options)
    with closing(matcher):
        matcher.start()
        yield matcher


def service_of(fold: Fold) -> MatcherService:
    """A service that answers from this fold as it is."""
    replica: Any = SimpleNamespace(fold=fold, ready=True, age=0.0, error="", wait_applied=lambda *_: None)
    return MatcherService(replica, Boot("matcher"), Latencies())


class FaultyLog:
    """Another log, as seen by one who cannot always reach it. `closing` it leaves the other open."""

    def __init__(self, inner: Log) -> None:
        self.inner = inner
        self.kind = inner.kind
        # What is away: names of calls, or "all".
        self.away: set[str] = set()
        self.calls: Counter[str] = Counter()
        self._closed = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.inner, name)

        def through(*arguments: Any) -> Any:
            self.calls[name] += 1
            if self._closed.is_set() or self.away & {name, "all"}:
                raise unavailable("the log is away")
            return call(*arguments)

        return through

    def read(self, after: Any, max_bytes: int, wait: float, timeout: float) -> Any:
        """In short waits, so that faults and the end show soon."""
        return self.__getattr__("read")(after, max_bytes, min(wait, 0.02), timeout)

    def close(self) -> None:
        self._closed.set()
