"""A client of the store as a process: calls without bytes, one after another, for a while."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.matcher.worker import serve
from benchmarks.store.client import BenchClient, fresh_tokens, places_of

# A request of 2,048 tokens.
_CHUNKS = 8


class ControlClient:
    def __init__(self) -> None:
        self._client: BenchClient | None = None

    def open(self, target: str, directory: str) -> dict[str, Any]:
        self._client = BenchClient(target, Path(directory), 1)
        return {}

    def run_for(self, seconds: float) -> dict[str, Any]:
        """Stores, looks up and copies nothing; milliseconds of each call by method."""
        client = self._client
        assert client is not None
        milliseconds: dict[str, list[float]] = {}

        def timed(call: Callable[..., Any], method: str, *arguments: Any) -> Any:
            start = time.perf_counter()
            answer = call(*arguments)
            milliseconds.setdefault(method, []).append((time.perf_counter() - start) * 1e3)
            return answer

        give_up_at = time.perf_counter() + seconds
        while time.perf_counter() < give_up_at:
            tokens = fresh_tokens(_CHUNKS)
            reserved = timed(client.reserve, "Reserve", tokens)
            places = places_of(reserved)
            timed(client.commit, "Commit", reserved.reservation_id, places, [1] * len(places))
            key = timed(client.lookup, "Lookup", tokens)
            timed(client.begin, "BeginCopy", key, places)
            timed(client.end, "EndCopy", key, places)
        return {"ms": milliseconds}


if __name__ == "__main__":
    serve(ControlClient, sys.argv)
