"""An engine as a process: it stores texts through its agent, then looks prompts up. Only the calls are timed."""

import itertools
import sys
import time
from typing import Any

import numpy as np

from benchmarks.matcher import data
from benchmarks.matcher.worker import serve
from kvblend import KvblendClient
from kvblend.layouts import KvShape, build_layout
from kvblend.memory import SharedBuffer
from kvblend.results import LookupResult
from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.channels import open_channel

# KV of a token has few bytes, so that many chunks fit into a small arena: a lookup moves none of them.
LAYERS, HEADS, HEAD_SIZE = 1, 2, 8
_DTYPE = pb.DTYPE_BFLOAT16
_MOST_TOKENS = 1 << 17
_CALL_SECONDS = 60.0
_READY_SECONDS = 30.0


def model_space() -> pb.ModelSpace:
    rope = pb.Rope(style=pb.ROPE_STYLE_NONE)
    group = pb.LayerGroup(
        attention=pb.ATTENTION_KIND_FULL, layers=LAYERS, kv_heads=HEADS, head_size=HEAD_SIZE, rope=rope
    )
    return pb.ModelSpace(
        weights_fingerprint=b"bench lookup, no weights at all.",
        kv_dtype=_DTYPE,
        groups=[group],
        chunk_tokens=data.CHUNK_TOKENS,
        display_name="bench",
    )


class Engine:
    def __init__(self, name: str, agent: str, no_op: str) -> None:
        """`agent`, `no_op`: gRPC targets."""
        shape = KvShape.contiguous(LAYERS, HEADS, HEAD_SIZE, _MOST_TOKENS, _DTYPE)
        self._memory = SharedBuffer(_MOST_TOKENS * 2 * LAYERS * HEADS * HEAD_SIZE * 2)
        self._memory.array[:] = np.arange(self._memory.nbytes, dtype=np.uint32).astype(np.uint8)
        self._client = KvblendClient(agent, name)
        self._no_op: Any = matcher_pb2_grpc.MatcherServiceStub(open_channel(no_op))  # type: ignore[no-untyped-call]
        self._prompts: list[data.U32] = []
        self._numbers = itertools.count()
        give_up_at = time.monotonic() + _READY_SECONDS
        layout = build_layout("contiguous", shape)
        while not self._client.register_kv_cache(model_space(), [self._memory.handle()], layout):
            if time.monotonic() > give_up_at:
                raise RuntimeError("the agent takes no registration")
            time.sleep(0.05)

    def _store(self, tokens: data.U32, kind: str, document: str = "") -> None:
        stored = self._client.store(tokens, "store", kind=kind, document=document, timeout=_CALL_SECONDS)
        outcomes = {chunk.outcome for chunk in stored.chunks}
        if not stored or not outcomes <= {"STORED", "PRESENT"}:
            raise RuntimeError(f"not everything was stored: {stored.reason} {stored.detail} {outcomes}")

    def store_library(self, first_chunk: int, stop_chunk: int) -> dict[str, Any]:
        """Documents, each under its name: sources of segments."""
        for text in data.library(first_chunk, stop_chunk):
            self._store(text.tokens, "document", f"document-{text.first_id}")
        return {}

    def store_prompts(self, tokens: int, numbers: list[int]) -> dict[str, Any]:
        """Prompts of unknown text, from their first token on."""
        for number in numbers:
            self._store(data.query(tokens, 0, 0, number).tokens, "prompt")
        return {}

    def prepare(self, tokens: int, coverage: int, table: int, numbers: list[int]) -> dict[str, Any]:
        """The prompts of `look_up` and `no_op`: `coverage` percent of each are chunks of the library."""
        self._prompts = [data.query(tokens, coverage, table, number).tokens for number in numbers]
        return {}

    def look_up(self, count: int) -> dict[str, Any]:
        """One prompt after the other, again and again: milliseconds of each lookup and of its end; what was found."""
        lookups, ends, found = [], [], []
        for prompt in itertools.islice(itertools.cycle(self._prompts), count):
            name = f"r{next(self._numbers)}"
            start = time.perf_counter()
            answer = self._client.lookup(prompt, name, timeout=_CALL_SECONDS)
            middle = time.perf_counter()
            ended = self._client.end_session(name)
            stop = time.perf_counter()
            if not answer or not ended:
                raise RuntimeError(f"a lookup failed: {answer.reason} {answer.detail} {ended.reason}")
            lookups.append(1e3 * (middle - start))
            ends.append(1e3 * (stop - middle))
            found.append(answer)
        return {"lookup_ms": lookups, "end_ms": ends, "found": _found(found)}

    def no_op(self, count: int) -> dict[str, Any]:
        """Round trips of the same prompts to a server that does nothing; milliseconds."""
        requests = [matcher_pb2.MatchRequest(tokens=prompt.tobytes()) for prompt in self._prompts]
        milliseconds = []
        for request in itertools.islice(itertools.cycle(requests), count):
            start = time.perf_counter()
            self._no_op.Match(request, timeout=_CALL_SECONDS)
            milliseconds.append(1e3 * (time.perf_counter() - start))
        return {"ms": milliseconds}


def _found(answers: list[LookupResult]) -> dict[str, Any]:
    """Of the answer with the least: tokens and segments."""
    least = min(answers, key=lambda answer: answer.covered_tokens)
    return {
        "prefix_tokens": least.prefix_tokens,
        "covered_tokens": least.covered_tokens,
        "segments": len(least.segments),
        "shortfalls": {shortfall.reason: shortfall.tokens for shortfall in least.shortfalls},
    }


if __name__ == "__main__":
    serve(lambda: Engine(*sys.argv[2:]), sys.argv)
