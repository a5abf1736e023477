"""MatcherClient against a real gRPC server that answers, refuses, hangs, or is not there."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.errors import KvblendError, abort
from services.store.matcher_client import MatcherClient

ASK = matcher_pb2.MatchRequest(space_id=b"s" * 16, tokens=bytes(64), store="store-a")


class Matcher(matcher_pb2_grpc.MatcherServiceServicer):
    def __init__(self) -> None:
        self.refusal: KvblendError | None = None
        self.hanging = threading.Event()
        self.released = threading.Event()
        self.pings = 0

    def _go(self, context: Any) -> None:
        if self.hanging.is_set():
            self.released.wait(60)
        if self.refusal is not None:
            abort(context, self.refusal)

    def Match(self, request: matcher_pb2.MatchRequest, context: Any) -> matcher_pb2.MatchResponse:
        self._go(context)
        return matcher_pb2.MatchResponse(scanned_tokens=len(request.tokens) // 4)

    def Score(self, request: matcher_pb2.ScoreRequest, context: Any) -> matcher_pb2.ScoreResponse:
        self._go(context)
        return matcher_pb2.ScoreResponse(stores=[matcher_pb2.StoreScore(store="store-a", prefix_tokens=7)])

    def PingMatcher(self, request: Any, context: Any) -> matcher_pb2.PingMatcherResponse:
        self.pings += 1
        self._go(context)
        return matcher_pb2.PingMatcherResponse(liveness=pb.Liveness(service="matcher"))


@contextmanager
def serving(matcher: Matcher, target: str) -> Iterator[None]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    matcher_pb2_grpc.add_MatcherServiceServicer_to_server(matcher, server)
    server.add_insecure_port(target)
    server.start()
    try:
        yield
    finally:
        matcher.released.set()
        server.stop(None).wait(10)


@pytest.fixture
def target(shm_dir: Path) -> str:
    return f"unix:{shm_dir}/matcher.sock"


@pytest.fixture
def matcher() -> Matcher:
    return Matcher()


@pytest.fixture
def client(target: str) -> Iterator[MatcherClient]:
    made = MatcherClient(target)
    yield made
    made.close()


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at, "it never came true"
        time.sleep(0.02)


def refused(call: Callable[[], object]) -> KvblendError:
    with pytest.raises(KvblendError) as caught:
        call()
    return caught.value


def test_answers_and_is_ready(matcher: Matcher, target: str, client: MatcherClient) -> None:
    with serving(matcher, target):
        assert client.match(ASK, 20).scanned_tokens == 16
        assert client.score(matcher_pb2.ScoreRequest(), 20).stores[0].prefix_tokens == 7
        assert client.ready() == (True, "")


@pytest.mark.parametrize("reason", ["NOT_CAUGHT_UP", "OVERLOADED", "INVALID_TOKENS"])
def test_the_matchers_own_reason_is_kept(matcher: Matcher, target: str, client: MatcherClient, reason: str) -> None:
    matcher.refusal = KvblendError(reason, "because")
    with serving(matcher, target):
        for call in (lambda: client.match(ASK, 20), lambda: client.score(matcher_pb2.ScoreRequest(), 20)):
            error = refused(call)
            assert (error.reason, error.message) == (reason, "because")


def test_nobody_there_is_matcher_unavailable_and_shown_and_heals(
    matcher: Matcher, target: str, client: MatcherClient
) -> None:
    assert refused(lambda: client.match(ASK, 1)).reason == "MATCHER_UNAVAILABLE"
    ready, detail = client.ready()
    assert not ready
    assert target in detail
    with serving(matcher, target):
        eventually(lambda: client.ready()[0])
        assert client.match(ASK, 20).scanned_tokens == 16


def test_readiness_alone_notices_that_nobody_is_there(client: MatcherClient) -> None:
    ready, detail = client.ready()
    assert not ready
    assert detail


def test_a_hanging_matcher_ends_by_the_timeout_and_is_shown(
    matcher: Matcher, target: str, client: MatcherClient
) -> None:
    with serving(matcher, target):
        client.match(ASK, 20)
        matcher.hanging.set()
        error = refused(lambda: client.match(ASK, 0.3))
        assert error.reason == "MATCHER_UNAVAILABLE"
        assert "no answer within" in error.message
        assert not client.ready()[0]


def test_a_caller_in_a_hurry_proves_nothing(matcher: Matcher, target: str, client: MatcherClient) -> None:
    with serving(matcher, target):
        client.match(ASK, 20)
        assert client.ready()[0]
        matcher.hanging.set()
        assert refused(lambda: client.match(ASK, 0.01)).reason == "MATCHER_UNAVAILABLE"
        matcher.hanging.clear()
        assert client.ready()[0]
        assert refused(lambda: client.match(ASK, 0.0)).reason == "MATCHER_UNAVAILABLE"


def test_readiness_asks_seldom(matcher: Matcher, target: str, client: MatcherClient) -> None:
    with serving(matcher, target):
        for _ in range(50):
            client.ready()
        assert matcher.pings <= 10


def test_after_close_calls_are_refused(matcher: Matcher, target: str) -> None:
    client = MatcherClient(target)
    with serving(matcher, target):
        client.match(ASK, 20)
        client.close()
        assert refused(lambda: client.match(ASK, 20)).reason == "MATCHER_UNAVAILABLE"
