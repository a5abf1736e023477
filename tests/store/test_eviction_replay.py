"""The replay and the optimum against obvious versions; the reuse model against what it must find."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.eviction import POLICIES
from services.store.eviction.replay import Optimum, PolicyCache, Request, Trace, read_trace, replay
from services.store.eviction.reuse import EDGES, ReuseModel, bucket_of, worths_of

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def trace_of(requests: list[list[int]]) -> Trace:
    return Trace("t", [Request(float(number), blocks, 512) for number, blocks in enumerate(requests)])


def most_hits(blocks: list[int], capacity: int) -> int:
    """Of all ways to choose who leaves, with every block let in."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for block in blocks:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            rooms = [held]
            if block not in held and len(held) == capacity:
                rooms = [held - {victim} for victim in held]
            for room in rooms:
                now = room | {block}
                after[now] = max(after.get(now, 0), hits + (block in held))
        best = after
    return max(best.values())


@given(st.lists(st.integers(0, 5), min_size=2, max_size=14), st.integers(1, 4))
def test_no_choice_of_victims_beats_the_optimum(blocks: list[int], capacity: int) -> None:
    trace = trace_of([[block] for block in blocks])
    first, second = replay(Optimum(trace, capacity), trace)
    assert first.hits + second.hits == most_hits(blocks, capacity)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.integers(1, 6))
def test_lru_of_single_blocks_is_lru(blocks: list[int], capacity: int) -> None:
    held: list[int] = []
    hits = 0
    for block in blocks:
        hits += block in held
        held = [*(other for other in held if other != block), block][-capacity:]
    trace = trace_of([[block] for block in blocks])
    first, second = replay(PolicyCache("lru", capacity), trace)
    assert first.hits + second.hits == hits


@pytest.mark.parametrize("policy", POLICIES)
def test_chains_lose_their_ends_first_so_that_what_is_left_is_a_prefix(policy: str) -> None:
    requests = [[chain, *range(100 * chain, 100 * chain + 9)] for chain in range(1, 30)]
    trace = trace_of([requests[number * number % 7 + number % 20] for number in range(200)])
    for score in replay(PolicyCache(policy, 57), trace):
        assert 0 < score.hits == score.prefix_hits < score.asked


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_larger_than_the_cache_keeps_its_beginning(policy: str) -> None:
    trace = trace_of([list(range(10))] * 2)
    _, second = replay(PolicyCache(policy, 4), trace)
    assert (second.hits, second.prefix_hits, second.asked) == (4, 4, 10)


def test_a_trace_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [1, 2], "input_length": 600}\n{"timestamp": 1}\n')
    with pytest.raises(ValueError, match="line 2 is no request"):
        read_trace(path)
    path.write_text('{"timestamp": 1500, "hash_ids": [1, 2], "input_length": 600}\n')
    assert read_trace(path).requests == [Request(1.5, [1, 2], 88)]


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the traces are not here")
def test_the_default_is_above_the_plain_policies_on_a_real_trace_and_the_same_every_time() -> None:
    trace = read_trace(SHARED_DATA / "mooncake_conversation_trace.jsonl")
    trace = Trace(trace.name, trace.requests[:1500])
    scores = {name: replay(PolicyCache(name, 1500), trace)[1] for name in POLICIES}
    assert all(scores["density"].hits > score.hits for name, score in scores.items() if name != "density")
    assert replay(PolicyCache("density", 1500), trace)[1] == scores["density"]


# The reuse model.


def test_buckets_cover_all_ages() -> None:
    assert [bucket_of(age) for age in (0.0, EDGES[1] / 2, 1e12)] == [0, 0, len(EDGES) - 2]
    assert all(a < b for a, b in pairwise(EDGES))
    assert all(bucket_of((a + b) / 2) == number for number, (a, b) in enumerate(pairwise(EDGES)))


def slow_worth(rates: list[float], start: int) -> float:
    """By the definition, one time to stay after the other."""
    best, survives, uses, seconds = 0.0, 1.0, 0.0, 0.0
    for bucket in range(start, len(rates)):
        gone = survives * -math.expm1(-rates[bucket] * (EDGES[bucket + 1] - EDGES[bucket]))
        uses, seconds, survives = uses + gone, seconds + gone / rates[bucket], survives - gone
        best = max(best, uses / seconds) if seconds else best
    return best


@given(st.lists(st.floats(1e-7, 1e-2), min_size=len(EDGES) - 1, max_size=len(EDGES) - 1))
def test_worths_are_the_best_uses_for_time_that_can_be_had(rates: list[float]) -> None:
    worths = worths_of(np.array([rates]))[0]
    for bucket in (0, 7, 20, 30):
        assert worths[bucket] == pytest.approx(slow_worth(rates, bucket), rel=1e-6, abs=1e-12)


def test_the_model_finds_the_rates_that_it_is_shown() -> None:
    """Class 0 returns every 100 s on average; class 1 three seconds after its use or never."""
    model, random = ReuseModel(2), np.random.default_rng(1)
    for _ in range(20_000):
        age = float(random.exponential(100))
        model.count_time(0, 0, age)
        model.count_use(0, age)
        model.tick()
        if random.random() < 0.5:
            model.count_time(1, 0, 3)
            model.count_use(1, 3)
        else:
            model.count_time(1, 0, 500)
        model.tick()
    ages = (10.0, 50.0, 200.0)
    assert [model.worths[0][bucket_of(age)] for age in ages] == pytest.approx([0.01] * 3, rel=0.3)
    young, old = model.worths[1][bucket_of(1.0)], model.worths[1][bucket_of(20.0)]
    assert young > 0.1
    assert old < model.worths[0][bucket_of(20.0)] / 5
