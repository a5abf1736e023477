"""The non-overlapping cover that saves most: as many tokens as any, then in as few segments, then of better classes.

Runs may be cut at any token, but no piece may be shorter than SHORTEST_SEGMENT. So the best cover of the first x
tokens ends either with an uncovered token or with a segment [s, x) of some run, s <= x - SHORTEST_SEGMENT, behind
the best cover of the first s. Of the runs of one context class that reach to x, the one that begins first offers
every s that any of them does; its index only grows with x, once runs that lie inside another of their class are left
out. The best s in its window is the front of a monotonic queue, so all this is linear in tokens, however many runs
overlap.
"""

import numpy as np
from numba import njit

from services.matcher.kernels import I32, I64, U8

SHORTEST_SEGMENT = 16

# One covered token outweighs all segments, one segment fewer all classes: up to 2^22 tokens, 2^18 segments.
_TOKEN = 1 << 39
_SEGMENT = 1 << 20
_CLASSES = 4

Chosen = list[tuple[int, int, int]]


def best_ranges(starts: I64, ends: I64, classes: U8) -> Chosen:
    """The best cover by runs [starts, ends): ascending (start, end, index of the run that serves it)."""
    chosen: Chosen = []
    for runs in _overlapping(starts, ends):
        if len(runs) == 1:
            chosen.append((int(starts[runs[0]]), int(ends[runs[0]]), int(runs[0])))
        else:
            chosen += _best_of(starts, ends, classes, runs)
    return chosen


def _overlapping(starts: I64, ends: I64) -> list[I64]:
    """Runs in groups, ascending; those of different groups do not overlap."""
    if not len(starts):
        return []
    order = np.argsort(starts, kind="stable")
    reached = np.maximum.accumulate(ends[order])
    return np.split(order, np.flatnonzero(starts[order][1:] >= reached[:-1]) + 1)


def _best_of(starts: I64, ends: I64, classes: U8, runs: I64) -> Chosen:
    outer = [_outermost(starts, ends, runs[classes[runs] == value]) for value in range(_CLASSES)]
    runs = np.concatenate(outer)
    bounds = np.concatenate([[0], np.cumsum([len(of_class) for of_class in outer])])
    low = int(starts[runs].min())
    origins, served = _best(int(ends[runs].max()) - low, starts[runs] - low, ends[runs] - low, bounds)
    chosen = []
    end = len(origins) - 1
    while end > 0:
        start = int(origins[end])
        if served[end] >= 0:
            chosen.append((low + start, low + end, int(runs[served[end]])))
        end = start
    return chosen[::-1]


def _outermost(starts: I64, ends: I64, runs: I64) -> I64:
    """Those of `runs` that lie in no other, by start; then their ends ascend too."""
    ordered = runs[np.lexsort((-ends[runs], starts[runs]))]
    reached = np.maximum.accumulate(ends[ordered])
    return ordered[ends[ordered] > np.concatenate([[-1], reached[:-1]])[: len(ordered)]]


@njit(nogil=True, cache=True)
def _best(size: int, starts: I64, ends: I64, bounds: I64) -> tuple[I32, I32]:
    """For each end x: where the last stretch of the best cover of [0, x) begins, and its run (-1: uncovered)."""
    values = np.zeros(size + 1, dtype=np.int64)
    origins = np.zeros(size + 1, dtype=np.int32)
    served = np.full(size + 1, -1, dtype=np.int32)
    queues = np.empty((_CLASSES, size + 1), dtype=np.int32)
    heads = np.zeros(_CLASSES, dtype=np.int64)
    tails = np.zeros(_CLASSES, dtype=np.int64)
    cursors = bounds[:_CLASSES].copy()
    for end in range(1, size + 1):
        # A stretch of uncovered tokens is one step back, however long.
        origins[end] = origins[end - 1] if served[end - 1] < 0 else end - 1
        values[end] = values[end - 1]
        latest = end - SHORTEST_SEGMENT
        if latest < 0:
            continue
        worth = values[latest] - latest * _TOKEN
        for level in range(_CLASSES):
            if bounds[level] == bounds[level + 1]:
                continue
            queue = queues[level]
            # Of equal ones the later start: the run before keeps its tokens, which have more context.
            while tails[level] > heads[level] and (
                values[queue[tails[level] - 1]] - queue[tails[level] - 1] * _TOKEN <= worth
            ):
                tails[level] -= 1
            queue[tails[level]] = latest
            tails[level] += 1
            while cursors[level] < bounds[level + 1] and ends[cursors[level]] < end:
                cursors[level] += 1
            run = cursors[level]
            if run == bounds[level + 1] or starts[run] > latest:
                continue
            while queue[heads[level]] < starts[run]:
                heads[level] += 1
            start = queue[heads[level]]
            value = values[start] + (end - start) * _TOKEN - _SEGMENT - level
            if value > values[end]:
                values[end] = value
                origins[end] = start
                served[end] = run
    return origins, served
