"""The circuit breaker, by its own clock."""

from hypothesis import given
from hypothesis import strategies as st

from services.store.tiers.breaker import CircuitBreaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_opens_after_the_threshold_and_says_so_once() -> None:
    breaker = CircuitBreaker(threshold=3, retry_seconds=5, clock=Clock())
    assert [breaker.failure() for _ in range(5)] == [False, False, True, False, False]
    assert breaker.is_open
    assert not breaker.allow()


def test_a_success_between_failures_starts_the_count_again() -> None:
    breaker = CircuitBreaker(threshold=3, retry_seconds=5, clock=Clock())
    for _ in range(10):
        breaker.failure()
        breaker.failure()
        assert not breaker.success()
    assert breaker.allow()


def test_lets_one_trial_through_each_interval_and_closes_on_success() -> None:
    clock = Clock()
    breaker = CircuitBreaker(threshold=1, retry_seconds=5, clock=clock)
    breaker.failure()
    clock.now = 4.9
    assert not breaker.allow()
    clock.now = 5.0
    assert [breaker.allow() for _ in range(3)] == [True, False, False]
    breaker.failure()
    clock.now = 9.9
    assert not breaker.allow()
    clock.now = 10.0
    assert breaker.allow()
    assert breaker.success()
    assert all(breaker.allow() for _ in range(10))


@given(st.lists(st.sampled_from(["ok", "fail", "lost"]), max_size=40))
def test_whatever_happened_it_is_tried_again_within_one_interval(outcomes: list[str]) -> None:
    """CASES 28: never open for good, also if a trial's outcome was never reported."""
    clock = Clock()
    breaker = CircuitBreaker(threshold=3, retry_seconds=5, clock=clock)
    for outcome in outcomes:
        if breaker.allow():
            if outcome == "ok":
                breaker.success()
            elif outcome == "fail":
                breaker.failure()
        clock.now += 1
    clock.now += 5
    assert breaker.allow()
