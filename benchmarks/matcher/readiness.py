"""A matcher with a large table is killed: how long until it is ready again, with the same matches."""

import time
from contextlib import ExitStack
from typing import Any

from benchmarks.common.screen import Screen
from benchmarks.matcher import data, pages
from benchmarks.matcher.matchers import Matcher, folder, matcher, publish_library
from benchmarks.matcher.plan import Plan
from kvblend.v1 import matcher_pb2

_STORE = "bench"
_QUERIES = 16
_TOKENS = 1 << 17
_CALL_SECONDS = 60.0
_KILLS = 3

Row = dict[str, Any]


def run(plan: Plan, screen: Screen) -> Row:
    """Section `readiness`: SQLite log, kill -9."""
    chunks = plan.ready_chunks
    rows = []
    with ExitStack() as stack:
        where = stack.enter_context(folder())
        process = stack.enter_context(matcher(where, "m", f"sqlite:{where}/log.db"))
        with screen.working(f"readiness: {chunks:,} chunks through the service"):
            publish_library(process, _STORE, chunks)
            before = _matches(process, chunks)
        for _ in range(_KILLS):
            with screen.working("readiness: killed, coming back"):
                process.kill()
                start = time.perf_counter()
                process.start()
                process.wait_until_ready()
                seconds = time.perf_counter() - start
                log = process.stub.GetMatcherStats(matcher_pb2.GetMatcherStatsRequest(), timeout=_CALL_SECONDS).log
                same = _matches(process, chunks) == before
            rows.append({"seconds": seconds, "same_matches": same, "snapshot_position": log.snapshot_position})
            screen.line(f"ready {seconds:.1f} s after kill -9, {'the same' if same else 'OTHER'} matches")
    return {"chunks": chunks, "rows": rows}


def _matches(process: Matcher, chunks: int) -> list[bytes]:
    """Answers as they come, but for what changes with time."""
    answers = []
    for number in range(1, _QUERIES + 1):
        query = data.query(_TOKENS, (50, 100)[number % 2], chunks, number)
        answer = process.stub.Match(pages.ask(_STORE, query.tokens), timeout=_CALL_SECONDS)
        answers.append(answer.segments.SerializeToString(deterministic=True))
    return answers
