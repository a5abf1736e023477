"""What all three contestants do alike: fill, match, check, in one process on one core, asked through pipes.

A contestant is an `Engine`; everything that is timed is one call of it, on input of the form that its users have.
Needs NumPy alone, as the peers' workers run inside their own environment.
"""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.matcher import data

# Chunks that arrive together: what the matcher's pages hold.
PAGE_CHUNKS = 512
# Enough for tables to grow, so that this is compiled too.
_WARM_UP_CHUNKS = 8 * PAGE_CHUNKS


class Segments(NamedTuple):
    """What a match found, piece by piece, [n] each: tokens [skips, skips + lengths) of chunk `ids` at `positions`."""

    positions: data.I64
    ids: data.I64
    skips: data.I64
    lengths: data.I64


class Engine(Protocol):
    """One matcher. `prepared` and `found` are its own; only `register` and `match` are timed."""

    def prepare_page(self, texts: Sequence[data.Text]) -> Any: ...

    def register(self, prepared: Any) -> None: ...

    def prepare_query(self, tokens: data.U32) -> Any: ...

    def match(self, prepared: Any) -> Any: ...

    def segments(self, found: Any) -> Segments: ...


def whole_chunks(positions: Sequence[int], ids: Sequence[int]) -> Segments:
    """Segments of a matcher that knows nothing but whole chunks."""
    count = len(ids)
    lengths = np.full(count, data.CHUNK_TOKENS, dtype=np.int64)
    return Segments(np.array(positions, np.int64), np.array(ids, np.int64), np.zeros(count, np.int64), lengths)


