"""LMCache's C++ Redis connector, one batch for the whole volume. Runs in the peers' environment.

Arguments: port, bytes of the volume. Answers `put` and `get` (value_bytes, workers), after saying that it is ready.
"""

import json
import mmap
import os
import select
import sys
from typing import Any

from lmcache.lmcache_redis import LMCacheRedisClient

_SECONDS = 60


class Batches:
    def __init__(self, port: int, volume: int) -> None:
        self._port = port
        # Source and target, as ours: one shared map.
        memory = memoryview(mmap.mmap(-1, 2 * volume))
        self._source, self._target = memory[:volume], memory[volume:]
        self._source[:] = os.urandom(1 << 20) * (volume >> 20)
        self._clients: dict[int, Any] = {}

    def put(self, value_bytes: int, workers: int) -> None:
        self._client(workers).submit_batch_set(self._names(value_bytes), self._cut(self._source, value_bytes))
        self._wait(workers)

    def get(self, value_bytes: int, workers: int) -> None:
        self._client(workers).submit_batch_get(self._names(value_bytes), self._cut(self._target, value_bytes))
        self._wait(workers)

    def _client(self, workers: int) -> Any:
        if workers not in self._clients:
            self._clients[workers] = LMCacheRedisClient("127.0.0.1", self._port, workers, "", "")
        return self._clients[workers]

    def _wait(self, workers: int) -> None:
        client = self._clients[workers]
        while True:
            if not select.select([client.event_fd()], [], [], _SECONDS)[0]:
                raise TimeoutError("no answer")
            for _, worked, error, _ in client.drain_completions():
                if not worked:
                    raise RuntimeError(error)
                return

    def _names(self, value_bytes: int) -> list[str]:
        return [f"peer/{value_bytes}/{start}" for start in range(0, len(self._source), value_bytes)]

    @staticmethod
    def _cut(memory: memoryview, value_bytes: int) -> list[memoryview]:
        return [memory[start : start + value_bytes] for start in range(0, len(memory), value_bytes)]


def main() -> None:
    batches = Batches(int(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        work = {"put": batches.put, "get": batches.get}[request.pop("do")]
        work(**request)
        print(json.dumps({"done": True}), flush=True)


if __name__ == "__main__":
    main()
