"""What callers and handlers rely on, over gRPC as over the host's socket: `CHECKS`, each of which takes a Bench."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from host_service import BIN, SECONDS, Service, eventually, stream, unary

from services.common.errors import ERRORS, reason_of

Code = grpc.StatusCode
MEGABYTE = 1 << 20


@dataclass
class Bench:
    channel: grpc.Channel
    service: Service
    seconds: float = SECONDS

    def call(self, method: str, request: bytes = b"", timeout: float | None = None, **more: Any) -> bytes:
        answer: bytes = unary(self.channel, method)(request, timeout=timeout or self.seconds, **more)
        return answer

    def stream(self, method: str, request: bytes = b"", timeout: float | None = None) -> Any:
        return stream(self.channel, method)(request, timeout=timeout or self.seconds)

    def failure(self, method: str, request: bytes = b"", timeout: float | None = None) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, request, timeout)
        return caught.value


Check = Callable[[Bench], None]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


@check
def answers_belong_to_their_requests(bench: Bench) -> None:
    for size in (0, 1, 1 << 14, (1 << 14) + 1, MEGABYTE, 15 * MEGABYTE):
        request = bytes([size % 251]) * size
        assert bench.call("echo", request) == request
    with ThreadPoolExecutor(8) as pool:
        requests = [f"request {number}".encode() for number in range(400)]
        assert list(pool.map(lambda request: bench.call("echo", request), requests)) == requests
    assert bench.service.begun["request 7"] == 1


@check
def every_reason_travels(bench: Bench) -> None:
    for reason, kind in ERRORS.items():
        for failure in (bench.failure("fail", reason.encode()), bench.failure("fail", reason.encode())):
            assert (failure.code(), reason_of(failure), failure.details()) == (kind.code, reason, "because of ☂")
            metadata = dict(failure.trailing_metadata())
            assert metadata["kvblend-may-retry"] == ("true" if kind.may_retry else "false")
            info = error_details_pb2.ErrorInfo()
            assert status_pb2.Status.FromString(metadata["grpc-status-details-bin"]).details[0].Unpack(info)
            assert info.reason == reason
    assert reason_of(bench.failure("fail", b"bug")) == "INTERNAL"
    assert bench.call("echo", b"after") == b"after"


@check
def a_handler_may_end_the_call_itself(bench: Bench) -> None:
    failure = bench.failure("abort")
    assert (failure.code(), failure.details()) == (Code.ABORTED, "so it is")
    metadata = dict(failure.trailing_metadata())
    assert (metadata["key"], metadata["some-bin"]) == ("välue".encode().hex(), BIN)
    failure = bench.failure("set_code")
    assert (failure.code(), failure.details()) == (Code.NOT_FOUND, "nothing")
    assert bench.failure("abort", b"OK").code() == Code.UNKNOWN


@check
def metadata_and_deadlines_arrive(bench: Bench) -> None:
    metadata = (("x-name", "value"), ("x-some-bin", BIN))
    assert bench.call("metadata", metadata=metadata) == repr(sorted(metadata)).encode()
    assert 15 < float(bench.call("remaining", timeout=20)) < 21


@check
def what_is_not_served_is_unimplemented(bench: Bench) -> None:
    assert bench.failure("nothing").code() == Code.UNIMPLEMENTED
    with pytest.raises(grpc.RpcError) as caught:
        list(bench.stream("nothing"))
    assert caught.value.code() == Code.UNIMPLEMENTED


@check
def too_large_a_message_is_refused_alone(bench: Bench) -> None:
    assert bench.failure("echo", bytes(16 * MEGABYTE + 1)).code() == Code.RESOURCE_EXHAUSTED
    assert bench.failure("large", str(16 * MEGABYTE + 1).encode()).code() == Code.RESOURCE_EXHAUSTED
    assert len(bench.call("large", str(16 * MEGABYTE - 100).encode())) == 16 * MEGABYTE - 100


@check
def streams_come_whole_and_in_order(bench: Bench) -> None:
    for number in (0, 1, 2, 3, 500):
        answers = bench.stream("count", str(number).encode())
        assert list(answers) == [b"" if each % 3 == 2 else str(each).encode() for each in range(number)]
        assert next(answers, None) is None
        assert answers.code() == Code.OK
        assert not answers.is_active()
    eventually(lambda: bench.service.called_back["count"] == 5)


@check
def a_stream_may_fail_midway(bench: Bench) -> None:
    answers = bench.stream("fail_midway", b"SUPERSEDED")
    assert next(answers) == b"first"
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
        assert reason_of(caught.value) == "SUPERSEDED"
    assert answers.code() == Code.ABORTED
    assert dict(answers.trailing_metadata())["kvblend-reason"] == "SUPERSEDED"


@check
def an_abandoned_stream_ends_its_handler(bench: Bench) -> None:
    # Not their deadline ends them.
    answers = bench.stream("endless", b"dropped", timeout=10 * bench.seconds)
    next(answers)
    answers.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        for _ in answers:
            pass
    assert caught.value.code() == Code.CANCELLED
    other = bench.stream("endless", b"forgotten", timeout=10 * bench.seconds)
    next(other)
    del other, answers
    for name in ("dropped", "forgotten"):
        eventually(lambda name=name: bench.service.closed[name] == bench.service.called_back[name] == 1)


@check
def an_answer_may_be_asked_for_later(bench: Bench) -> None:
    echo, wait = unary(bench.channel, "echo"), unary(bench.channel, "wait")
    later = [echo.future(str(number).encode(), timeout=bench.seconds) for number in range(5)]
    assert [answer.result() for answer in reversed(later)] == [b"4", b"3", b"2", b"1", b"0"]
    assert later[0].result(0) == b"0"
    assert later[0].done()
    assert later[0].code() == Code.OK
    failed = unary(bench.channel, "fail").future(b"OVERLOADED", timeout=bench.seconds)
    assert reason_of(failed.exception()) == "OVERLOADED"
    assert failed.code() == Code.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError):
        failed.result()
    waiting = wait.future(b"later", timeout=4 * bench.seconds)
    eventually(lambda: bench.service.begun["later"])
    assert waiting.running()
    assert not waiting.cancelled()
    with pytest.raises(grpc.FutureTimeoutError):
        waiting.result(0.01)
    told: list[Any] = []
    waiting.add_done_callback(told.append)
    assert waiting.cancel()
    assert waiting.cancelled()
    with pytest.raises(grpc.FutureCancelledError):
        waiting.result()
    eventually(lambda: told == [waiting] and bench.service.called_back["later"] == 1)


@check
def a_reader_that_waits_is_woken_by_a_cancel(bench: Bench) -> None:
    answers = bench.stream("pause", b"paused", timeout=4 * bench.seconds)
    next(answers)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, answers)
        assert answers.cancel()
        assert isinstance(failure := waiting.exception(bench.seconds), grpc.RpcError)
    assert failure.code() == Code.CANCELLED
    eventually(lambda: bench.service.closed["paused"] == 1)


@check
def a_stream_is_cancelled_from_another_thread(bench: Bench) -> None:
    answers = bench.stream("endless", b"cancelled")
    next(answers)
    threading.Timer(0.05, answers.cancel).start()
    with pytest.raises(grpc.RpcError) as caught:
        for _ in answers:
            pass
    assert caught.value.code() == Code.CANCELLED
    assert not answers.cancel()
    eventually(lambda: bench.service.closed["cancelled"] == bench.service.called_back["cancelled"] == 1)


@check
def a_deadline_ends_the_call_and_nothing_of_it_reaches_the_next(bench: Bench) -> None:
    """Its handler finishes while the next call waits: a late answer is for nobody."""
    for number in range(3):
        assert bench.failure("wait_silently", b"late", timeout=0.05).code() == Code.DEADLINE_EXCEEDED
        threading.Timer(0.05, bench.service.release.set).start()
        request = f"next {number}".encode()
        assert bench.call("echo", request) == request
        bench.service.release.wait(bench.seconds)
        assert bench.call("echo", b"more") == b"more"
        bench.service.release.clear()
    answers = bench.stream("endless", b"timely", timeout=0.2)
    with pytest.raises(grpc.RpcError) as caught:
        for _ in answers:
            pass
    assert caught.value.code() == Code.DEADLINE_EXCEEDED
    eventually(lambda: bench.service.closed["timely"] == bench.service.called_back["timely"] == 1)


@check
def callbacks_run_once_when_a_call_is_over(bench: Bench) -> None:
    """Answered, or given up by its caller while its handler still works."""
    assert bench.failure("wait", b"given up", timeout=0.1).code() == Code.DEADLINE_EXCEEDED
    eventually(lambda: bench.service.called_back["given up"])
    bench.service.release.set()
    assert bench.call("wait", b"answered") == b"answered"
    eventually(lambda: bench.service.called_back["answered"] and "given up" in bench.service.active)
    assert bench.service.active == {"given up": False, "answered": True}
    assert bench.service.called_back == {"given up": 1, "answered": 1}


@check
def a_handler_sees_that_its_caller_is_gone(bench: Bench) -> None:
    assert bench.failure("while_active", b"left", timeout=0.1).code() == Code.DEADLINE_EXCEEDED
    eventually(lambda: bench.service.closed["left"] == 1)


@check
def a_request_is_carried_out_once(bench: Bench) -> None:
    for number in range(50):
        bench.call("echo", f"once {number}".encode())
    assert all(bench.service.begun[f"once {number}"] == 1 for number in range(50))


@check
def a_closed_channel_ends_its_calls(bench: Bench) -> None:
    with ThreadPoolExecutor(1) as pool:
        failure = pool.submit(bench.failure, "wait", b"closed")
        eventually(lambda: bench.service.begun["closed"])
        bench.channel.close()
        assert failure.result(bench.seconds).code() == Code.CANCELLED
    eventually(lambda: bench.service.called_back["closed"] == 1)
    with pytest.raises(ValueError, match="closed channel"):
        bench.call("echo")
