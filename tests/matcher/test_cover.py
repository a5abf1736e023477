"""The cover by overlapping runs: most tokens, in the fewest pieces, of the best classes; against every way there is."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.matcher.kernels.cover import SHORTEST_SEGMENT, best_cover

Run = tuple[int, int, int]
Piece = tuple[int, int, int]

runs_near = st.lists(st.tuples(st.integers(0, 60), st.integers(16, 50), st.integers(1, 3)), max_size=8)
runs_far = st.lists(st.tuples(st.integers(0, 400), st.integers(16, 90), st.integers(0, 3)), max_size=14)


def cover(runs: list[Run]) -> list[Piece]:
    """runs: (start, length, class)."""
    starts = np.array([start for start, _, _ in runs], dtype=np.int64)
    ends = np.array([start + length for start, length, _ in runs], dtype=np.int64)
    columns = best_cover(starts, ends, np.array([level for _, _, level in runs], dtype=np.uint8))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def best_worth(runs: list[Run]) -> tuple[int, int, int]:
    """(tokens, -pieces, -classes) of the best cover: every way to end with every run, at every position."""
    size = max((start + length for start, length, _ in runs), default=0)
    best = [(0, 0, 0)]
    for end in range(1, size + 1):
        options = [best[end - 1]]
        for first, length, level in runs:
            if first + length >= end:
                options += [
                    (best[start][0] + end - start, best[start][1] - 1, best[start][2] - level)
                    for start in range(first, end - SHORTEST_SEGMENT + 1)
                ]
        best.append(max(options))
    return best[-1]


def is_best(runs: list[Run]) -> None:
    pieces = cover(runs)
    for start, end, run in pieces:
        first, length, _ = runs[run]
        assert first <= start <= end - SHORTEST_SEGMENT
        assert end <= first + length
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(pieces))
    worth = sum(end - start for start, end, _ in pieces), -len(pieces), -sum(runs[run][2] for *_, run in pieces)
    assert worth == best_worth(runs)


@given(runs_near)
@settings(deadline=None, max_examples=200)
def test_the_cover_is_the_best_of_many_runs_that_overlap(runs: list[Run]) -> None:
    is_best(runs)


@given(runs_far)
@settings(deadline=None)
def test_the_cover_is_the_best_of_groups_of_runs(runs: list[Run]) -> None:
    is_best(runs)


def test_a_piece_is_never_shorter_than_sixteen_tokens_even_if_tokens_are_lost() -> None:
    assert cover([(0, 30, 1), (29, 16, 1)]) == [(0, 29, 0), (29, 45, 1)]
    assert cover([(0, 16, 1), (15, 16, 1)]) in ([(0, 16, 0)], [(15, 31, 1)])


def test_of_equal_covers_the_one_with_longer_runs_then_the_better_class_is_taken() -> None:
    assert cover([(0, 32, 1), (32, 32, 1), (0, 64, 3)]) == [(0, 64, 2)]
    assert cover([(0, 40, 3), (0, 40, 1), (0, 40, 2)]) == [(0, 40, 1)]


def test_thousands_of_runs_over_one_stretch_are_covered_by_few_pieces() -> None:
    runs = [(start, 1000, 1) for start in range(0, 20_000, 4)]
    pieces = cover(runs)
    assert sum(end - start for start, end, _ in pieces) == 20_996
    assert len(pieces) == 21
