"""A client of matchers as a process: its requests are made before, only the calls are timed."""

import sys
import time
from typing import Any

from benchmarks.matcher import data, pages
from benchmarks.matcher.worker import PAGE_CHUNKS, serve
from kvblend.v1 import matcher_pb2_grpc
from services.common.channels import open_channel

_CALL_SECONDS = 60.0


class Client:
    def __init__(self) -> None:
        self._stubs: dict[str, Any] = {}
        self._requests: list[Any] = []

    def _stub(self, target: str) -> Any:
        if target not in self._stubs:
            stub: Any = matcher_pb2_grpc.MatcherServiceStub(open_channel(target))  # type: ignore[no-untyped-call]
            self._stubs[target] = stub
        return self._stubs[target]

    def prepare_queries(self, store: str, tokens: int, coverage: int, table: int, numbers: list[int]) -> dict[str, Any]:
        self._requests = [pages.ask(store, data.query(tokens, coverage, table, number).tokens) for number in numbers]
        return {}

    def prepare_pages(self, store: str, first_chunk: int, count: int) -> dict[str, Any]:
        """Pages of whole documents; the store's stream begins with the first of them."""
        self._requests = [
            pages.page(store, 1 + index * PAGE_CHUNKS, list(data.library(first, first + PAGE_CHUNKS)))
            for index in range(count)
            for first in [first_chunk + index * PAGE_CHUNKS]
        ]
        return {}

    def run(self, target: str, method: str, first: int, count: int, every: float = 0.0) -> dict[str, Any]:
        """Calls with the prepared requests [first, first + count), one after another; milliseconds of each.

        `every`: seconds from the beginning of one to that of the next, if it has ended by then.
        """
        call = getattr(self._stub(target), method)
        milliseconds = []
        for request in self._requests[first : first + count]:
            start = time.perf_counter()
            call(request, timeout=_CALL_SECONDS)
            milliseconds.append((time.perf_counter() - start) * 1e3)
            time.sleep(max(0.0, start + every - time.perf_counter()))
        return {"ms": milliseconds}

    def run_for(self, target: str, method: str, seconds: float, every: float) -> dict[str, Any]:
        """As `run`, with all prepared requests, again and again, for so many seconds."""
        milliseconds: list[float] = []
        give_up = time.perf_counter() + seconds
        while time.perf_counter() < give_up:
            at = len(milliseconds) % len(self._requests)
            milliseconds += self.run(target, method, at, 1, every)["ms"]
        return {"ms": milliseconds}


if __name__ == "__main__":
    serve(Client, sys.argv)
