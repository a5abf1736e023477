"""The matcher as a process on a real socket: started, asked, killed, started again, filled again."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from matcher_kit import added, ask, document_chunks, page

from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.channels import open_channel
from services.common.errors import reason_of

TEXT = list(range(1000, 1300))


class Process:
    def __init__(self, folder: Path) -> None:
        self.target = f"unix:{folder}/matcher"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "services.matcher", "--listen", self.target, "--drain-seconds", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.channel = open_channel(self.target)
        grpc.channel_ready_future(self.channel).result(timeout=60)
        self.stub: Any = matcher_pb2_grpc.MatcherServiceStub(self.channel)

    def kill(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait(timeout=30)


@pytest.fixture
def matcher(shm_dir: Path) -> Iterator[Process]:
    process = Process(shm_dir)
    yield process
    process.kill()


def test_case_58_a_killed_matcher_asks_for_everything_again_and_then_finds_it(matcher: Process) -> None:
    events = added(*document_chunks(TEXT))
    first = matcher.stub.Publish(page(events), timeout=10)
    assert matcher.stub.Match(ask(TEXT), timeout=10).segments[0].length == len(TEXT)
    matcher.kill()
    matcher.start()
    assert not matcher.stub.Match(ask(TEXT), timeout=10).segments
    again = matcher.stub.Publish(page(added(*document_chunks(TEXT)[:1]), first=len(events) + 1), timeout=10)
    assert again.needs_reset
    assert again.boot_id != first.boot_id
    matcher.stub.Publish(page(events, first=500, reset=True), timeout=10)
    assert matcher.stub.Match(ask(TEXT), timeout=10).segments[0].length == len(TEXT)


def test_bad_requests_are_typed_errors_and_the_process_lives_on(matcher: Process) -> None:
    calls = {
        "INVALID_TOKENS": matcher_pb2.MatchRequest(space_id=b"s" * 16, tokens=b"123"),
        "EMPTY_PROMPT": ask([]),
        "INVALID_ARGUMENT": ask(TEXT, space_id=b""),
    }
    for reason, request in calls.items():
        with pytest.raises(grpc.RpcError) as caught:
            matcher.stub.Match(request, timeout=10)
        assert reason_of(caught.value) == reason
    assert matcher.stub.PingMatcher(matcher_pb2.PingMatcherRequest(), timeout=10).liveness.service == "matcher"


def test_matches_run_beside_each_other_and_beside_publishing(matcher: Process) -> None:
    """Every answer given while other documents come is whole for the document that was there before."""
    matcher.stub.Publish(page(added(*document_chunks(TEXT))), timeout=10)
    wrong: list[int] = []

    def ask_often() -> None:
        for _ in range(50):
            answer = matcher.stub.Match(ask(TEXT), timeout=30)
            covered = sum(segment.length for segment in answer.segments)
            if covered != len(TEXT):
                wrong.append(covered)

    readers = [threading.Thread(target=ask_often) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(60):
        other = document_chunks([number * 7 + i for i in range(64)], f"other{number}")
        matcher.stub.Publish(page(added(*other), store=f"store{number % 3}", epoch=number + 1), timeout=30)
    for reader in readers:
        reader.join(timeout=120)
    assert not any(reader.is_alive() for reader in readers)
    assert wrong == []


@pytest.mark.parametrize("flags", [["--threads", "0"], ["--listen", "here"], ["--chunk-tokens", "256"]])
def test_case_73_wrong_settings_end_the_start(flags: list[str]) -> None:
    command = [sys.executable, "-m", "services.matcher", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
