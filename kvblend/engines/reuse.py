"""What the cache gave for one prompt."""

from dataclasses import dataclass

import numpy as np

from kvblend.blend import Sources
from kvblend.results import LookupResult


@dataclass
class Reuse:
    """sources: [n], NEW where nothing came. Times are milliseconds. failed: (first, length, reason)."""

    sources: Sources
    lookup: LookupResult | None = None
    failed: tuple[tuple[int, int, str], ...] = ()
    lookup_ms: float = 0.0
    retrieve_ms: float = 0.0

    @classmethod
    def nothing(cls, tokens: int) -> "Reuse":
        return cls(np.zeros(tokens, dtype=np.uint8))
