"""Which chunks to fetch: those that together arrive sooner than the engine would compute what they save.

The engine waits for the whole answer, so chunks are not judged one by one: everything that is fetched is paid for in
the time to the first token, and each is charged its share. A chunk of the prefix serves only if all before it do.
"""

from collections.abc import Sequence
from typing import NamedTuple

from services.store.l2.found import L2Chunk

# Fetching must take at most this share of the time that it saves: estimates are no promises.
_MARGIN = 0.8


class Candidate(NamedTuple):
    """A chunk, and the tokens that need not be computed if it arrives."""

    chunk: L2Chunk
    tokens: float


class Costs(NamedTuple):
    """Seconds: until the first byte can arrive, for each byte, and for each object."""

    start: float
    byte: float
    object: float

    def of(self, chunk: L2Chunk) -> float:
        return chunk.size * self.byte + len(chunk.objects) * self.object


def is_sooner(seconds: float, tokens: float, tokens_per_second: float) -> bool:
    """Fetching that takes so long is worth it, beside computing so many tokens."""
    return seconds <= _MARGIN * tokens / tokens_per_second


def choose(
    prefix: Sequence[Candidate],
    segments: Sequence[Candidate],
    costs: Costs,
    tokens_per_second: float,
    seconds: float,
) -> tuple[list[Candidate], list[Candidate]]:
    """The part of the prefix and the segments with the greatest gain together; nothing if computing is sooner.

    `tokens_per_second`: 0 if unknown, then whatever arrives within `seconds` is worth it.
    """
    left = seconds - costs.start
    depth = 0
    gain = best_gain = spent = spent_for_best = 0.0
    for number, candidate in enumerate(prefix, 1):
        cost = costs.of(candidate.chunk)
        if spent + cost > left:
            break
        spent += cost
        gain += _gain(candidate, cost, tokens_per_second)
        if gain > best_gain:
            depth, best_gain, spent_for_best = number, gain, spent
    left -= spent_for_best
    kept: list[Candidate] = []
    for candidate in sorted(segments, key=lambda candidate: costs.of(candidate.chunk) / candidate.tokens):
        cost = costs.of(candidate.chunk)
        profit = _gain(candidate, cost, tokens_per_second)
        if profit > 0 and cost <= left:
            kept.append(candidate)
            best_gain += profit
            left -= cost
    if tokens_per_second and best_gain <= costs.start / _MARGIN:
        return [], []
    return list(prefix[:depth]), kept


def _gain(candidate: Candidate, cost: float, tokens_per_second: float) -> float:
    """Seconds, or tokens if the rate is unknown."""
    return candidate.tokens / tokens_per_second - cost / _MARGIN if tokens_per_second else candidate.tokens
