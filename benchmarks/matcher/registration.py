"""Registering chunks: into the tables of all contestants, and through the service until the log has them."""

import statistics
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.common.figures import latencies
from benchmarks.common.processes import Piped, at_once
from benchmarks.common.screen import Screen
from benchmarks.matcher.matchers import folder, matcher, redis
from benchmarks.matcher.plan import Plan
from benchmarks.matcher.processes import PEERS, client_processes
from benchmarks.matcher.worker import PAGE_CHUNKS

# Chunks that one contestant registers before it is another one's turn.
_TURN = 20 * PAGE_CHUNKS
# Redis writes its append-only file before it answers, or (its default) within a second.
_LOGS: dict[str, list[str]] = {
    "sqlite": [],
    "redis, fsync every second": ["--appendfsync", "everysec"],
    "redis, fsync always": ["--appendfsync", "always"],
}

Row = dict[str, Any]


class FilledTables:
    """The contestants' tables, grown in turns; every growth is a row of chunks per second."""

    def __init__(self, workers: dict[str, Piped], screen: Screen) -> None:
        self._workers = workers
        self._screen = screen
        self._empty = {name: worker.ask("memory")["resident"] for name, worker in workers.items()}
        self._size = 0
        self.rows: list[Row] = []

    def grow(self, size: int) -> None:
        seconds: dict[str, list[float]] = {name: [] for name in self._workers}
        with self._screen.working(f"registration: {size:,} chunks"):
            for stop in (*range(self._size + _TURN, size, _TURN), size):
                for name, worker in self._workers.items():
                    seconds[name] += worker.ask("fill", stop=stop)["seconds"]
        row: Row = {"table": size}
        for name, pages in seconds.items():
            row[f"{name}_chunks_s"] = (size - self._size) / sum(pages)
            row[f"{name}_median_page_chunks_s"] = PAGE_CHUNKS / statistics.median(pages)
            row[f"{name}_worst_page_ms"] = max(pages) * 1e3
        for peer in PEERS:
            # Of the median page; and of all the time that it took, pauses and the memory's first use with it.
            for ratio, rate in (("ratio", "median_page_chunks_s"), ("whole_ratio", "chunks_s")):
                row[f"{ratio}_{peer}"] = row[f"ours_{rate}"] / row[f"{peer}_{rate}"] if peer in seconds else None
        self._size = size
        self.rows.append(row)
        rates = "   ".join(
            f"{name} {row[f'{name}_median_page_chunks_s']:,.0f} ({row[f'{name}_chunks_s']:,.0f})" for name in seconds
        )
        self._screen.line(f"registration to {size:,}, chunks/s of the median page (of all time): {rates}")

    def bytes_per_chunk(self) -> Row:
        return {
            name: (worker.ask("memory")["resident"] - self._empty[name]) / self._size
            for name, worker in self._workers.items()
        }


def durable(plan: Plan, screen: Screen) -> Row:
    """Section `durable`: pages of a store, each sent when the one before has been acknowledged as in the log."""
    rows = []
    for kind, options in _LOGS.items():
        for writers in (1, 4):
            with screen.working(f"durable registration: {kind}, {writers} stores"):
                row = {"log": kind, "writers": writers, **_published(plan, options, writers)}
            screen.line(
                f"{kind:>28}, {writers} stores: {row['chunks_s']:>9,.0f} chunks/s, "
                f"a page in {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms"
            )
            rows.append(row)
    return {"rows": rows}


def _published(plan: Plan, options: list[str], writers: int) -> Row:
    count = plan.pages // writers
    with ExitStack() as stack:
        where = stack.enter_context(folder())
        log = stack.enter_context(redis(where, *options)) if options else f"sqlite:{where}/log.db"
        process = stack.enter_context(matcher(where, "m", log))
        clients = stack.enter_context(client_processes(writers))
        for index, client in enumerate(clients):
            client.ask("prepare_pages", store=f"s{index}", first_chunk=index * count * PAGE_CHUNKS, count=count)
        start = time.perf_counter()
        answers = at_once(clients, "run", target=process.unix, method="Publish", first=0, count=count)
        seconds = time.perf_counter() - start
    milliseconds = [one for answer in answers for one in answer["ms"]]
    return {"chunks_s": writers * count * PAGE_CHUNKS / seconds, **latencies(milliseconds)}
