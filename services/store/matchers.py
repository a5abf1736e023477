"""The matcher replicas that this store asks; any of them will do."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError

_T = TypeVar("_T")


class Client(Protocol):
    """One replica (services/store/matcher_client.py). Calls raise KvblendError only; timeouts in seconds."""

    def match(self, request: matcher_pb2.MatchRequest, timeout: float) -> matcher_pb2.MatchResponse: ...

    def score(self, request: matcher_pb2.ScoreRequest, timeout: float) -> matcher_pb2.ScoreResponse: ...

    def ready(self) -> tuple[bool, str]: ...


class Matchers:
    """Tries the replica that answered last, then the others. Thread-safe."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = list(clients)
        self._preferred = 0
        # False after a call that no replica answered.
        self.reachable = bool(clients)

    @property
    def configured(self) -> bool:
        return bool(self._clients)

    def match(self, request: matcher_pb2.MatchRequest, timeout: float) -> matcher_pb2.MatchResponse:
        """Raises KvblendError MATCHER_UNAVAILABLE and whatever the last replica said."""
        return self._ask(lambda client, left: client.match(request, left), timeout)

    def score(self, request: matcher_pb2.ScoreRequest, timeout: float) -> matcher_pb2.ScoreResponse:
        """Raises as `match` does."""
        return self._ask(lambda client, left: client.score(request, left), timeout)

    def _ask(self, call: Callable[[Client, float], _T], timeout: float) -> _T:
        deadline = time.monotonic() + timeout
        error = KvblendError("MATCHER_UNAVAILABLE", "no matcher is configured")
        first = self._preferred
        for turn in range(len(self._clients)):
            number = (first + turn) % len(self._clients)
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                answer = call(self._clients[number], left)
            except KvblendError as failure:
                error = failure
                continue
            self._preferred, self.reachable = number, True
            return answer
        self.reachable = False
        raise error

    def ready(self) -> tuple[bool, str]:
        """(a replica is ready, else why none is)."""
        if not self._clients:
            return False, "no matcher is configured"
        answers = [client.ready() for client in self._clients]
        return any(ready for ready, _ in answers), "; ".join(detail for ready, detail in answers if not ready)
