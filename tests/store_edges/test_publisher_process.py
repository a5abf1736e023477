"""The publisher and the real matcher, as processes: killed, stopped and started again."""

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
from services.store.publisher import Publisher


class MatcherProcess:
    def __init__(self, target: str) -> None:
        self.target = target
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "services.matcher", "--listen", self.target, "--drain-seconds", "0"]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None


@pytest.fixture
def matcher(shm_dir: Path) -> Iterator[MatcherProcess]:
    process = MatcherProcess(f"unix:{shm_dir}/matcher.sock")
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


def test_case_57_and_58_a_killed_or_stopped_matcher_gets_the_whole_table_back(matcher: MatcherProcess) -> None:
    catalog = Catalog()
    publisher = Publisher("store-a", 3, [matcher.target], catalog.snapshot, timeout=1, probe_seconds=0.1)
    catalog.added, catalog.removed = publisher.added, publisher.removed
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
        assert publisher.wait_applied(publisher.position().sequence, 30)
    finally:
        publisher.close()


def test_an_empty_page_asks_for_the_position_and_changes_nothing(matcher: MatcherProcess) -> None:
    """What the publisher's probe relies on."""
    matcher.start()
    with open_channel(matcher.target) as channel:
        stub = matcher_pb2_grpc.MatcherServiceStub(channel)

        def publish(first: int, *numbers: int, reset: bool = False) -> matcher_pb2.PublishResponse:
            events = [matcher_pb2.ChangeEvent(added=chunk_added(number)) for number in numbers]
            answer: matcher_pb2.PublishResponse = stub.Publish(
                matcher_pb2.PublishRequest(store="s", epoch=1, first_sequence=first, events=events, reset=reset),
                timeout=60,
                wait_for_ready=True,
            )
            return answer

        assert not publish(10, 1, 2, reset=True).needs_reset
        in_step = publish(12)
        assert (in_step.applied_sequence, in_step.needs_reset) == (11, False)
        assert publish(14).needs_reset
        behind = publish(11)
        assert (behind.applied_sequence, behind.needs_reset) == (11, False)
        emptied = publish(20, reset=True)
        assert (emptied.applied_sequence, emptied.needs_reset) == (19, False)
    assert sum(space.chunks for space in stats(matcher.target).spaces) == 0
