"""The server that every service composes: deadline rule, typed errors, health, reflection."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import Field

from kvblend.host_calls import MissingDeadline
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.channels import open_channel
from services.common.config import ServiceSettings
from services.common.errors import ERRORS, KvblendError, reason_of
from services.common.server import GrpcServer

SERVICE = "kvblend.v1.MatcherService"


class Settings(ServiceSettings):
    service: ClassVar[str] = "matcher"
    listen: str = Field("127.0.0.1:50051", description="Address.")


class Matcher(matcher_pb2_grpc.MatcherServiceServicer):
    """Fails as the request's `store` says."""

    def Match(self, request: matcher_pb2.MatchRequest, context: grpc.ServicerContext) -> matcher_pb2.MatchResponse:
        del context
        if request.store == "bug":
            raise ZeroDivisionError
        if request.store:
            raise KvblendError(request.store, "because")
        return matcher_pb2.MatchResponse(scanned_tokens=7)


@pytest.fixture
def address(shm_dir: Path) -> Iterator[str]:
    target = f"unix:{shm_dir}/s"
    server = GrpcServer(Settings(listen=target), [SERVICE])
    matcher_pb2_grpc.add_MatcherServiceServicer_to_server(Matcher(), server)
    server.start()
    yield target
    server.stop(0)


@pytest.fixture
def stub(address: str) -> Iterator[Any]:
    with open_channel(address) as channel:
        yield matcher_pb2_grpc.MatcherServiceStub(channel)


@pytest.mark.parametrize("reason", sorted(ERRORS))
def test_every_reason_travels_with_its_code(stub: Any, reason: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Match(matcher_pb2.MatchRequest(store=reason), timeout=5)
    assert caught.value.code() == ERRORS[reason].code
    assert reason_of(caught.value) == reason
    metadata = dict(caught.value.trailing_metadata())
    assert metadata["kvblend-may-retry"] == ("true" if ERRORS[reason].may_retry else "false")
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "kvblend")


def test_a_bug_is_an_internal_error_and_the_server_lives_on(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Match(matcher_pb2.MatchRequest(store="bug"), timeout=5)
    assert reason_of(caught.value) == "INTERNAL"
    assert stub.Match(matcher_pb2.MatchRequest(), timeout=5).scanned_tokens == 7


def test_a_call_without_a_deadline_is_refused_on_both_sides(address: str, stub: Any) -> None:
    with pytest.raises(MissingDeadline):
        stub.Match(matcher_pb2.MatchRequest())
    with grpc.insecure_channel(address) as plain:
        with pytest.raises(grpc.RpcError) as caught:
            matcher_pb2_grpc.MatcherServiceStub(plain).Match(matcher_pb2.MatchRequest())
    assert reason_of(caught.value) == "DEADLINE_REQUIRED"


def test_what_is_not_served_yet_says_unimplemented(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Score(matcher_pb2.ScoreRequest(), timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("name", ["", "readiness", "liveness", SERVICE])
def test_health_answers_under_every_name_that_probes_use(address: str, name: str) -> None:
    with open_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_taken_address_is_refused_in_one_line(address: str) -> None:
    del address
    first = GrpcServer(Settings(listen="127.0.0.1:0"), [SERVICE])
    port = first.grpc.add_insecure_port("127.0.0.1:0")
    first.start()
    try:
        with pytest.raises(SystemExit, match="in use"):
            GrpcServer(Settings(listen=f"127.0.0.1:{port}"), [SERVICE])
    finally:
        first.stop(0)
