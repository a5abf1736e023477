"""The non-overlapping cover that saves most: as many tokens as any, in as few runs as any.

A run may be cut at any token, so every token that some run covers can be covered: the most that can be saved is the
union of the runs. Sweeping from the left and always taking the run that reaches farthest gives that union with the
fewest cuts. Only pieces shorter than SHORTEST_SEGMENT are given up, as their cost is above their worth.
"""

from collections.abc import Sequence

from services.matcher.runs import Run

SHORTEST_SEGMENT = 16

Interval = tuple[int, int]


def best_cover(runs: Sequence[Run], allowed: Sequence[Interval]) -> list[Run]:
    """Runs cut so that they lie inside `allowed` (ascending, apart), do not overlap, and ascend."""
    pending = sorted(runs, key=lambda run: run.start)
    cover: list[Run] = []
    for interval in allowed:
        cover += _cover_interval(pending, interval)
    return cover


def _cover_interval(runs: Sequence[Run], interval: Interval) -> list[Run]:
    position, end = interval
    chosen: list[Run] = []
    next_run = 0
    best: Run | None = None
    while position < end:
        while next_run < len(runs) and runs[next_run].start <= position:
            best = _better(best, runs[next_run])
            next_run += 1
        if best is None or best.end <= position:
            if next_run == len(runs):
                break
            position = max(position, runs[next_run].start)
            best = None
            continue
        stop = min(best.end, end)
        if stop - position >= SHORTEST_SEGMENT:
            chosen.append(best.cut(position, stop))
        else:
            _borrow(chosen, best, interval[0], stop)
        position = stop
    return chosen


def _better(one: Run | None, other: Run) -> Run:
    """Farther; of equals, the better context class, then the longer."""
    if one is None:
        return other
    return min(one, other, key=lambda run: (-run.end, run.context_class, run.start))


def _borrow(chosen: list[Run], run: Run, first: int, stop: int) -> None:
    """Takes tokens from the end of the run before, so that a short piece becomes long enough; else drops it."""
    start = max(run.start, first, stop - SHORTEST_SEGMENT)
    if stop - start < SHORTEST_SEGMENT:
        return
    if chosen and chosen[-1].end > start:
        before = chosen[-1]
        if start - before.start < SHORTEST_SEGMENT:
            return
        chosen[-1] = before.cut(before.start, start)
    chosen.append(run.cut(start, stop))
