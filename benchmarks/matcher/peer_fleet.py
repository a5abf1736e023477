"""lmcache's fleet index: token-exact compare, arrays in. Runs in the peers' environment."""

import sys
from collections.abc import Sequence
from typing import Any

from lmcache.v1.mp_coordinator.api import BlendNamespace
from lmcache.v1.mp_coordinator.blend_index import BlendIndex

from benchmarks.matcher import data
from benchmarks.matcher.worker import Segments, Worker, serve, whole_chunks


class Fleet:
    def __init__(self) -> None:
        self._index = BlendIndex(data.CHUNK_TOKENS)
        self._namespace = BlendNamespace("model")

    def prepare_page(self, texts: Sequence[data.Text]) -> list[tuple[data.U32, bytes, int]]:
        # A short last chunk is left out: it would be refused with a log line.
        return [
            (
                text.tokens[offset : offset + data.CHUNK_TOKENS],
                (text.first_id + offset // data.CHUNK_TOKENS).to_bytes(8, "little"),
                offset,
            )
            for text in texts
            for offset in range(0, len(text.tokens) - data.CHUNK_TOKENS + 1, data.CHUNK_TOKENS)
        ]

    def register(self, prepared: list[tuple[data.U32, bytes, int]]) -> None:
        for tokens, name, offset in prepared:
            self._index.add(tokens, name, offset, self._namespace)

    def prepare_query(self, tokens: data.U32) -> data.U32:
        return tokens

    def match(self, prepared: data.U32) -> Any:
        return self._index.match(prepared, self._namespace)

    def segments(self, found: Any) -> Segments:
        return whole_chunks([one.cur_st for one in found], [int.from_bytes(one.chunk_hash, "little") for one in found])


if __name__ == "__main__":
    serve(lambda: Worker(Fleet), sys.argv)
