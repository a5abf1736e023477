"""Figures of many measurements."""

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def latencies(milliseconds: Sequence[float]) -> dict[str, float]:
    return {
        "p50_ms": percentile(milliseconds, 50),
        "p99_ms": percentile(milliseconds, 99),
        "calls": len(milliseconds),
    }
