"""Section `lookup`: how long an engine waits for a lookup and for its end, and where that time goes."""

import time
from typing import Any

from benchmarks.common.figures import latencies
from benchmarks.common.processes import Piped, at_once
from benchmarks.common.screen import Screen
from benchmarks.lookup.engine import HEAD_SIZE, HEADS, LAYERS
from benchmarks.lookup.plan import COVERAGE, FULL, PREFIX, PROMPTS, QUICK, Plan
from benchmarks.lookup.services import Services, services
from benchmarks.matcher import data

# Documents that one engine stores at a time.
_STEP_CHUNKS = 2048
_WARM_UP_CALLS = 8
_GONE_SECONDS = 5.0
# Numbers of prefix prompts; apart from those of the others.
_PREFIX_NUMBER = 1000

Row = dict[str, Any]


def run(quick: bool, screen: Screen) -> Row:
    plan = QUICK if quick else FULL
    rows = []
    with services(plan) as running:
        _fill(plan, running, screen)
        for tokens in plan.sizes:
            for prompt in PROMPTS:
                for count in plan.engines:
                    with screen.working(f"{tokens:,} tokens, {prompt}, {count} engines"):
                        rows.append(_row(plan, running, tokens, prompt, count))
                    screen.line(_words(rows[-1]))
    return {
        "quick": plan.quick,
        "chunks": plan.stored_chunks,
        "chunk_tokens": data.CHUNK_TOKENS,
        "kv_of_a_token": {"layers": LAYERS, "heads": HEADS, "head_size": HEAD_SIZE, "dtype": "bfloat16"},
        "rows": rows,
    }


def _fill(plan: Plan, running: Services, screen: Screen) -> None:
    """Through the engines' own way of storing: agent, reservation, copy, commit, publishing."""
    engine = running.engines[0]
    with screen.working(f"storing {plan.stored_chunks:,} chunks"):
        for first in range(0, plan.chunks, _STEP_CHUNKS):
            engine.ask("store_library", first_chunk=first, stop_chunk=min(first + _STEP_CHUNKS, plan.chunks))
        for tokens in plan.sizes:
            engine.ask("store_prompts", tokens=tokens, numbers=_numbers(plan, PREFIX))


def _numbers(plan: Plan, prompt: str) -> list[int]:
    first = _PREFIX_NUMBER if prompt == PREFIX else 1
    return list(range(first, first + plan.prompts))


def _row(plan: Plan, running: Services, tokens: int, prompt: str, count: int) -> Row:
    engines = running.engines[:count]
    for engine in engines:
        numbers = _numbers(plan, prompt)
        engine.ask("prepare", tokens=tokens, coverage=COVERAGE[prompt], table=plan.chunks, numbers=numbers)
    at_once(engines, "look_up", count=_WARM_UP_CALLS)
    answers = at_once(engines, "look_up", count=plan.calls // count)
    found = answers[0]["found"]
    if found["covered_tokens"] < tokens * (COVERAGE[prompt] or 100) // 100 - 1:
        raise RuntimeError(f"not all of a prompt was found that is stored: {found}")
    gone = _seconds_until_gone(running)
    took = running.latencies()
    lookups = latencies([ms for answer in answers for ms in answer["lookup_ms"]])
    return {
        "tokens": tokens,
        "prompt": prompt,
        "engines": count,
        "lookup": lookups,
        "end": latencies([ms for answer in answers for ms in answer["end_ms"]]),
        "leases_gone_ms": 1e3 * gone,
        "no_op": latencies(_no_op(engines, plan.calls // count)),
        "found": found,
        "where": _where(lookups["p50_ms"], took, prompt),
    }


def _no_op(engines: list[Piped], calls: int) -> list[float]:
    at_once(engines, "no_op", count=_WARM_UP_CALLS)
    return [ms for answer in at_once(engines, "no_op", count=calls) for ms in answer["ms"]]


def _seconds_until_gone(running: Services) -> float:
    """From the last end until the store says that it holds no lease."""
    start = time.monotonic()
    while running.held_leases():
        if time.monotonic() > start + _GONE_SECONDS:
            raise RuntimeError("leases of ended requests stay")
        time.sleep(0.002)
    return time.monotonic() - start


def _where(total: float, took: dict[str, float], prompt: str) -> Row:
    """Milliseconds, of medians: each service without those behind it, and what is between them."""
    agent, store = took["agent Lookup"], took["store Lookup"]
    asked_store = took["agent store.Lookup"]
    asked_matcher = took["store matcher.Match"] if prompt != PREFIX else 0.0
    matcher = took["matcher Match"] if prompt != PREFIX else 0.0
    return {
        "engine and transport": total - agent,
        "agent": agent - asked_store,
        "transport to store": asked_store - store,
        "store": store - asked_matcher,
        "transport to matcher": asked_matcher - matcher,
        "matcher": matcher,
    }


def _words(row: Row) -> str:
    lookup, parts = row["lookup"], "  ".join(f"{name} {ms:.2f}" for name, ms in row["where"].items())
    return (
        f"{row['tokens']:>8,} {row['prompt']:>12} {row['engines']} engines   "
        f"p50 {lookup['p50_ms']:.2f} p99 {lookup['p99_ms']:.2f} ms   end {row['end']['p50_ms']:.2f} ms, "
        f"leases gone in {row['leases_gone_ms']:.0f}   no-op {row['no_op']['p50_ms']:.2f}   ({parts})"
    )
