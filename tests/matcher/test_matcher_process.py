"""The matcher as a process: bad requests, parallel calls, kill -9 at any moment, and logs that go away."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from matcher_kit import SPACE, TIER, Added, Change, Cleared, Removed, ask, document_chunks, page, text
from matcher_process import SECONDS, Process
from redis_server import RedisServer, redis_server

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.errors import reason_of
from services.matcher.fold import Fold
from services.matcher.log.base import START, Position
from services.matcher.log.sqlite import SqliteLog
from services.matcher.table import Table

TEXT = list(range(1000, 1300))
CHUNKS = document_chunks(TEXT)


@pytest.fixture
def matcher(shm_dir: Path) -> Iterator[Process]:
    """With its log in memory."""
    process = Process(shm_dir)
    process.start()
    yield process
    process.kill()


@pytest.fixture
def of_file(shm_dir: Path, tmp_path: Path) -> Iterator[Process]:
    process = Process(shm_dir, "matcher", "--log", f"sqlite:{tmp_path}/log", "--snapshot-bytes", "1024")
    process.start()
    yield process
    process.kill()


def at_least(sequence: int, epoch: int = 1, store: str = "a") -> list[pb.StreamPosition]:
    return [pb.StreamPosition(store=store, epoch=epoch, sequence=sequence)]


def test_bad_requests_are_typed_errors_and_the_process_lives_on(matcher: Process) -> None:
    calls = {
        "INVALID_TOKENS": matcher_pb2.MatchRequest(space_id=SPACE, tokens=b"123"),
        "EMPTY_PROMPT": ask([]),
        "INVALID_ARGUMENT": ask(TEXT, space_id=b""),
    }
    for reason, request in calls.items():
        with pytest.raises(grpc.RpcError) as caught:
            matcher.match(request)
        assert reason_of(caught.value) == reason
    with pytest.raises(grpc.RpcError) as caught:
        matcher.stub.Publish(matcher_pb2.PublishRequest(store="a"), timeout=SECONDS)
    assert reason_of(caught.value) == "INVALID_ARGUMENT"
    liveness = matcher.stub.PingMatcher(matcher_pb2.PingMatcherRequest(), timeout=SECONDS).liveness
    assert (liveness.service, [d.ready for d in liveness.dependencies]) == ("matcher", [True])


def test_matches_run_beside_each_other_and_beside_publishing(matcher: Process) -> None:
    """Every answer given while other documents come is whole for the document that was there before."""
    sequence = matcher.publish(Added(CHUNKS)).durable_sequence
    wrong: list[Any] = []

    def ask_often() -> None:
        for _ in range(50):
            answer = matcher.found(TEXT, at_least=at_least(sequence))
            if answer != [(0, 300, "doc")]:
                wrong.append(answer)

    readers = [threading.Thread(target=ask_often) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(60):
        other = document_chunks([number * 7 + i for i in range(64)], f"other{number}")
        matcher.publish(Added(other), store=f"store{number % 3}", epoch=number + 1)
    for reader in readers:
        reader.join(timeout=120)
    assert not any(reader.is_alive() for reader in readers)
    assert wrong == []


def test_case_39_and_40_and_57_over_the_wire(matcher: Process) -> None:
    """Each store's own chunks; nothing of what was cleared; nothing of an older epoch."""
    for store in ("a", "b"):
        matcher.publish(Added(document_chunks(TEXT, f"of {store}")), store=store)
    for store in ("a", "b"):
        known = at_least(19, store=store)
        assert matcher.found(TEXT, store=store, at_least=known) == [(0, 300, f"of {store}")]
    matcher.publish(Cleared(), store="b", first=20)
    answer = matcher.match(ask(TEXT, store="b", at_least=at_least(20, store="b")))
    assert (answer.candidates - answer.verified, len(answer.segments.lengths)) == (0, 0)
    matcher.publish(Added(CHUNKS[:1]), store="a", epoch=2)
    assert matcher.found(TEXT, epoch=1, at_least=at_least(1, epoch=2)) == []
    assert matcher.found(TEXT, epoch=2) == [(0, 16, "doc")]
    matcher.publish(Cleared(), store="a", first=2, epoch=2)
    answer = matcher.match(ask(TEXT, epoch=2, at_least=at_least(2, epoch=2)))
    assert (answer.candidates, answer.verified) == (0, 0)
    assert matcher.stats.refused == 0


