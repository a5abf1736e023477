"""The matcher replicas as the store sees them: matches and scores, and whether one answers.

Any replica that says it is ready may take any call; one that cannot be reached or is behind is left for another.
"""

import threading
import time
from typing import Any

import grpc
from google.protobuf.message import Message

from kvblend.host_calls.appended import Appended
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.channels import open_channel
from services.common.errors import ERRORS, KvblendError, reason_of
from services.common.metrics import Latencies

_REPEATABLE = ("kvblend.v1.MatcherService/Match", "kvblend.v1.MatcherService/Score")
_PING_EVERY = 1.0
_PING_SECONDS = 0.25


class MatcherClient:
    """Thread-safe. Every failure is a KvblendError: the matcher's own reason, else MATCHER_UNAVAILABLE."""

    def __init__(self, target: str, latencies: Latencies) -> None:
        """`target`: gRPC's, of all replicas (channels.target_of); none need be up yet."""
        self.target = target
        self._latencies = latencies
        self._channel = open_channel(target, replicated=True, repeatable=_REPEATABLE)
        self._stub: Any = matcher_pb2_grpc.MatcherServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._error = ""

    def match(self, request: matcher_pb2.MatchRequest | Appended, timeout: float) -> matcher_pb2.MatchResponse:
        """`timeout` in seconds."""
        with self._latencies.timed("matcher.Match"):
            answer: matcher_pb2.MatchResponse = self._call(self._stub.Match, request, timeout)
        return answer

    def score(self, request: matcher_pb2.ScoreRequest, timeout: float) -> matcher_pb2.ScoreResponse:
        """`timeout` in seconds."""
        answer: matcher_pb2.ScoreResponse = self._call(self._stub.Score, request, timeout)
        return answer

    def ready(self) -> tuple[bool, str]:
        """(it answers, else why not). Asks at most once a second, for at most 0.25 s."""
        with self._lock:
            due = time.monotonic() - self._asked_at >= _PING_EVERY
            if due:
                self._asked_at = time.monotonic()
        if due:
            try:
                self._call(self._stub.PingMatcher, matcher_pb2.PingMatcherRequest(), _PING_SECONDS)
            except KvblendError as error:
                self._error = error.message
        return not self._error, self._error

    def close(self) -> None:
        """Later calls fail with MATCHER_UNAVAILABLE."""
        self._channel.close()

    def _call(self, method: Any, request: Message | Appended, timeout: float) -> Any:
        if timeout <= 0:
            raise KvblendError("MATCHER_UNAVAILABLE", f"matcher {self.target}: no time left to ask it")
        try:
            answer = method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise self._failure(error, timeout) from None
        except ValueError:
            # grpcio's way to say that the channel has been closed.
            raise KvblendError("MATCHER_UNAVAILABLE", f"matcher {self.target}: closed") from None
        self._error = ""
        return answer

    def _failure(self, error: grpc.RpcError, timeout: float) -> KvblendError:
        reason = reason_of(error)
        if reason in ERRORS and reason != "DEADLINE_EXCEEDED":
            return KvblendError(reason, error.details() or reason)
        why = f"no answer within {timeout:.3f} s" if reason == "DEADLINE_EXCEEDED" else error.details() or reason
        message = f"matcher {self.target}: {why}"
        if reason != "DEADLINE_EXCEEDED" or timeout >= _PING_SECONDS:
            self._error = message
        return KvblendError("MATCHER_UNAVAILABLE", message)
