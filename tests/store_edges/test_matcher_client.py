"""MatcherClient against real gRPC servers that answer, refuse, hang, are not ready, or are not there."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.channels import target_of
from services.common.config import load_settings
from services.common.errors import KvblendError, abort
from services.common.metrics import Latencies
from services.store.lookup.matcher_client import MatcherClient
from services.store.lookup.matchers import Matchers
from services.store.settings import StoreSettings

ASK = matcher_pb2.MatchRequest(space_id=b"s" * 16, tokens=bytes(64), store="store-a")


class Matcher(matcher_pb2_grpc.MatcherServiceServicer):
    def __init__(self) -> None:
        self.refusal: KvblendError | None = None
        self.hanging = threading.Event()
        self.released = threading.Event()
        # Whoever asks for a position waits.
        self.behind = False
        self.pings = 0
        self.matches = 0
        self.health = health.HealthServicer()
        self.ready(True)

    def ready(self, ready: bool) -> None:
        state = health_pb2.HealthCheckResponse
        self.health.set("readiness", state.SERVING if ready else state.NOT_SERVING)

    def _go(self, context: Any) -> None:
        if self.hanging.is_set():
            self.released.wait(60)
        if self.refusal is not None:
            abort(context, self.refusal)

    def Match(self, request: matcher_pb2.MatchRequest, context: Any) -> matcher_pb2.MatchResponse:
        self.matches += 1
        if self.behind and request.at_least:
            self.released.wait(60)
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
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", 16 << 20)])
    matcher_pb2_grpc.add_MatcherServiceServicer_to_server(matcher, server)
    health_pb2_grpc.add_HealthServicer_to_server(matcher.health, server)
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
    made = MatcherClient(target, Latencies())
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
    client = MatcherClient(target, Latencies())
    with serving(matcher, target):
        client.match(ASK, 20)
        client.close()
        assert refused(lambda: client.match(ASK, 20)).reason == "MATCHER_UNAVAILABLE"


@pytest.fixture
def replicas(shm_dir: Path) -> Iterator[tuple[MatcherClient, Matcher, Matcher]]:
    """Two, and a client of both that knows them."""
    one, two = Matcher(), Matcher()
    addresses = [f"unix:{shm_dir}/{number}.sock" for number in (1, 2)]
    with serving(one, addresses[0]), serving(two, addresses[1]):
        client = MatcherClient(target_of(",".join(addresses)), Latencies())
        eventually(lambda: client.match(ASK, 20).scanned_tokens > 0 and one.matches > 0 and two.matches > 0)
        yield client, one, two
        client.close()


def asked(client: MatcherClient, *replicas: Matcher, calls: int = 20, tokens: int = 16) -> list[int]:
    """How many of the calls each replica took."""
    before = [replica.matches for replica in replicas]
    for _ in range(calls):
        assert client.match(matcher_pb2.MatchRequest(tokens=bytes(4 * tokens)), 20).scanned_tokens == tokens
    return [replica.matches - count for replica, count in zip(replicas, before, strict=True)]


def test_replicas_take_turns(replicas: tuple[MatcherClient, Matcher, Matcher]) -> None:
    assert asked(*replicas) == [10, 10]


def test_a_replica_that_is_not_ready_gets_no_calls(replicas: tuple[MatcherClient, Matcher, Matcher]) -> None:
    client, one, two = replicas
    one.ready(False)
    eventually(lambda: asked(client, one, two) == [0, 20])
    one.ready(True)
    eventually(lambda: asked(client, one, two) == [10, 10])


def test_with_no_replica_ready_the_answer_comes_at_once(replicas: tuple[MatcherClient, Matcher, Matcher]) -> None:
    client, one, two = replicas
    one.ready(False)
    two.ready(False)

    def unavailable() -> bool:
        try:
            client.match(ASK, 20)
        except KvblendError as error:
            return error.reason == "MATCHER_UNAVAILABLE" and "no answer within" not in error.message
        return False

    eventually(unavailable)
    assert not client.ready()[0]


@pytest.mark.parametrize(("reason", "tokens"), [("NOT_CAUGHT_UP", 16), ("NOT_READY", 128 << 10)])
def test_what_one_replica_cannot_answer_another_does(
    replicas: tuple[MatcherClient, Matcher, Matcher], reason: str, tokens: int
) -> None:
    client, one, two = replicas
    one.refusal = KvblendError(reason, "not now")
    assert asked(client, one, two, calls=4, tokens=tokens)[1] == 4


def test_a_replica_that_dies_costs_no_call(shm_dir: Path) -> None:
    one, two = Matcher(), Matcher()
    addresses = [f"unix:{shm_dir}/{number}.sock" for number in (1, 2)]
    client = MatcherClient(target_of(",".join(addresses)), Latencies())
    with serving(two, addresses[1]):
        with serving(one, addresses[0]):
            eventually(lambda: client.match(ASK, 20).scanned_tokens > 0 and one.matches > 0 and two.matches > 0)
        assert asked(client, two) == [20]
        with serving(one, addresses[0]):
            eventually(lambda: asked(client, one, two)[0] > 0)
    client.close()


def test_case_38_a_matcher_that_hangs_over_a_position_still_leaves_time_for_an_older_answer(
    matcher: Matcher, target: str, client: MatcherClient
) -> None:
    matcher.behind = True
    with serving(matcher, target):
        client.match(ASK, 20)
        ask = matcher_pb2.MatchRequest(at_least=[pb.StreamPosition(store="a", epoch=1, sequence=9)])
        assert Matchers(client).match(ask, bytes(64), 2).scanned_tokens == 16


def test_case_73_matchers_that_cannot_be_told_apart_are_refused_at_start() -> None:
    with pytest.raises(SystemExit, match=r"setting matcher = 'one:50051,two:50051' is refused: .*dns:///name:port"):
        load_settings(StoreSettings, ["--matcher", "one:50051,two:50051"])
    assert load_settings(StoreSettings, ["--matcher", "10.0.0.1:1,10.0.0.2:2"]).matcher_target.startswith("ipv4:")
