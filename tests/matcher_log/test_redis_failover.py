"""Failovers that lose acknowledged records: readers and writers notice, and nobody mixes two histories."""

import signal
import threading
import time
from collections.abc import Callable

from log_kit import EPOCH, SECONDS, OpenLog, append_all, drain, is_gap, page, reason_of
from redis_topologies import cluster, cut_replication, info, port_of, sentinel_set, wait_for_master, wait_until

from services.common.errors import KvblendError
from services.matcher.log.base import START, Log, LogGap, Position, Record

MIB = 1 << 20


class Follower:
    """Reads the log as a replica does, on a thread: `records` is what it holds, from the start."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.records: list[Record] = []
        self.gaps = 0
        self.reasons: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            after = self.records[-1].position if self.records else START
            try:
                self.records += self._log.read(after, MIB, 0.05, 2.0)
            except LogGap:
                self.gaps += 1
                self.records = []
            except KvblendError as error:
                self.reasons.add(error.reason)
                time.sleep(0.02)


def answering(call: Callable[[], object]) -> Callable[[], bool]:
    """Whether a call has an answer by now; until then it must say that the log is unavailable."""

    def attempt() -> bool:
        reason = reason_of(call)
        assert reason in ("", "LOG_UNAVAILABLE")
        return not reason

    return attempt


def check_what_was_lost(log: Log, follower: Follower, kept: Position, lost: list[Position]) -> None:
    """`lost` were acknowledged behind `kept`, and are gone."""
    wait_until(answering(lambda: log.tail("a", EPOCH, 2.0)))
    assert log.tail("a", EPOCH, SECONDS).durable == kept.number, "the writer sees what it has to send again"
    assert all(is_gap(log.read, position, MIB, 0, SECONDS) for position in lost)
    # Other pages take those numbers: the writer comes back later than another one.
    append_all(log, page("b", 1), page("b", 2), page("a", kept.number + 1), page("a", kept.number + 2))
    assert all(is_gap(log.read, position, MIB, 0, SECONDS) for position in lost)
    whole = drain(log)
    assert drain(log, kept) == whole[kept.number :]
    wait_until(lambda: follower.records == whole)
    assert follower.gaps > 0
    assert follower.reasons <= {"LOG_UNAVAILABLE"}


def test_sentinels_replace_a_server_whose_last_records_are_lost(opened: OpenLog) -> None:
    with sentinel_set() as servers:
        log = opened(servers.url, "kvblend")
        kept = append_all(log, page("a", 1), page("a", 2), page("a", 3))
        wait_until(lambda: _offset(servers.replica) == _offset(servers.primary))
        cut_replication(servers.primary, servers.replica)
        append_all(log, page("a", 4), page("a", 5))
        lost = [record.position for record in drain(log, kept)]
        with Follower(opened(servers.url, "kvblend")) as follower:
            wait_until(lambda: len(follower.records) == 5)
            servers.fail_over()
            check_what_was_lost(log, follower, kept, lost)


def test_a_primary_that_stood_still_and_comes_back_changes_nothing(opened: OpenLog) -> None:
    with sentinel_set() as servers:
        log = opened(servers.url, "kvblend")
        append_all(log, page("a", 1), page("a", 2))
        wait_until(lambda: _offset(servers.replica) == _offset(servers.primary))
        servers.sentinels[0].process.send_signal(signal.SIGSTOP)
        servers.primary.freeze()
        wait_until(lambda: all(one.state().get("port") == port_of(servers.replica) for one in servers.sentinels[1:]))
        wait_until(answering(lambda: log.append(page("a", 3), 2.0)))
        # For a while this server thinks that it is the master, and this Sentinel thinks so too.
        servers.primary.thaw()
        servers.sentinels[0].process.send_signal(signal.SIGCONT)
        append_all(log, page("a", 4))
        fresh = opened(servers.url, "kvblend")
        append_all(fresh, page("a", 5))
        assert [record.data for record in drain(fresh)] == [page("a", number).data for number in range(1, 6)]


def test_a_cluster_replaces_a_server_whose_last_records_are_lost(opened: OpenLog) -> None:
    with cluster(b"{kvblend}:records") as servers:
        log = opened(servers.url, "kvblend")
        kept = append_all(log, page("a", 1), page("a", 2), page("a", 3))
        wait_until(lambda: _offset(servers.replica) == _offset(servers.owner))
        cut_replication(servers.owner, servers.replica)
        append_all(log, page("a", 4), page("a", 5))
        lost = [record.position for record in drain(log, kept)]
        with Follower(opened(servers.url, "kvblend")) as follower:
            wait_until(lambda: len(follower.records) == 5)
            servers.owner.kill()
            servers.replica.thaw()
            wait_for_master(servers.replica)
            check_what_was_lost(log, follower, kept, lost)


def _offset(server: object) -> int:
    return int(info(server, "replication")["master_repl_offset"])
