"""kvblend's matcher, in memory: the table alone, without log and wire."""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.matcher import data, pages
from benchmarks.matcher.worker import PAGE_CHUNKS, Segments, Worker, serve
from kvblend.v1 import matcher_pb2
from services.matcher.matching import Match, Query, match
from services.matcher.pages import decode_page, store_owner
from services.matcher.table import Table
from services.matcher.warm_up import compile_kernels

_LIMIT_BYTES = 8 << 30
_STORE = "bench"
_OWNER = store_owner(_STORE)
# Pages that are in the table before the oldest of them goes.
_LIVE_PAGES = 16


class Ours:
    def __init__(self) -> None:
        self.table = Table(_LIMIT_BYTES)
        self.position = 0

    def prepare_page(self, texts: Sequence[data.Text]) -> matcher_pb2.PublishRequest:
        return pages.page(_STORE, 1, texts)

    def register(self, prepared: matcher_pb2.PublishRequest) -> None:
        """As a replica does it: the page's columns are checked and decoded, then added."""
        self.position += 1
        for change in decode_page(prepared):
            change.apply(self.table, self.position)

    def prepare_query(self, tokens: data.U32) -> Query:
        return Query(tokens, 0, frozenset([_OWNER]), frozenset(pages.CLASSES))

    def match(self, prepared: Query) -> Match:
        with self.table.grace.reading():
            return match(self.table, self.table.spaces[pages.SPACE], prepared, _in_time)

    def segments(self, found: Match) -> Segments:
        """By chunk: what each contributes stands behind what the one before it does."""
        cover = found.cover
        lengths = cover.lengths.astype(np.int64)
        firsts = np.cumsum(cover.counts) - cover.counts
        ends = np.cumsum(lengths)
        # Where a chunk's part begins within its segment.
        within = ends - lengths - np.repeat((ends - lengths)[firsts], cover.counts)
        skips = np.zeros(len(lengths), dtype=np.int64)
        skips[firsts] = cover.skips
        ids = self.table.columns.names[cover.entries, 3].astype(np.int64)
        return Segments(np.repeat(cover.starts, cover.counts) + within, ids, skips, lengths)


def _in_time() -> bool:
    return False


class OursWorker(Worker):
    engine: Ours

    def __init__(self) -> None:
        compile_kernels()
        super().__init__(Ours)
        self._cycled: list[matcher_pb2.PublishRequest] = []

    def table_bytes(self) -> dict[str, Any]:
        return {"table_bytes": self.engine.table.size}

    def class_steps(
        self, collections: list[tuple[int, int]], count: int, tokens: int, coverage: int, numbers: list[int]
    ) -> dict[str, Any]:
        """Milliseconds of a match with none of the collections of short documents, with the first, with two, ...

        They are added one after another and then removed one after another, with new queries at every step, so each
        state is met twice and a drift of the machine's speed cancels. collections: (length, first id) of each.
        """
        adding = [pages.added(list(data.collection(length, 0, count, first_id))) for length, first_id in collections]
        each = len(numbers) // (2 * len(adding) + 2)
        asked = [numbers[first : first + each] for first in range(0, len(numbers), each)]
        steps = [self._median_ms(tokens, coverage, asked.pop())]
        for added in adding:
            self.engine.register(pages.page_of(_STORE, 1, matcher_pb2.ChangeBatch(added=added)))
            steps.append(self._median_ms(tokens, coverage, asked.pop()))
        back = [self._median_ms(tokens, coverage, asked.pop())]
        for added in reversed(adding):
            self.engine.register(pages.page_of(_STORE, 1, pages.removing(added)))
            back.append(self._median_ms(tokens, coverage, asked.pop()))
        return {"ms": [(there + again) / 2 for there, again in zip(steps, reversed(back), strict=True)]}

    def _median_ms(self, tokens: int, coverage: int, numbers: list[int]) -> float:
        return float(statistics.median(self.match(tokens, coverage, numbers)["ms"]))

    def cycle(self, first: int, count: int, drain: bool) -> dict[str, Any]:
        """Registers pages of chunks that were never there, and removes them a few pages later; all, with `drain`.

        One chunk in four is short, of any length, so that places of all sizes are taken and given back.
        """
        seconds = 0.0
        for start in range(first, first + count, PAGE_CHUNKS):
            added = _throwaway(start, min(PAGE_CHUNKS, first + count - start))
            page = pages.page_of(_STORE, 1, matcher_pb2.ChangeBatch(added=added))
            self._cycled.append(pages.page_of(_STORE, 1, pages.removing(added)))
            began = time.perf_counter()
            self.engine.register(page)
            if len(self._cycled) > _LIVE_PAGES:
                self.engine.register(self._cycled.pop(0))
            seconds += time.perf_counter() - began
        while drain and self._cycled:
            self.engine.register(self._cycled.pop(0))
        return {"seconds": seconds}


def _throwaway(first: int, count: int) -> matcher_pb2.ChunksAdded:
    """Chunks `first`, ... of texts that no query has; made in a hurry, but each one different."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    draws = data.mixed(numbers.astype(np.uint64))
    short = draws % np.uint64(4) == 0
    lengths = np.where(short, 16 + (draws >> np.uint64(8)) % np.uint64(240), data.CHUNK_TOKENS).astype("<u4")
    starts = np.cumsum(lengths) - lengths
    tokens = np.full(int(lengths.sum()), data.VOCABULARY, dtype="<u4")
    tokens[starts] = numbers % data.VOCABULARY
    tokens[starts + 1] = numbers // data.VOCABULARY
    page = pages.added([data.Text(0, np.zeros(data.CHUNK_TOKENS * count, dtype=np.uint32))])
    # Behind every id of the library and of the short documents.
    names = pages.names(numbers + (1 << 40)).astype("<u8")
    page.chain_hashes, page.lengths, page.tokens = names.tobytes(), lengths.tobytes(), tokens.tobytes()
    page.previous_hashes = np.concatenate([np.zeros((1, 4), dtype="<u8"), names[:-1]]).tobytes()
    return page


if __name__ == "__main__":
    serve(OursWorker, sys.argv)
