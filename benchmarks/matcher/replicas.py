"""Replicas behind one log: CPU time of a match, and how soon a registration is visible on all of them."""

import statistics
import threading
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.common.figures import latencies
from benchmarks.common.processes import Piped, at_once, cores
from benchmarks.common.screen import Screen
from benchmarks.matcher import data, pages
from benchmarks.matcher.matchers import Matcher, folder, matcher, publish_library, redis
from benchmarks.matcher.plan import Plan
from benchmarks.matcher.processes import client_processes

_TOKENS = 1 << 17
_ROUNDS = 12
# Seconds from match to match of one client.
_ASK_EVERY = 0.01
_STORE = "bench"
_CALL_SECONDS = 60.0
# Documents that the store publishes while others ask: one each so many seconds.
_PUBLISH_EVERY = 0.05
# What each replica is asked meanwhile.
_LOAD_TOKENS = 1 << 15
_LOAD_EVERY = 0.005

Row = dict[str, Any]


def run(plan: Plan, screen: Screen) -> Row:
    """Section `replicas`: two matchers over one Redis."""
    with ExitStack() as stack:
        where = stack.enter_context(folder())
        chunks = plan.replica_chunks
        with screen.working(f"replicas: {chunks:,} chunks on two replicas"):
            log = stack.enter_context(redis(where))
            pair = [stack.enter_context(matcher(where, name, log)) for name in ("a", "b")]
            publish_library(pair[0], _STORE, chunks)
            _wait_for(pair[1], chunks)
            clients = stack.enter_context(client_processes(8 if len(cores()) >= 8 else 2))
        return {
            "chunks": chunks,
            "cpu": _cpu(plan, screen, pair, clients, chunks),
            "throughput": _throughput(plan, screen, pair, clients),
            "visibility": _visibility(plan, screen, pair, clients[:2], chunks),
        }


def _wait_for(process: Matcher, sequence: int) -> None:
    query = data.query(1024, 0, sequence, 0)
    process.stub.Match(pages.ask(_STORE, query.tokens, sequence), timeout=_CALL_SECONDS)


def _cpu(plan: Plan, screen: Screen, pair: list[Matcher], clients: list[Piped], chunks: int) -> Row:
    """CPU time of a match when clients balance over two replicas, and when one of them serves.

    Each replica has the same load in both: a process that is asked more often costs less a match, as caches
    and threads stay awake. Rounds are compared one by one: whatever else the machine does changes.
    """
    for index, client in enumerate(clients):
        numbers = list(range(1 + index * plan.cpu_calls, 1 + (index + 1) * plan.cpu_calls))
        client.ask("prepare_queries", store=_STORE, tokens=_TOKENS, coverage=50, table=chunks, numbers=numbers)
    setups = {"a": (clients[:1], pair[0].tcp), "b": (clients[:1], pair[1].tcp), "two": (clients[:2], _both(pair))}
    cpu: dict[str, list[float]] = {name: [] for name in setups}
    with screen.working("replicas: CPU time of a match"):
        for turn in range(_ROUNDS + 1):
            for name, (asking, target) in setups.items():
                before = sum(process.cpu_seconds for process in pair)
                at_once(asking, "run", target=target, method="Match", first=0, count=plan.cpu_calls, every=_ASK_EVERY)
                used = sum(process.cpu_seconds for process in pair) - before
                # The first round opens connections.
                cpu[name] += [used * 1e3 / (len(asking) * plan.cpu_calls)] * (turn > 0)
    row: Row = {
        "tokens": _TOKENS,
        "matches_s_for_each_replica": 1 / _ASK_EVERY,
        "cpu_ms_one": statistics.median(cpu["a"] + cpu["b"]),
        "cpu_ms_two": statistics.median(cpu["two"]),
        "cpu_two_over_one": statistics.median(
            two / statistics.mean((a, b)) for a, b, two in zip(*cpu.values(), strict=True)
        ),
    }
    screen.line(
        f"CPU of a match: one replica {row['cpu_ms_one']:.2f} ms, two {row['cpu_ms_two']:.2f} ms; "
        f"two over one {row['cpu_two_over_one']:.2f}"
    )
    return row


