"""The store with a real matcher and a real Redis or Valkey, all as processes over real sockets."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import redis
from process_kit import Agent, StoreProcess, redis_server
from store_kit import CHUNK, Leased, Segment, segments_in, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2


class MatcherProcess:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.target = f"unix:{directory}/matcher.sock"
        self._command = [sys.executable, "-m", "services.matcher", "--listen", self.target, "--log-level", "error"]
        self._command += ["--drain-seconds", "0", "--grace-seconds", "0.2", "--log", f"sqlite:{directory}/log.db"]
        self.process = subprocess.Popen(self._command)

    def restart(self) -> None:
        self.process = subprocess.Popen(self._command)

    def lose_log(self) -> None:
        """While it does not run."""
        for file in self._directory.glob("log.db*"):
            file.unlink()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def matcher(shm_dir: Path) -> Iterator[MatcherProcess]:
    process = MatcherProcess(shm_dir)
    yield process
    process.kill()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.1)


class Asking:
    """Looks one prompt up under ever new request ids."""

    def __init__(self, agent: Agent, tokens: list[int]) -> None:
        self._agent = agent
        self._tokens = tokens
        self._number = 0
        self.objects: list[Leased] = []
        self.summary = store_pb2.LookupSummary()

    def ask(self, timeout: float = 5.0) -> store_pb2.LookupSummary:
        self._agent.call("EndRequests", request_ids=[str(self._number)])
        self._number += 1
        self.objects, self.summary = self._agent.lookup(
            self._tokens, request=str(self._number), timeout=timeout, want_segments=True
        )
        found = self.summary.prefix_tokens + self.segment_tokens()
        assert found + sum(item.tokens for item in self.summary.shortfalls) == len(self._tokens)
        return self.summary

    @property
    def segments(self) -> list[Segment]:
        return segments_in(self.summary.segments)

    def segment_tokens(self) -> int:
        return sum(segment.length for segment in self.segments)

    def finds(self, tokens: int) -> bool:
        self.ask()
        return self.segment_tokens() == tokens

    def retrieve(self) -> list[int]:
        return self._agent.retrieve(self.objects, str(self._number))

    def reasons(self) -> set[int]:
        return {item.reason for item in self.summary.shortfalls} - {pb.REASON_LAST_TOKEN}


def test_documents_are_found_anywhere_while_processes_come_and_go(shm_dir: Path, matcher: MatcherProcess) -> None:
    """CASES 57, 58, 72: the matcher and the store are killed in turn; what is there is found again each time."""
    one, two = text(1, 6 * CHUNK + 5), text(2, 5 * CHUNK)
    prompt = text(3, CHUNK) + text(4, 7) + two + text(5, 9) + one + text(6, 3)
    store = StoreProcess(shm_dir, "--matcher", matcher.target)
    with store, Agent(store) as agent:
        for name, tokens in (("one", one), ("two", two)):
            agent.put(tokens, name)
        agent.put(text(3, CHUNK))
        asking = Asking(agent, prompt)
        until(lambda: asking.finds(len(one) + len(two)))
        assert asking.summary.prefix_tokens == CHUNK
        assert [segment.document for segment in asking.segments] == ["two", "one"]
        assert [segment.query_position for segment in asking.segments] == [CHUNK + 7, CHUNK + 16 + len(two)]
        assert not any(asking.retrieve())
        matcher.kill()
        asking.ask()
        assert (asking.summary.prefix_tokens, asking.segment_tokens()) == (CHUNK, 0)
        assert asking.reasons() == {pb.REASON_MATCHER_UNAVAILABLE}
        matcher.restart()
        until(lambda: asking.finds(len(one) + len(two)))
        store.kill()
    with store, Agent(store) as agent:
        asking = Asking(agent, prompt)
        until(lambda: asking.finds(len(one) + len(two)))
        assert not any(asking.retrieve())
        scope = pb.ClearScope(document=pb.DocumentScope(tenant="default", document="one"))
        assert agent.call("Clear", scope=scope).kept_leased_chunks == 0
        until(lambda: asking.finds(len(two)))
        scores = agent.call("Score", space=agent.space, tokens=b"".join(item.to_bytes(4, "little") for item in prompt))
        assert [(item.store, item.prefix_tokens) for item in scores.stores] == [("t", CHUNK)]


def test_case_70_a_stored_document_is_found_by_the_next_lookup(shm_dir: Path, matcher: MatcherProcess) -> None:
    with StoreProcess(shm_dir, "--matcher", matcher.target) as store, Agent(store) as agent:
        agent.put(text(0, 2 * CHUNK), "warm")
        warm = Asking(agent, [1, *text(0, 2 * CHUNK), 2])
        until(lambda: warm.finds(2 * CHUNK))
        for seed in range(1, 60):
            agent.put(text(seed, 2 * CHUNK), f"d{seed}")
            assert Asking(agent, [1, 2, *text(seed, 2 * CHUNK), 3]).finds(2 * CHUNK)


def test_case_40_what_is_cleared_is_matched_no_more(shm_dir: Path, matcher: MatcherProcess) -> None:
    with StoreProcess(shm_dir, "--matcher", matcher.target) as store, Agent(store) as agent:
        agent.put(text(1, 2 * CHUNK), "d")
        asking = Asking(agent, [9, *text(1, 2 * CHUNK), 9])
        until(lambda: asking.finds(2 * CHUNK))
        agent.call("EndRequests", request_ids=["1"])
        agent.call("Clear", scope=pb.ClearScope(everything=True), force=True)
        assert asking.finds(0)
        assert pb.REASON_EVICTED not in asking.reasons()


def test_a_matcher_that_hangs_costs_no_prefix(shm_dir: Path, matcher: MatcherProcess) -> None:
    flags = ("--matcher", matcher.target, "--matcher-timeout-seconds", "0.2")
    with StoreProcess(shm_dir, *flags) as store, Agent(store) as agent:
        agent.put(text(1, CHUNK))
        agent.put(text(2, CHUNK), "d")
        asking = Asking(agent, text(1, CHUNK) + text(2, CHUNK) + [1])
        until(lambda: asking.finds(CHUNK))
        matcher.process.send_signal(signal.SIGSTOP)
        asking.ask()
        assert (asking.summary.prefix_tokens, asking.reasons()) == (CHUNK, {pb.REASON_MATCHER_UNAVAILABLE})
        matcher.process.send_signal(signal.SIGCONT)
        until(lambda: asking.finds(CHUNK))


def test_l2_outlives_the_arena_and_its_failures(shm_dir: Path) -> None:
    """CASES 29, 68, 69: Redis is away, hangs and returns; the arena works all the time."""
    tokens = text(1, 4 * CHUNK)
    with redis_server() as server:
        store = StoreProcess(shm_dir, "--redis-url", server.unix_url, "--l2-timeout-seconds", "1")
        with store, Agent(store) as agent:
            agent.put(tokens)
            until(lambda: _redis_bytes(agent) > 0)
            objects, summary = agent.lookup([*tokens, 1])
            assert (summary.l1_chunks, summary.l2_chunks) == (4, 0)
            until(lambda: _in_l2(server.unix_url) >= 4)
        store.kill()
        for path in store.arena.glob("*"):
            if path.is_file():
                path.unlink()
        with store, Agent(store) as agent:
            objects, summary = agent.lookup([*tokens, 1])
            assert (summary.prefix_tokens, summary.l2_chunks) == (4 * CHUNK, 4)
            assert not any(agent.retrieve(objects))
            agent.call("EndRequests", request_ids=["r"])
            server.freeze()
            assert agent.lookup([*tokens, 1], request="frozen")[1].prefix_tokens == 4 * CHUNK
            assert agent.lookup([*text(2, CHUNK), 1], request="other", timeout=0.5)[1].prefix_tokens == 0
            server.thaw()
            server.kill()
            agent.put(text(3, CHUNK))
            until(lambda: not _l2(agent).ready)
            assert agent.lookup([*tokens, 1], request="away")[1].prefix_tokens == 4 * CHUNK
            server.start()
            until(lambda: _l2(agent).ready)
            agent.put(text(4, CHUNK))
            until(lambda: _in_l2(server.unix_url) >= 1)


def _l2(agent: Agent) -> store_pb2.TierUsage:
    return next(tier for tier in agent.stats().tiers if tier.tier == pb.TIER_L2)


def _redis_bytes(agent: Agent) -> int:
    return _l2(agent).used_bytes


def _in_l2(url: str) -> int:
    """Keys in Redis: a header and a part for each object."""
    with redis.Redis.from_url(url) as client:
        return len(list(client.scan_iter(count=1000))) // 2


def test_a_store_that_starts_before_its_neighbours_begins_to_reuse_by_itself(shm_dir: Path) -> None:
    """Case 65."""
    target = f"unix:{shm_dir}/matcher.sock"
    with StoreProcess(shm_dir, "--matcher", target) as store, Agent(store) as agent:
        agent.put(text(1, 2 * CHUNK), "d")
        asking = Asking(agent, [9, *text(1, 2 * CHUNK), 9])
        asking.ask()
        assert asking.reasons() == {pb.REASON_MATCHER_UNAVAILABLE}
        matcher = MatcherProcess(shm_dir)
        try:
            until(lambda: asking.finds(2 * CHUNK))
        finally:
            matcher.kill()


def test_calls_without_enough_time_leave_no_lease_behind(shm_dir: Path) -> None:
    with StoreProcess(shm_dir) as store, Agent(store) as agent:
        agent.put(text(1, CHUNK))
        for number in range(20):
            with suppress(grpc.RpcError):
                agent.lookup([*text(1, CHUNK), 1], timeout=0.0005 * (1 + number))
        agent.call("EndRequests", request_ids=["r"])
        until(lambda: agent.stats().held_leases == 0)
