"""Replicas of one log: they never diverge, go on without the log, and know when they are behind."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from history import History
from matcher_kit import TIER, Added, Change, Cleared, Removed, ask, document_chunks, segments_of, text
from matcher_service_kit import CONTEXT, LIMIT, SECONDS, FaultyLog, Matcher

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError
from services.common.metrics import REGISTRY
from services.matcher import replica as replica_module
from services.matcher.fold import Fold
from services.matcher.log.base import START, Log, Position
from services.matcher.log.memory import MemoryLog
from services.matcher.log.sqlite import SqliteLog
from services.matcher.snapshot import parts_of
from services.matcher.table import Table

DOCUMENT = text(1, 100)
CHUNKS = document_chunks(DOCUMENT)


def eventually(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the log's end and for snapshots that are due at every step; tries again soon."""
    monkeypatch.setattr(replica_module, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(replica_module, "_SNAPSHOT_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(replica_module, "_LAST_BACKOFF", 0.05)


class Pair:
    """Two replicas, each with a way to the log that can be cut."""

    def __init__(self, log: Log, **options: Any) -> None:
        self.log = log
        self.ways = [FaultyLog(log) for _ in range(2)]
        self.replicas = [Matcher(way, **options) for way in self.ways]

    def start(self) -> None:
        for replica in self.replicas:
            replica.start()

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        self.log.close()

    def cut(self, number: int, *calls: str) -> None:
        """From here on this replica reads nothing new, and knows that it cannot."""
        self.ways[number].away = set(calls)
        eventually(lambda: "away" in self.replicas[number].replica.error)

    def converge(self) -> None:
        """Until both have applied all that the log has; then they know the same, and what a fold of it knows."""
        end = self.log.end(SECONDS)
        for replica in self.replicas:
            eventually(lambda replica=replica: replica.replica.fold.position == end)
        assert len({replica.stats.state_digest for replica in self.replicas}) == 1


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = Pair(MemoryLog())
    with closing(both):
        both.start()
        yield both


def saved(log: Log, fold: Fold) -> Position:
    assert log.save_snapshot(fold.position, parts_of(fold, fold.applied()), SECONDS)
    return fold.position


class Writer:
    """A store that sends pages as they may come: lost, twice, overlapping, to either replica; in order in the end."""

    def __init__(self, name: str, pair: Pair, seed: int) -> None:
        self.random = random.Random(seed)
        self.name, self.pair = name, pair
        self.epoch, self.sequence = 1, 0

    def send(self, *changes: Change, first: int = 0) -> int:
        to = self.random.choice(self.pair.replicas)
        answer = to.publish(*changes, store=self.name, epoch=self.epoch, first=first or self.sequence + 1)
        return answer.durable_sequence

    def publish(self, *changes: Change) -> None:
        count = sum(change.count for change in changes)
        if self.random.random() < 0.2:
            # A page that is ahead of what is there.
            assert self.send(*changes, first=self.sequence + 2) == self.sequence
        assert self.send(*changes) == self.sequence + count
        if self.random.random() < 0.3:
            # Its answer was lost.
            assert self.send(*changes) == self.sequence + count
        self.sequence += count

    def turn(self, number: int) -> None:
        pick = self.random
        # What is said of a name is always the same, so that snapshots need not tell one life of it from the next.
        which = pick.randrange(12)
        chunks = document_chunks(text(which, 200), f"{which}", l2=TIER if which % 5 == 0 else "")
        kind = pick.randrange(8)
        if kind < 4:
            self.publish(Added(chunks))
        elif kind < 6:
            self.publish(Removed(pick.sample(chunks, 3)), Added(chunks[:1]))
        elif kind == 6:
            self.publish(Cleared(document=f"{which}"))
        elif not number % 3:
            self.epoch, self.sequence = self.epoch + 1, 0
            self.publish(Added([chunk for chunk in chunks if not chunk.l2] or CHUNKS))


def in_test_fold(log: Log) -> Fold:
    fold = Fold(Table(LIMIT))
    while records := log.read(fold.position, 1 << 30, 0.0, SECONDS):
        for record in records:
            fold.apply(record.data, record.position)
    return fold


@pytest.mark.parametrize("seed", range(3))
def test_replicas_never_diverge_whatever_stores_send(pair: Pair, seed: int) -> None:
    writers = [Writer(name, pair, seed + 10 * n) for n, name in enumerate("abc")]
    for number in range(60):
        for writer in writers:
            writer.turn(number)
    pair.converge()
    assert pair.replicas[0].stats.state_digest == in_test_fold(pair.log).digest()
    for which in range(12):
        request = ask(text(which, 200), l2_id=TIER, epoch=writers[0].epoch)
        assert len({str(replica.match(request).segments.lengths) for replica in pair.replicas}) == 1


def test_what_one_replica_acknowledged_another_knows_when_it_is_asked_for_it(pair: Pair) -> None:
    one, other = pair.replicas
    for number in range(100):
        document = text(number, 16)
        answer = one.add(*document_chunks(document, f"{number}"), first=number + 1)
        position = pb.StreamPosition(store="a", epoch=1, sequence=answer.durable_sequence)
        assert segments_of(other.service.Match(ask(document, at_least=[position]), CONTEXT))


def test_case_38_with_the_log_away_answers_go_on_and_say_how_old_they_are(pair: Pair) -> None:
    pair.replicas[0].add(*CHUNKS)
    pair.converge()
    before = [replica.match(ask(DOCUMENT)).segments for replica in pair.replicas]
    for number, replica in enumerate(pair.replicas):
        pair.cut(number, "all")
        ages = []
        for _ in range(3):
            answer = replica.service.Match(ask(DOCUMENT), CONTEXT)
            assert answer.segments == before[0] == before[1]
            ages.append(answer.log_age_ms)
            eventually(lambda replica=replica, age=ages[-1]: replica.stats.log.age_ms > age + 20)
        assert ages == sorted(set(ages))
        liveness = replica.service.PingMatcher(matcher_pb2.PingMatcherRequest(), CONTEXT).liveness
        assert [(d.ready, d.detail) for d in liveness.dependencies] == [(False, replica.stats.log.error)]
        assert "away" in replica.stats.log.error
        with pytest.raises(KvblendError) as caught:
            replica.add(*CHUNKS, first=8)
        assert caught.value.reason == "LOG_UNAVAILABLE"
        behind: Any = SimpleNamespace(time_remaining=lambda: 0.05)
        ahead = pb.StreamPosition(store="a", epoch=1, sequence=8)
        with pytest.raises(KvblendError) as caught:
            replica.service.Match(ask(DOCUMENT, at_least=[ahead]), behind)
        assert caught.value.reason == "NOT_CAUGHT_UP"
    for way in pair.ways:
        way.away = set()
    pair.replicas[0].publish(Removed(CHUNKS), first=8)
    pair.converge()
    # A replica may have heard of the page while another of its calls was still failing.
    eventually(lambda: [replica.stats.log.error for replica in pair.replicas] == ["", ""])
    assert not segments_of(pair.replicas[1].match(ask(DOCUMENT)))


def test_a_replica_is_ready_only_when_it_has_caught_up() -> None:
    log = MemoryLog()
    history = History()
    for number in range(20):
        history.add(*document_chunks(text(number, 100), f"{number}"))
    log_of(history, log)
    way = FaultyLog(log)
    way.away = {"read"}
    late = Matcher(way)
    with closing(late):
        late.replica.start()
        eventually(lambda: "away" in late.replica.error)
        with pytest.raises(KvblendError) as caught:
            late.service.Match(ask(text(3, 100)), CONTEXT)
        assert caught.value.reason == "NOT_READY"
        assert not late.replica.ready
        way.away = set()
        eventually(lambda: late.replica.ready)
        assert late.replica.fold.digest() == history.fold.digest()
        assert segments_of(late.service.Match(ask(text(3, 100)), CONTEXT))


def log_of(history: History, log: Log) -> None:
    """Appends a history's records."""
    for data, _ in history.records:
        request = matcher_pb2.PublishRequest.FromString(data)
        count = sum(len(b.added.lengths) // 4 + len(b.removed.chain_hashes) // 32 for b in request.batches)
        page = replica_module.Page(request.store, request.epoch, request.first_sequence, count, False, data)
        log.append(page, SECONDS)


def test_behind_a_gap_a_replica_loads_a_snapshot_and_answers_meanwhile(pair: Pair) -> None:
    one, other = pair.replicas
    one.add(*CHUNKS)
    pair.converge()
    pair.cut(1, "read", "snapshot")
    for number in range(5):
        one.add(*document_chunks(text(50 + number, 64), f"{number}"), first=8 + 4 * number)
    one.publish(Removed(CHUNKS[:1]), first=28)
    one.settle()
    at = saved(pair.log, one.replica.fold)
    # The records that it needs are gone by now; nor can it get the snapshot yet.
    pair.ways[1].away = {"snapshot"}
    reads = other.replica.log.calls["snapshot"]
    eventually(lambda: other.replica.log.calls["snapshot"] > reads + 1)
    assert other.replica.fold.position < at
    assert [s.length for s in segments_of(other.service.Match(ask(DOCUMENT), CONTEXT))] == [100]
    pair.ways[1].away = set()
    pair.converge()
    assert other.replica.snapshot_position == at.number
    assert [s.length for s in segments_of(other.service.Match(ask(DOCUMENT), CONTEXT))] == [84]


def test_a_log_that_lost_its_end_and_grew_another_is_followed_anew(pair: Pair) -> None:
    """What it once had and has no more is not known any more either."""
    one = pair.replicas[0]
    one.add(*CHUNKS)
    one.add(*document_chunks(text(2, 100), "lost"), first=8)
    pair.converge()
    survivor = MemoryLog()
    request = matcher_pb2.PublishRequest.FromString(pair.log.read(START, 1, 0.0, SECONDS)[0].data)
    data = request.SerializeToString()
    survivor.append(replica_module.Page("a", 1, 1, 7, False, data), SECONDS)
    pair.log = survivor
    for way in pair.ways:
        way.inner = survivor
    # Said again by the store: another page under the old number.
    assert one.add(*document_chunks(text(3, 100), "instead"), first=8).durable_sequence == 14
    pair.converge()
    for replica in pair.replicas:
        assert segments_of(replica.match(ask(DOCUMENT)))
        assert segments_of(replica.match(ask(text(3, 100))))
        assert not segments_of(replica.match(ask(text(2, 100))))


def test_a_snapshot_is_written_when_it_is_due_and_read_by_the_next_replica() -> None:
    log = MemoryLog()
    both = Pair(log, snapshot_bytes=1)
    with closing(both):
        both.start()
        for number in range(30):
            chunks = document_chunks(text(number, 1600), f"{number}", chunk_tokens=64)
            both.replicas[number % 2].add(*chunks, first=1 + 25 * number)
        both.converge()
        eventually(lambda: any(replica.stats.log.snapshot_position for replica in both.replicas))
        info = log.snapshot(SECONDS)
        assert info is not None
        assert info.position.number > 0
        third = Matcher(FaultyLog(log))
        with closing(third):
            third.start()
            assert third.replica.snapshot_position >= info.position.number
            eventually(lambda: third.replica.fold.position == log.end(SECONDS))
            assert third.stats.state_digest == both.replicas[0].stats.state_digest
            assert [s.length for s in third.segments(ask(text(7, 1600)))] == [1600]


@pytest.mark.parametrize("parts", [[b"\xff\xff"], [b""], []], ids=["garbage", "another version", "no parts"])
def test_a_snapshot_that_says_nonsense_stops_nobody(pair: Pair, parts: list[bytes]) -> None:
    one, other = pair.replicas
    one.add(*CHUNKS)
    pair.converge()
    pair.cut(1, "read")
    one.add(*document_chunks(text(2, 100), "more"), first=8)
    one.settle()
    pair.log.save_snapshot(one.replica.fold.position, parts, SECONDS)
    pair.ways[1].away = set()
    if parts:
        eventually(lambda: other.replica.error and "away" not in other.replica.error)
        assert segments_of(other.service.Match(ask(DOCUMENT), CONTEXT))
        # A good one comes.
        one.add(*document_chunks(text(3, 100), "yet more"), first=15)
        one.settle()
        saved(pair.log, one.replica.fold)
        pair.converge()
        assert segments_of(other.match(ask(text(3, 100))))
    else:
        eventually(lambda: other.replica.fold.position == pair.log.end(SECONDS))


def test_a_follower_that_meets_the_unexpected_tries_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    apply, failures = Fold.apply, iter([True, True, False])

    def failing(self: Fold, data: bytes, position: Position) -> None:
        if next(failures, False):
            raise RuntimeError("out of luck")
        apply(self, data, position)

    monkeypatch.setattr(Fold, "apply", failing)
    pair.replicas[0].add(*CHUNKS)
    pair.converge()
    assert "out of luck" in capfd.readouterr().out
    assert [len(segments_of(replica.match(ask(DOCUMENT)))) for replica in pair.replicas] == [1, 1]


def test_what_cannot_be_applied_makes_the_table_no_younger(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is on call must see it: the age grows and the error stays, although the log itself answers."""

    def failing(self: Fold, data: bytes, position: Position) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Fold, "apply", failing)
    heard_at = pair.replicas[0].replica._heard_at
    pair.replicas[0].add(*CHUNKS)
    eventually(lambda: "out of luck" in pair.replicas[0].replica.error)
    eventually(lambda: pair.replicas[0].replica.age > 0.3)
    assert "out of luck" in pair.replicas[0].stats.log.error
    assert pair.replicas[0].replica._heard_at - heard_at < 0.3


def test_the_size_of_the_table_is_a_metric_without_being_asked_for(pair: Pair) -> None:
    pair.replicas[0].add(*CHUNKS)
    pair.converge()
    eventually(lambda: REGISTRY.get_sample_value("kvblend_matcher_chunks") == len(CHUNKS))
    assert REGISTRY.get_sample_value("kvblend_matcher_table_bytes") > 0
    assert REGISTRY.get_sample_value("kvblend_matcher_evicted") == 0


def test_case_58_a_restarted_replica_of_a_file_knows_what_it_knew(tmp_path: Path) -> None:
    digests = set()
    for start in range(3):
        with ExitStack() as stack:
            log = SqliteLog(tmp_path / "log")
            matcher = stack.enter_context(closing(Matcher(log, snapshot_bytes=1)))
            matcher.start()
            if start == 0:
                for number in range(30):
                    chunks = document_chunks(text(number, 1600), f"{number}", chunk_tokens=64)
                    matcher.add(*chunks, first=1 + 25 * number)
                matcher.publish(Removed(document_chunks(text(3, 1600), "3", chunk_tokens=64)[5:7]), first=751)
                matcher.settle()
                eventually(lambda matcher=matcher: matcher.stats.log.snapshot_position)
            digests.add(matcher.stats.state_digest)
            assert [s.length for s in matcher.segments(ask(text(7, 1600)))] == [1600]
            assert [s.length for s in matcher.segments(ask(text(3, 1600)))] == [320, 1152]
    assert len(digests) == 1


@pytest.mark.parametrize("count", [1, 50])
def test_replicas_that_loaded_at_different_times_agree(count: int) -> None:
    """One has applied every record, one began in the middle from a snapshot, one at the end."""
    log = MemoryLog()
    both = Pair(log)
    with closing(both):
        both.start()
        writer = Writer("a", both, 5)
        for number in range(count):
            writer.turn(number)
        writer.publish(Added(CHUNKS))
        both.converge()
        saved(log, both.replicas[0].replica.fold)
        late = Matcher(FaultyLog(log))
        with closing(late):
            late.start()
            for number in range(40):
                writer.turn(number)
            both.converge()
            eventually(lambda: late.replica.fold.position == log.end(SECONDS))
            assert late.stats.state_digest == both.replicas[0].stats.state_digest


def test_a_snapshot_that_another_replica_writes_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is not watched on, and the next one is written when it is due."""
    log = MemoryLog()
    outcomes = iter([False, False])
    save = MemoryLog.save_snapshot
    monkeypatch.setattr(
        MemoryLog, "save_snapshot", lambda self, *arguments: next(outcomes, True) and save(self, *arguments)
    )
    matcher = Matcher(FaultyLog(log), snapshot_bytes=1)
    with closing(matcher):
        matcher.start()
        for number in range(5):
            chunks = document_chunks(text(number, 1600), f"{number}", chunk_tokens=64)
            matcher.add(*chunks, first=1 + 25 * number)
        eventually(lambda: log.snapshot(SECONDS))
        assert next(outcomes, None) is None
        eventually(lambda: matcher.table.watcher is None)
        matcher.settle()
