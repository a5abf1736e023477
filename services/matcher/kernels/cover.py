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

from services.matcher.kernels.types import I32, I64, U8

SHORTEST_SEGMENT = 16

# One covered token outweighs all segments, one segment fewer all classes: up to 2^22 tokens, 2^18 segments.
_TOKEN = 1 << 39
_SEGMENT = 1 << 20
_CLASSES = 4
_END_BITS = 32


@njit(nogil=True, cache=True)
def best_cover(starts: I64, ends: I64, classes: U8) -> tuple[I64, I64, I64]:
    """The best cover by runs [starts, ends): pieces' first and last + 1 token, ascending, and the run of each."""
    count = len(starts)
    # By start; of those that begin together the longest first. Mostly they come like that.
    ranks = (starts << _END_BITS) - ends
    order = np.arange(count) if _ascend(ranks) else np.argsort(ranks, kind="mergesort")
    room = 0
    low = 0
    while low < count:
        high, reach = _overlapping(starts, ends, order, low)
        room += 1 if high == low + 1 else (reach - starts[order[low]]) // SHORTEST_SEGMENT + 1
        low = high
    covering = np.empty((3, room), dtype=np.int64)
    filled = 0
    low = 0
    while low < count:
        high, _ = _overlapping(starts, ends, order, low)
        if high == low + 1:
            run = order[low]
            covering[0, filled], covering[1, filled], covering[2, filled] = starts[run], ends[run], run
            filled += 1
        else:
            pieces = _best_of(starts, ends, classes, order[low:high])
            covering[:, filled : filled + pieces.shape[1]] = pieces
            filled += pieces.shape[1]
        low = high
    return covering[0, :filled].copy(), covering[1, :filled].copy(), covering[2, :filled].copy()


@njit(nogil=True, cache=True)
def _overlapping(starts: I64, ends: I64, order: I64, low: int) -> tuple[int, int]:
    """Of runs from order[low] on, those that hang together by their overlaps: the last + 1, and how far they reach."""
    reach = ends[order[low]]
    high = low + 1
    while high < len(order) and starts[order[high]] < reach:
        reach = max(reach, ends[order[high]])
        high += 1
    return high, reach


@njit(nogil=True, cache=True)
def _ascend(values: I64) -> bool:
    for index in range(1, len(values)):  # noqa: SIM110 -- compiled: a generator would be slower
        if values[index] < values[index - 1]:
            return False
    return True


@njit(nogil=True, cache=True)
def _best_of(starts: I64, ends: I64, classes: U8, order: I64) -> I64:
    """Of runs that overlap (ordered by start, longest first): [3, pieces] as `best_cover` returns."""
    outer = np.empty(len(order), dtype=np.int64)
    bounds = np.zeros(_CLASSES + 1, dtype=np.int64)
    filled = 0
    for level in range(_CLASSES):
        reached = np.int64(-1)
        for run in order:
            # Runs inside another of their class offer nothing; of the others the ends ascend, too.
            if classes[run] == level and ends[run] > reached:
                reached = ends[run]
                outer[filled] = run
                filled += 1
        bounds[level + 1] = filled
    outer = outer[:filled]
    low = starts[order[0]]
    high = ends[outer].max()
    origins, served = _best(high - low, starts[outer] - low, ends[outer] - low, bounds)
    count = 0
    end = high - low
    while end > 0:
        if served[end] >= 0:
            count += 1
        end = np.int64(origins[end])
    pieces = np.empty((3, count), dtype=np.int64)
    end = high - low
    while end > 0:
        start = np.int64(origins[end])
        if served[end] >= 0:
            count -= 1
            pieces[0, count], pieces[1, count], pieces[2, count] = low + start, low + end, outer[served[end]]
        end = start
    return pieces


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