def test_case_46_two_processes_find_the_same(shm_dir: Path) -> None:
    """Their hashes have nothing in common; what they find, and their digests, are equal."""
    processes = [Process(shm_dir, f"m{number}") for number in range(2)]
    documents = {f"d{number}": text(number, 110 + 61 * number) for number in range(8)}
    query = [token for tokens in documents.values() for token in tokens[5:]]
    try:
        for process in processes:
            process.start()
            first = 1
            for name, tokens in documents.items():
                chunks = document_chunks(tokens, name, chunk_tokens=64, l2=TIER if name == "d3" else "")
                first = 1 + process.publish(Added(chunks), first=first).durable_sequence
        answers = [process.match(ask(query, l2_id=TIER, at_least=at_least(first - 1))) for process in processes]
        assert answers[0].segments == answers[1].segments
        assert len(answers[0].segments.lengths) == 4 * len(documents)
        assert len({process.stats.state_digest for process in processes}) == 1
    finally:
        for process in processes:
            process.kill()


def test_case_58_a_killed_matcher_without_a_file_is_filled_again_by_its_stores(matcher: Process) -> None:
    matcher.publish(Added(CHUNKS))
    assert matcher.found(TEXT, at_least=at_least(19)) == [(0, 300, "doc")]
    matcher.kill()
    matcher.start()
    assert matcher.found(TEXT) == []
    # A store learns that the log lost all that it had acknowledged, and says everything again.
    assert matcher.publish().durable_sequence == 0
    assert matcher.publish(Added(CHUNKS[:1]), first=20).durable_sequence == 0
    assert matcher.publish(Added(CHUNKS), first=500, reset=True).durable_sequence == 518
    assert matcher.found(TEXT, at_least=at_least(518)) == [(0, 300, "doc")]


class Acknowledged:
    """A store that publishes to a matcher that dies at any moment; and a fold of all that is durable."""

    def __init__(self, matcher: Process) -> None:
        self.matcher = matcher
        self.random = random.Random(5)
        self.fold = Fold(Table(64 << 20))
        self.sequence = 0
        self.in_flight: matcher_pb2.PublishRequest | None = None

    def turn(self) -> tuple[Change, ...]:
        """What is said of a name is always the same."""
        which = self.random.randrange(40)
        chunks = document_chunks(text(which, 500), f"{which}", document=f"{which % 5}")
        kind = self.random.randrange(6)
        if kind == 5:
            return (Cleared(document=f"{which % 5}"),)
        return (Added(chunks), Removed(chunks[:9])) if kind == 4 else (Added(chunks),)

    def publish_until_it_dies(self) -> None:
        with suppress(grpc.RpcError):
            while True:
                self.in_flight = page(self.turn(), self.sequence + 1)
                answer = self.matcher.stub.Publish(self.in_flight, timeout=SECONDS)
                self.heard(answer.durable_sequence)

    def heard(self, durable: int) -> None:
        """All of the page in flight, or nothing of it, is durable."""
        assert self.in_flight is not None
        last = self.in_flight.first_sequence - 1 + changes_in(self.in_flight)
        assert durable in (self.sequence, last)
        if durable == last:
            self.fold.apply(self.in_flight.SerializeToString(), Position(self.fold.position.number + 1, START.chain))
            self.sequence = durable