def _throughput(plan: Plan, screen: Screen, pair: list[Matcher], clients: list[Piped]) -> Row:
    """Matches a second that clients get who ask one after another, from one replica and from two, and their CPU time.

    Here two replicas have half the load each, and share this machine's caches: a match costs more than in `_cpu`.
    """
    rate: dict[str, list[float]] = {"one": [], "two": []}
    cpu: dict[str, list[float]] = {"one": [], "two": []}
    with screen.working("replicas: throughput"):
        for turn in range(_ROUNDS + 1):
            for name, target in (("one", pair[0].tcp), ("two", _both(pair))):
                before = sum(process.cpu_seconds for process in pair)
                start = time.perf_counter()
                at_once(clients, "run", target=target, method="Match", first=0, count=plan.cpu_calls)
                seconds = time.perf_counter() - start
                used = sum(process.cpu_seconds for process in pair) - before
                matches = len(clients) * plan.cpu_calls
                rate[name] += [matches / seconds] * (turn > 0)
                cpu[name] += [used * 1e3 / matches] * (turn > 0)
    row: Row = {"clients": len(clients), "cores": len(cores())}
    row |= {f"matches_s_{name}": statistics.median(values) for name, values in rate.items()}
    row["two_over_one"] = row["matches_s_two"] / row["matches_s_one"]
    row["cpu_two_over_one"] = statistics.median(two / one for one, two in zip(*cpu.values(), strict=True))
    screen.line(
        f"throughput of two replicas over one, on {len(cores())} cores: {row['two_over_one']:.2f}; "
        f"CPU of a match then {row['cpu_two_over_one']:.2f}"
    )
    return row


def _both(pair: list[Matcher]) -> str:
    """A target as DNS would give it: one name, several addresses."""
    return "ipv4:" + ",".join(process.tcp for process in pair)


def _visibility(plan: Plan, screen: Screen, pair: list[Matcher], clients: list[Piped], chunks: int) -> Row:
    """From sending a document's page until every replica has answered with it, while clients ask all the time."""
    count = plan.visible_documents
    for index, client in enumerate(clients):
        numbers = list(range(1000 + 64 * index, 1064 + 64 * index))
        client.ask("prepare_queries", store=_STORE, tokens=_LOAD_TOKENS, coverage=50, table=chunks, numbers=numbers)
    documents = list(data.library(chunks, chunks + count * data.DOCUMENT_CHUNKS))
    for process, client in zip(pair, clients, strict=True):
        seconds = count * _PUBLISH_EVERY + 1
        client.send("run_for", target=process.unix, method="Match", seconds=seconds, every=_LOAD_EVERY)
    milliseconds = []
    with screen.working("replicas: a registration becomes visible"):
        for index, text in enumerate(documents):
            next_at = time.perf_counter() + _PUBLISH_EVERY
            milliseconds.append(_seen_after(pair, index, text, chunks + 1 + index * data.DOCUMENT_CHUNKS))
            time.sleep(max(0.0, next_at - time.perf_counter()))
        load = [client.receive() for client in clients]
    row = {**latencies(milliseconds), "worst_ms": max(milliseconds), "load_tokens": _LOAD_TOKENS}
    row["load_matches_s"] = sum(len(one["ms"]) for one in load) / (count * _PUBLISH_EVERY + 1)
    screen.line(
        f"visible on both replicas: p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms "
        f"beside {row['load_matches_s']:.0f} matches/s"
    )
    return row


def _seen_after(pair: list[Matcher], index: int, text: data.Text, first_sequence: int) -> float:
    """Milliseconds. Pages go to the replicas in turn, as a store's channel balances them."""
    page = pages.page(_STORE, first_sequence, [text])
    question = pages.ask(_STORE, text.tokens, first_sequence + text.chunks - 1)
    missing = []

    def look(process: Matcher) -> None:
        found = process.stub.Match(question, timeout=_CALL_SECONDS).segments.lengths
        if sum(memoryview(found).cast("I")) != len(text.tokens):
            missing.append(process.unix)

    start = time.perf_counter()
    pair[index % len(pair)].stub.Publish(page, timeout=_CALL_SECONDS)
    looks = [threading.Thread(target=look, args=(process,)) for process in pair]
    for thread in looks:
        thread.start()
    for thread in looks:
        thread.join()
    if missing:
        raise RuntimeError(f"a published document is not found at {missing}")
    return (time.perf_counter() - start) * 1e3
