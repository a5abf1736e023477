"""What the store asks of the matchers: answers that know its own latest chunks, or else older ones."""

import time
from typing import Protocol

from kvblend.host_calls.appended import Appended
from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError
from services.common.metrics import counter

OLDER = counter("kvblend_matcher_older_answers", "Matches from a matcher that had not caught up in time.")

# Of the time for a match, what goes at most into one that must have caught up.
_CURRENT_SHARE = 0.5


class Client(Protocol):
    """All replicas (services/store/lookup/matcher_client.py). Calls raise KvblendError only; timeouts in seconds."""

    def match(self, request: Appended, timeout: float) -> matcher_pb2.MatchResponse:
        """`request` stands for a MatchRequest."""
        ...

    def score(self, request: matcher_pb2.ScoreRequest, timeout: float) -> matcher_pb2.ScoreResponse: ...

    def ready(self) -> tuple[bool, str]: ...


class Matchers:
    """Thread-safe."""

    def __init__(self, client: Client | None) -> None:
        self._client = client

    @property
    def configured(self) -> bool:
        return self._client is not None

    def match(self, request: matcher_pb2.MatchRequest, tokens: bytes, timeout: float) -> matcher_pb2.MatchResponse:
        """`request` is without its tokens, which nobody copies on their way.

        If no replica has applied `at_least` in time, what one knows all the same: that is better than nothing.

        Raises:
            KvblendError: MATCHER_UNAVAILABLE, or whatever a replica said.
        """
        client = self._required()
        if not request.at_least:
            return client.match(_with_tokens(request, tokens), timeout)
        give_up_at = time.monotonic() + timeout
        try:
            return client.match(_with_tokens(request, tokens), _CURRENT_SHARE * timeout)
        except KvblendError as error:
            if not error.kind.may_retry:
                raise
        whatever = matcher_pb2.MatchRequest()
        whatever.CopyFrom(request)
        whatever.ClearField("at_least")
        answer = client.match(_with_tokens(whatever, tokens), give_up_at - time.monotonic())
        OLDER.inc()
        return answer

    def score(self, request: matcher_pb2.ScoreRequest, timeout: float) -> matcher_pb2.ScoreResponse:
        """Raises as `match` does."""
        return self._required().score(request, timeout)

    def ready(self) -> tuple[bool, str]:
        """(a replica answers, else why none does)."""
        return self._client.ready() if self._client else (False, "no matcher is configured")

    def _required(self) -> Client:
        if self._client is None:
            raise KvblendError("MATCHER_UNAVAILABLE", "no matcher is configured")
        return self._client


def _with_tokens(request: matcher_pb2.MatchRequest, tokens: bytes) -> Appended:
    return Appended(request, "tokens", memoryview(tokens))
