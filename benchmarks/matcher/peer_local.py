"""lmcache's local matcher: 64-bit hash compare only, lists of Python integers in. Runs in the peers' environment."""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from lmcache.v1.multiprocess.modules.blend import matcher

from benchmarks.matcher import data
from benchmarks.matcher.worker import Segments, Worker, serve, whole_chunks

# At its default level it also formats one log line a call.
matcher.logger.setLevel(logging.CRITICAL)


class Local:
    def __init__(self) -> None:
        self._matcher = matcher.BlendTokenRangeMatcher(chunk_size=data.CHUNK_TOKENS)

    def prepare_page(self, texts: Sequence[data.Text]) -> list[tuple[list[int], list[bytes]]]:
        return [
            (text.tokens.tolist(), [(text.first_id + index).to_bytes(8, "little") for index in range(text.chunks)])
            for text in texts
        ]

    def register(self, prepared: list[tuple[list[int], list[bytes]]]) -> None:
        for tokens, hashes in prepared:
            self._matcher.on_new_token_hashes(tokens, hashes)

    def prepare_query(self, tokens: data.U32) -> list[int]:
        listed: list[int] = tokens.tolist()
        return listed

    def match(self, prepared: list[int]) -> Any:
        return self._matcher.match_sub_sequence(prepared)

    def segments(self, found: Any) -> Segments:
        return whole_chunks([one.cur_st for one in found], [int.from_bytes(one.hash, "little") for one in found])


if __name__ == "__main__":
    serve(lambda: Worker(Local), sys.argv)
