"""Counters of the store: for GetStoreStats since start, and for Prometheus."""

from collections import Counter
from functools import cache

from services.common.metrics import counter

_EVENTS = counter("kvblend_store_events", "What happened in the store, by kind.", ("event",))
_SHORTFALL = counter("kvblend_store_shortfall_tokens", "Tokens that lookups could not reuse, by reason.", ("reason",))
_DECLINED = counter("kvblend_store_declined_chunks", "Chunks that were offered and not taken, by reason.", ("reason",))


# Finding a metric's child by its label takes longer than counting.
_event = cache(_EVENTS.labels)
_reason = cache(_SHORTFALL.labels)


class Stats:
    """Counts by name; increments happen under the store's lock."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, event: str, amount: int = 1) -> None:
        if amount:
            self._counts[event] += amount
            _event(event).inc(amount)

    def shortfall(self, reason: str, tokens: int) -> None:
        _reason(reason).inc(tokens)

    def declined(self, reason: str) -> None:
        _DECLINED.labels(reason).inc()

    def get(self, event: str) -> int:
        return self._counts[event]
