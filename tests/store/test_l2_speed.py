"""What is measured of L2, what it is worth, and how long a lookup waits: numbers, and a clock that the test moves."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_kit import CHUNK

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.store.l2.batches import MOST_BYTES, batches
from services.store.l2.budget import Candidate, Costs, choose, is_sooner
from services.store.l2.found import L2Chunk
from services.store.l2.patience import Patience, Trust
from services.store.l2.speed import Speed
from services.store.objects import ChunkKey, ObjectKey

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def speed(clock: Clock) -> Speed:
    return Speed(8, clock)


def spend(clock: Clock, seconds: float, *, moved: bool = True) -> bool:
    clock.now += seconds
    return moved


def ask(speed: Speed, clock: Clock, seconds: float) -> None:
    with speed.asking():
        clock.now += seconds


def test_nothing_is_known_at_first(speed: Speed) -> None:
    assert (speed.pace, speed.latency, speed.steady) == (None, 0.0, False)


def test_latency_is_not_taken_for_slowness(speed: Speed, clock: Clock) -> None:
    ask(speed, clock, 0.02)
    speed.measure(MIB, lambda: spend(clock, 0.03))
    assert speed.latency == pytest.approx(0.02)
    assert speed.pace == pytest.approx(0.01 / MIB)


def test_transfers_at_once_are_each_charged_their_share(speed: Speed, clock: Clock) -> None:
    """Two that share a way for 20 ms: each byte took what it would take alone."""
    speed.measure(MIB, lambda: speed.measure(MIB, lambda: spend(clock, 0.02)))
    assert speed.pace == pytest.approx(0.01 / MIB)


def test_a_transfer_that_should_long_be_done_shows_at_once(speed: Speed, clock: Clock) -> None:
    speed.measure(MIB, lambda: spend(clock, 0.001))

    def hang() -> bool:
        clock.now += 5
        assert speed.pace == pytest.approx(5 / MIB)
        assert not speed.steady
        return False

    speed.measure(MIB, hang)
    assert speed.pace is not None
    assert speed.pace > 4 / MIB, "it failed, after having taken that long"


def test_a_question_without_an_answer_shows_at_once(speed: Speed, clock: Clock) -> None:
    with speed.asking():
        clock.now += 3
        assert speed.latency == pytest.approx(3)


def test_a_quick_failure_is_no_sign_of_speed(speed: Speed, clock: Clock) -> None:
    speed.measure(MIB, lambda: spend(clock, 1.0))
    speed.measure(MIB, lambda: spend(clock, 1e-6, moved=False))
    assert speed.pace == pytest.approx(1.0 / MIB)


def test_a_transfer_that_raises_is_forgotten(speed: Speed, clock: Clock) -> None:
    def fail() -> bool:
        clock.now += 9
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        speed.measure(MIB, fail)
    assert speed.pace is None


def test_a_tier_that_recovered_is_believed_after_one_sample(speed: Speed, clock: Clock) -> None:
    for _ in range(20):
        speed.measure(MIB, lambda: spend(clock, 1.0))
    clock.now += 2
    speed.measure(MIB, lambda: spend(clock, 0.001))
    assert speed.pace == pytest.approx(0.001 / MIB)


def test_one_slow_sample_among_many_does_not_decide_but_ends_trust(speed: Speed, clock: Clock) -> None:
    for _ in range(5):
        speed.measure(MIB, lambda: spend(clock, 0.01))
    assert speed.steady
    speed.measure(MIB, lambda: spend(clock, 0.5))
    assert speed.pace == pytest.approx(0.01 / MIB)
    assert not speed.steady
    for _ in range(3):
        speed.measure(MIB, lambda: spend(clock, 0.01))
    assert speed.steady


def test_a_tier_that_became_slow_is_known_to_be_after_three(speed: Speed, clock: Clock) -> None:
    for _ in range(9):
        speed.measure(MIB, lambda: spend(clock, 0.01))
    for _ in range(3):
        speed.measure(MIB, lambda: spend(clock, 0.4))
    assert speed.pace == pytest.approx(0.4 / MIB)


@pytest.mark.parametrize(("latency", "streams"), [(0.0, 2), (0.001, 2), (0.015, 3), (0.035, 5), (10.0, 8)])
def test_as_many_transfers_at_once_as_hide_the_latency(
    speed: Speed, clock: Clock, latency: float, streams: int
) -> None:
    ask(speed, clock, latency)
    speed.measure(100 * MIB, lambda: spend(clock, latency + 1.0))
    assert speed.streams(MIB) == streams


def test_one_call_is_about_what_moves_in_a_moment(speed: Speed, clock: Clock) -> None:
    assert speed.together == 0, "nobody knows yet"
    speed.measure(MIB, lambda: spend(clock, 0.005))
    assert speed.together == pytest.approx(2 * MIB, rel=0.01)
    for _ in range(3):
        speed.measure(MIB, lambda: spend(clock, 1e-6))
    assert speed.together == MOST_BYTES
    for _ in range(5):
        speed.measure(MIB, lambda: spend(clock, 1.0))
    assert 0 < speed.together < MIB


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(0, 20))
def test_batches_are_as_large_as_may_be_and_nothing_gets_lost(sizes: list[int], limit: int) -> None:
    found = list(batches(sizes, lambda size: size, lambda: limit))
    assert [size for batch in found for size in batch] == sizes
    assert all(len(batch) == 1 or sum(batch) <= limit for batch in found)
    assert all(sum(batch) + following[0] > limit for batch, following in itertools.pairwise(found))


# What to fetch.


def candidate(number: int, size: int, tokens: float) -> Candidate:
    key = ChunkKey(b"s" * 16, pb.DOMAIN_EXACT, number.to_bytes(32, "big"))
    return Candidate(L2Chunk(key, {ObjectKey(key, 0, 0): object_pb2.ObjectMeta(payload_bytes=size)}, 0), tokens)


CANDIDATES = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100)), max_size=6)
MARGIN = 0.8


def gain(chosen: tuple[Candidate, ...], costs: Costs, rate: float) -> float:
    spent = costs.start + sum(costs.of(item.chunk) for item in chosen)
    return sum(item.tokens for item in chosen) / rate - spent / MARGIN if chosen else 0.0


@given(CANDIDATES, CANDIDATES, st.floats(0, 50), st.floats(0, 3), st.floats(0, 3), st.floats(0.2, 5))
def test_the_best_set_is_chosen(
    front: list[tuple[int, int]],
    behind: list[tuple[int, int]],
    start: float,
    byte: float,
    each: float,
    rate: float,
) -> None:
    """Against every set that there is: a beginning of the prefix, and any segments."""
    prefix = [candidate(number, *item) for number, item in enumerate(front)]
    segments = [candidate(100 + number, *item) for number, item in enumerate(behind)]
    costs = Costs(start, byte, each)
    sets = [
        (*prefix[:depth], *some)
        for depth in range(len(prefix) + 1)
        for count in range(len(segments) + 1)
        for some in itertools.combinations(segments, count)
    ]
    first, second = choose(prefix, segments, costs, rate, 1e9)
    assert gain((*first, *second), costs, rate) == pytest.approx(max(gain(item, costs, rate) for item in sets))
    assert first == prefix[: len(first)], "a chunk of the prefix serves only behind those before it"


@given(CANDIDATES, CANDIDATES, st.floats(0, 50), st.floats(0, 3), st.floats(0, 500), st.sampled_from([0.0, 1.0]))
def test_what_is_chosen_arrives_in_time(
    front: list[tuple[int, int]], behind: list[tuple[int, int]], start: float, byte: float, seconds: float, rate: float
) -> None:
    prefix = [candidate(number, *item) for number, item in enumerate(front)]
    segments = [candidate(100 + number, *item) for number, item in enumerate(behind)]
    costs = Costs(start, byte, 0.0)
    chosen = [item for part in choose(prefix, segments, costs, rate, seconds) for item in part]
    if chosen:
        assert start + sum(costs.of(item.chunk) for item in chosen) <= seconds * (1 + 1e-9)


def test_without_the_engines_rate_whatever_arrives_is_worth_it() -> None:
    prefix = [candidate(number, 100, CHUNK) for number in range(5)]
    assert len(choose(prefix, [], Costs(0, 0.01, 0), 0, 3.5)[0]) == 3


def test_fetching_must_be_sooner_by_a_margin() -> None:
    assert is_sooner(0.79, 100, 100)
    assert not is_sooner(0.81, 100, 100)


# How long to wait.


@given(
    st.floats(0.01, 1),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=30),
)
def test_no_more_than_the_limit_of_the_best_gain_is_lost(limit: float, steps: list[tuple[float, float]]) -> None:
    """(seconds until the next chunk lands, seconds that it saves): a lookup that stops when told to."""
    patience = Patience(limit, 10.0)
    now, saved, best = 10.0, 0.0, 0.0
    for wait, saves in steps:
        left = patience.left(now, saved)
        best = max(best, saved - (now - 10.0))
        if left <= 0 or wait > left:
            now += max(left, 0.0)
            break
        now, saved = now + wait, saved + saves
    best = max(best, saved - (now - 10.0))
    assert saved - (now - 10.0) >= best - limit - 1e-9


def test_waiting_goes_on_while_more_is_gained_than_spent() -> None:
    patience = Patience(0.1, 0.0)
    for step in range(100):
        assert patience.left(step * 1.0, step * 1.5) == pytest.approx(0.1)
    assert patience.left(99.05, 99 * 1.5) == pytest.approx(0.05)


RATE = 10_000


def asks(trust: Trust, gains: list[float], lookups: int) -> list[bool]:
    """Which of the lookups ask L2, if those that do gain so much, one after the other, and then lose."""
    coming, asked = iter(gains), []
    for _ in range(lookups):
        asked.append(trust.is_given(RATE))
        if asked[-1]:
            trust.judge(RATE, next(coming, -0.01))
    return asked


def test_after_losses_more_and_more_lookups_do_without() -> None:
    asked = asks(Trust(), [], 200)
    assert [number for number, given in enumerate(asked) if given] == [0, 2, 5, 10, 19, 36, 69, 102, 135, 168]


@given(st.lists(st.sampled_from((0.5, -0.01)), max_size=30))
def test_one_gain_ends_doing_without(gains: list[float]) -> None:
    trust = Trust()
    asks(trust, gains, 500)
    while not trust.is_given(RATE):
        pass
    trust.judge(RATE, 0.5)
    assert asks(trust, [0.5] * 10, 10) == [True] * 10


def test_an_engine_that_is_too_fast_for_l2_takes_it_from_no_slower_one() -> None:
    trust = Trust()
    asks(trust, [], 100)
    assert [trust.is_given(RATE // 4) for _ in range(10)] == [True] * 10