def changes_in(request: matcher_pb2.PublishRequest) -> int:
    return sum(
        len(b.added.lengths) // 4 + len(b.removed.chain_hashes) // 32 + b.HasField("cleared") for b in request.batches
    )


def test_case_58_killed_at_any_moment_a_matcher_knows_what_it_acknowledged(of_file: Process, tmp_path: Path) -> None:
    store = Acknowledged(of_file)
    moments = random.Random(3)
    for _ in range(4):
        publishing = threading.Thread(target=store.publish_until_it_dies)
        publishing.start()
        # Snapshots are due from the start: the first is written while pages come.
        time.sleep(moments.uniform(0.05, 0.6))
        of_file.kill()
        publishing.join(SECONDS)
        of_file.start()
        store.heard(of_file.publish().durable_sequence)
        stats = of_file.stats
        assert [(p.store, p.sequence) for p in stats.applied] == [("a", store.sequence)]
        assert stats.state_digest == store.fold.digest()
    of_file.kill()
    with closing(SqliteLog(tmp_path / "log")) as log:
        assert log.snapshot(SECONDS) is not None
    assert store.fold.position.number > 8


def test_case_58_the_same_matches_after_kill_and_restart(of_file: Process) -> None:
    sequence = of_file.publish(Added(CHUNKS), Added(document_chunks(text(1, 700), "other"))).durable_sequence
    query = text(2, 9) + TEXT + text(1, 700)[3:] + text(3, 9)
    before = of_file.match(ask(query, at_least=at_least(sequence)))
    of_file.kill()
    of_file.start()
    after = of_file.match(ask(query))
    assert after.segments == before.segments
    assert len(after.segments.lengths) == 8
    assert of_file.publish().durable_sequence == sequence
    of_file.publish(Removed(CHUNKS), first=sequence + 1)
    assert len(of_file.found(query, at_least=at_least(sequence + len(CHUNKS)))) == 1


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def eventually(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def test_case_38_with_redis_gone_every_replica_finds_as_much_as_before(shm_dir: Path, redis: RedisServer) -> None:
    replicas = [Process(shm_dir, f"m{number}", "--log", redis.tcp_url) for number in range(2)]
    try:
        for replica in replicas:
            replica.start()
        replicas[0].publish(Added(CHUNKS))
        before = [replica.found(TEXT, at_least=at_least(19)) for replica in replicas]
        assert before == [[(0, 300, "doc")]] * 2
        redis.kill()
        for replica in replicas:
            eventually(lambda replica=replica: replica.stats.log.error)
            first = replica.match(ask(TEXT)).log_age_ms
            eventually(lambda replica=replica, first=first: replica.match(ask(TEXT)).log_age_ms > first)
            assert replica.found(TEXT) == before[0]
            liveness = replica.stub.PingMatcher(matcher_pb2.PingMatcherRequest(), timeout=SECONDS).liveness
            assert [d.ready for d in liveness.dependencies] == [False]
            with pytest.raises(grpc.RpcError) as caught:
                replica.stub.Publish(page([Added(CHUNKS)], first=20), timeout=2)
            assert reason_of(caught.value) in ("LOG_UNAVAILABLE", "DEADLINE_EXCEEDED")
    finally:
        for replica in replicas:
            replica.kill()


@pytest.mark.parametrize(
    "flag",
    [
        ["--threads", "0"],
        ["--listen", "here"],
        ["--chunk-tokens", "256"],
        ["--log", "file:x"],
        ["--snapshot-bytes", "1"],
    ],
    ids=lambda flags: flags[0],
)
def test_case_73_wrong_settings_end_the_start(flag: str) -> None:
    command = [sys.executable, "-m", "services.matcher", f"--{flag}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr


def test_case_73_a_second_process_of_one_file_is_refused(of_file: Process, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.matcher", "--log", f"sqlite:{tmp_path}/log"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0
    assert "in use" in result.stderr
    assert "Traceback" not in result.stderr
