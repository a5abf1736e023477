"""The publisher and the real matcher, as processes: killed, stopped and started again, with their log and without."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from matcher_model import L2, Catalog, chunk_added

from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.channels import open_channel
from services.common.errors import reason_of
from services.store.publishing.changes import batches_of
from services.store.publishing.publisher import Publisher


class MatcherProcess:
    def __init__(self, target: str, log: str) -> None:
        self.target = target
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "services.matcher", "--listen", self.target, "--log", self._log]
        command += ["--drain-seconds", "0"]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None


@pytest.fixture(params=["memory:", "sqlite:{directory}/log.db"])
def matcher(request: pytest.FixtureRequest, shm_dir: Path) -> Iterator[MatcherProcess]:
    process = MatcherProcess(f"unix:{shm_dir}/matcher.sock", request.param.format(directory=shm_dir))
    yield process
    process.kill()


def stats(target: str) -> matcher_pb2.GetMatcherStatsResponse:
    with open_channel(target) as channel:
        stub = matcher_pb2_grpc.MatcherServiceStub(channel)
        answer: matcher_pb2.GetMatcherStatsResponse = stub.GetMatcherStats(
            matcher_pb2.GetMatcherStatsRequest(), timeout=5
        )
        return answer


def assert_table_becomes(matcher: MatcherProcess, publisher: Publisher, chunks: int) -> None:
    give_up_at = time.monotonic() + 60
    seen = None
    while time.monotonic() < give_up_at:
        try:
            answer = stats(matcher.target)
        except grpc.RpcError as error:
            seen = error.code()
        else:
            seen = list(answer.applied), sum(space.chunks for space in answer.spaces)
            if seen == ([publisher.position()], chunks):
                return
        time.sleep(0.05)
    pytest.fail(f"it never became {publisher.position()}, {chunks}: {seen}")


def assert_chunks_become(matcher: MatcherProcess, chunks: int) -> None:
    give_up_at = time.monotonic() + 60
    while sum(space.chunks for space in stats(matcher.target).spaces) != chunks:
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def test_case_57_and_58_a_killed_or_stopped_matcher_gets_the_whole_table_back(matcher: MatcherProcess) -> None:
    catalog = Catalog()
    publisher = Publisher("store-a", 3, matcher.target, catalog.snapshot, timeout=1, probe_seconds=0.1)
    catalog.append = publisher.append
    for number in range(1500):
        catalog.add(number)
    publisher.start()
    try:
        matcher.start()
        assert_table_becomes(matcher, publisher, 1500)
        for number in range(100):
            catalog.remove(number)
        catalog.add(7, L2)
        assert_table_becomes(matcher, publisher, 1401)

        matcher.kill()
        catalog.remove(200)
        matcher.start()
        assert_table_becomes(matcher, publisher, 1400)

        matcher.send(signal.SIGSTOP)
        for number in range(2000, 2050):
            catalog.add(number)
        time.sleep(2)
        matcher.send(signal.SIGCONT)
        assert_table_becomes(matcher, publisher, 1450)
        # The matcher may be ahead of its answer.
        give_up_at = time.monotonic() + 30
        while not publisher.wait_durable(publisher.position().sequence, 1):
            assert time.monotonic() < give_up_at, publisher.trouble()
            time.sleep(0.05)
    finally:
        publisher.close()


def test_what_the_publisher_relies_on(matcher: MatcherProcess) -> None:
    """An empty page asks and changes nothing; what does not follow changes nothing; a reset starts anywhere behind."""
    matcher.start()
    with open_channel(matcher.target) as channel:
        stub = matcher_pb2_grpc.MatcherServiceStub(channel)

        def publish(first: int, *numbers: int, reset: bool = False, epoch: int = 1) -> int:
            batches = batches_of([chunk_added(number) for number in numbers])
            answer: matcher_pb2.PublishResponse = stub.Publish(
                matcher_pb2.PublishRequest(store="s", epoch=epoch, first_sequence=first, batches=batches, reset=reset),
                timeout=60,
                wait_for_ready=True,
            )
            return answer.durable_sequence

        assert publish(1) == 0
        assert publish(10, 1, 2, reset=True) == 11
        assert publish(12) == publish(14, 5) == publish(11, 2, 3) == publish(10, 1) == 11
        assert publish(5, 9, reset=True) == 11
        assert publish(12, 3) == 12
        assert publish(30, 4, reset=True) == 30
        assert publish(1, epoch=2) == 0
        assert publish(1, 5, 6, epoch=2) == 2
        with pytest.raises(grpc.RpcError) as caught:
            publish(31, epoch=1)
        assert reason_of(caught.value) == "STALE_EPOCH"
    assert_chunks_become(matcher, 2)