class Worker:
    """Answers one command after another."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make = make_engine
        self.engine = make_engine()
        self.chunks = 0
        self.collected: dict[int, int] = {}
        self._warm_up()
        # What the warm-up left behind is not for the first page to clear away.
        gc.collect()

    def _warm_up(self) -> None:
        """Compiles and imports what is made at the first call, on an engine that is thrown away."""
        engine = self._make()
        for first in range(0, _WARM_UP_CHUNKS, PAGE_CHUNKS):
            engine.register(engine.prepare_page(list(data.library(first, first + PAGE_CHUNKS))))
        for coverage in (0, 50, 100):
            asked = data.query(8192, coverage, _WARM_UP_CHUNKS, coverage)
            engine.segments(engine.match(engine.prepare_query(asked.tokens)))

    def fill(self, stop: int) -> dict[str, Any]:
        """Library chunks up to `stop`, page by page: the seconds of each page."""
        seconds = []
        for first in range(self.chunks, stop, PAGE_CHUNKS):
            prepared = self.engine.prepare_page(list(data.library(first, min(first + PAGE_CHUNKS, stop))))
            start = time.perf_counter()
            self.engine.register(prepared)
            seconds.append(time.perf_counter() - start)
        filled, self.chunks = stop - self.chunks, stop
        return {"chunks": filled, "seconds": seconds}

    def memory(self) -> dict[str, Any]:
        """Bytes of this process that are in memory."""
        with open("/proc/self/statm") as file:
            return {"resident": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}

    def grow_collection(self, length: int, count: int, first_id: int) -> dict[str, Any]:
        """Up to `count` documents of one length, whose chunks the library does not have."""
        done = self.collected.get(length, 0)
        chunks = -(-length // data.CHUNK_TOKENS)
        texts = list(data.collection(length, done, count - done, first_id + done * chunks))
        self.engine.register(self.engine.prepare_page(texts))
        self.collected[length] = count
        return {"documents": count - done}

    def match(self, tokens: int, coverage: int, numbers: list[int]) -> dict[str, Any]:
        """Milliseconds of each query; what was found of what was planted, and what was found but is not there.

        The first query only brings this process back into the caches; it is not reported.
        """
        milliseconds = []
        planted = covered = false = 0
        for number in numbers:
            asked = data.query(tokens, coverage, self.chunks, number)
            prepared = self.engine.prepare_query(asked.tokens)
            start = time.perf_counter()
            found = self.engine.match(prepared)
            milliseconds.append((time.perf_counter() - start) * 1e3)
            segments = self.engine.segments(found)
            hit = covered_tokens(tokens, segments)
            planted += len(asked.chunks) * data.CHUNK_TOKENS
            covered += int(hit[asked.positions[:, None] + np.arange(data.CHUNK_TOKENS)].sum())
            false += false_pieces(asked.tokens, segments)
        return {"ms": milliseconds[1:], "planted": planted, "covered": covered, "false_matches": false}

    def threads(self, tokens: int, coverage: int, numbers: list[int], cores: list[int]) -> dict[str, Any]:
        """Queries a second by one thread on one core, then by two threads on two cores.

        `waited`: the largest share of its time for which a thread could run, but something else had the core.
        """
        prepared = [
            self.engine.prepare_query(data.query(tokens, coverage, self.chunks, number).tokens) for number in numbers
        ]
        waited: list[float] = []

        def run() -> None:
            start, before = time.perf_counter(), _waited_seconds()
            for one in prepared:
                self.engine.match(one)
            waited.append((_waited_seconds() - before) / (time.perf_counter() - start))

        run()
        alone = self._rate(run, 1, len(prepared))
        own = os.sched_getaffinity(0)
        # Threads begin with the affinity of the one that starts them.
        os.sched_setaffinity(0, cores)
        together = self._rate(run, 2, 2 * len(prepared))
        os.sched_setaffinity(0, own)
        return {"one": alone, "two": together, "waited": max(waited[1:])}

    @staticmethod
    def _rate(run: Callable[[], None], threads: int, queries: int) -> float:
        started = [threading.Thread(target=run) for _ in range(threads)]
        start = time.perf_counter()
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        return queries / (time.perf_counter() - start)

    def documents(self, lengths: list[int], count: int, number: int) -> dict[str, Any]:
        """Share of tokens found in all documents of a fresh table, put together in a random order.

        `count` documents of each length.
        """
        engine = self._make()
        texts: list[data.Text] = []
        for length in lengths:
            first_id = sum(text.chunks for text in texts)
            texts += data.collection(length, 0, count, first_id)
        engine.register(engine.prepare_page(texts))
        tokens = np.concatenate([texts[index].tokens for index in data.shuffled(len(texts), number)])
        found = engine.match(engine.prepare_query(tokens))
        return {"tokens": len(tokens), "covered": int(covered_tokens(len(tokens), engine.segments(found)).sum())}


def _waited_seconds() -> float:
    """For which this thread has been ready to run while its core was taken."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


def covered_tokens(count: int, segments: Segments) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of `count` tokens some segment covers."""
    changes = np.zeros(count + 1, dtype=np.int64)
    np.add.at(changes, segments.positions, 1)
    np.add.at(changes, segments.positions + segments.lengths, -1)
    covered: np.ndarray[Any, np.dtype[np.bool_]] = np.cumsum(changes[:count]) > 0
    return covered


def false_pieces(tokens: data.U32, segments: Segments) -> int:
    """Pieces of library chunks that are not, token by token, what stands in the query."""
    if not len(segments.ids):
        return 0
    ends = np.cumsum(segments.lengths)
    within = np.arange(ends[-1]) - np.repeat(ends - segments.lengths, segments.lengths)
    there = tokens[np.repeat(segments.positions, segments.lengths) + within]
    origin = segments.ids * data.CHUNK_TOKENS + segments.skips
    stored = data.library_tokens(np.repeat(origin, segments.lengths) + within)
    piece = np.repeat(np.arange(len(ends)), segments.lengths)
    return len(np.unique(piece[there != stored]))


def serve(make_worker: Callable[[], object], argv: Sequence[str]) -> None:
    """Answers JSON lines on stdin, {"do": method of the worker, ...}, until it is closed.

    argv: the cores to stay on, as 0,1.
    """
    os.sched_setaffinity(0, {int(core) for core in argv[1].split(",")})
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever libraries print must not stand between answers.
    os.dup2(2, 1)
    worker = make_worker()
    print(json.dumps({}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers)
