"""How likely chunks are to be used again, learned from those that were and those that were not.

Chunks are sorted into classes (what they are, how often they have been used). For each class and age, the
time since the last use, the model counts uses and the time that chunks have spent at that age: their ratio is
the rate of reuse. Chunks that have left are watched for a while longer (ghosts), so that the rate is known
beyond the age at which chunks leave.

The worth of a chunk at an age is the most uses for each second of staying that can be had from here: the
maximum over all times to stay of (probability of a use until then) / (expected time until the use or then).
That is Gittins' index of its rates; with equal sizes keeping what has most of it is best.
"""

import math

import numpy as np
import numpy.typing as npt

# Ages in half octaves from a tenth of a second to a month.
_FIRST_EDGE = 0.1
_PER_OCTAVE = 2
_BUCKETS = 50
_WIDTHS_EDGES = [0.0, *(_FIRST_EDGE * 2 ** (step / _PER_OCTAVE) for step in range(_BUCKETS))]
EDGES: tuple[float, ...] = tuple(_WIDTHS_EDGES)

# Found on the first halves of the traces (docs: kvblend bench eviction). Uses that an estimate must outweigh:
# one request's chunks are used together, so single uses say little.
_PRIOR_USES = 50.0
# What was counted is forgotten: by this factor each time the model learns, and it learns after so many events.
_KEEP = 0.9
_LEARN_EVERY = 2_000

Worths = list[list[float]]


def bucket_of(age: float) -> int:
    """Of an age in seconds."""
    if age < _FIRST_EDGE:
        return 0
    return min(_BUCKETS - 1, 1 + int(_PER_OCTAVE * math.log2(age / _FIRST_EDGE)))


class ReuseModel:
    """`worths[class][bucket]`: uses per second; refreshed every few thousand events."""

    def __init__(self, classes: int) -> None:
        self._uses = [[0.0] * _BUCKETS for _ in range(classes)]
        # Seconds at each age: parts of a bucket as they are, whole ones as steps whose running sum counts them.
        self._part_seconds = [[0.0] * (_BUCKETS + 1) for _ in range(classes)]
        self._whole_steps = [[0.0] * (_BUCKETS + 1) for _ in range(classes)]
        self._used: npt.NDArray[np.float64] = np.zeros((classes, _BUCKETS))
        self._seconds: npt.NDArray[np.float64] = np.zeros((classes, _BUCKETS))
        self._events = 0
        self.worths: Worths = self._evaluate()

    def count_use(self, of_class: int, age: float) -> None:
        self._uses[of_class][bucket_of(age)] += 1

    def count_time(self, of_class: int, age: float, until: float) -> None:
        """A chunk of this class has aged from `age` to `until` without a use."""
        first, last = bucket_of(age), bucket_of(until)
        part = self._part_seconds[of_class]
        if first == last:
            part[first] += until - age
            return
        part[first] += EDGES[first + 1] - age
        part[last] += until - EDGES[last]
        steps = self._whole_steps[of_class]
        steps[first + 1] += 1
        steps[last] -= 1

    def tick(self) -> None:
        """One event has happened."""
        self._events += 1
        if self._events % _LEARN_EVERY == 0:
            self._learn()

    def _learn(self) -> None:
        widths = np.diff(EDGES)
        whole = np.cumsum(self._whole_steps, axis=1)[:, :_BUCKETS] * widths
        self._seconds += np.array(self._part_seconds)[:, :_BUCKETS] + whole
        self._used += self._uses
        for table in (self._uses, self._part_seconds, self._whole_steps):
            for row in table:
                row[:] = [0.0] * len(row)
        self.worths = self._evaluate()
        self._used *= _KEEP
        self._seconds *= _KEEP

    def _evaluate(self) -> Worths:
        return worths_of(self._rates())

    def _rates(self) -> npt.NDArray[np.float64]:
        """[classes, buckets], uses per second. A class's estimate starts from that of all classes together."""
        used, seconds = self._used.sum(axis=0), self._seconds.sum(axis=0)
        together = np.empty(_BUCKETS)
        rate = (used.sum() + 1) / (seconds.sum() + 1)
        for bucket in range(_BUCKETS):
            together[bucket] = (used[bucket] + _PRIOR_USES) / (seconds[bucket] + _PRIOR_USES / rate)
            # Where nothing is known the rate falls with the age.
            rate = together[bucket] * (2 ** (-1 / _PER_OCTAVE) if bucket else 1)
        expected = (self._seconds * together).sum(axis=1)
        factor = (self._used.sum(axis=1) + _PRIOR_USES) / (expected + _PRIOR_USES)
        start = together * factor[:, None]
        rates: npt.NDArray[np.float64] = (self._used + _PRIOR_USES) / (self._seconds + _PRIOR_USES / start)
        return rates


def worths_of(rates: npt.NDArray[np.float64]) -> Worths:
    """Gittins' index of each class at each age. `rates`: [classes, buckets], uses per second."""
    hazards = np.cumsum(np.pad(rates * np.diff(EDGES), ((0, 0), (1, 0))), axis=1)
    # From bucket k through bucket x: [classes, k, x].
    size = rates.shape[1]
    later = np.triu(np.ones((size, size), bool))
    since = hazards[:, None, :] - hazards[:, :size, None]
    lost = -np.expm1(-np.maximum(since, 0.0))
    uses = np.diff(lost, axis=2) * later
    seconds = np.cumsum(uses / rates[:, None, :], axis=2)
    index = np.divide(np.cumsum(uses, axis=2), seconds, out=np.zeros_like(seconds), where=seconds > 0)
    worths: Worths = index.max(axis=2).tolist()
    return worths
