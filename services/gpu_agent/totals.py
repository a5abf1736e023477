"""What this agent has moved since its start, for metrics and `kvblend status`."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvblend.v1 import agent_pb2 as pb
from services.common.metrics import counter

_RETRIEVED_BYTES = counter("kvblend_agent_retrieved_bytes", "KV bytes written into engine memory.")
_RETRIEVED_TOKENS = counter("kvblend_agent_retrieved_tokens", "Tokens whose KV was written into engine memory.")
_FAILED_TOKENS = counter("kvblend_agent_failed_tokens", "Tokens that a retrieve was asked for and could not write.")
_STORED_BYTES = counter("kvblend_agent_stored_bytes", "KV bytes copied into the arena and committed.")
_ENGINE_TOKENS = counter(
    "kvblend_agent_engine_tokens", "Tokens that engines reported with their blocks: cached by them, or new.", ("kind",)
)


@dataclass
class Totals:
    """Thread-safe sums."""

    retrieved_bytes: int = 0
    retrieved_tokens: int = 0
    failed_tokens: int = 0
    stored_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add_retrieve(self, nbytes: int, tokens: int, failed: int) -> None:
        with self._lock:
            self.retrieved_bytes += nbytes
            self.retrieved_tokens += tokens
            self.failed_tokens += failed
        _RETRIEVED_BYTES.inc(nbytes)
        _RETRIEVED_TOKENS.inc(tokens)
        _FAILED_TOKENS.inc(failed)

    def add_store(self, nbytes: int) -> None:
        with self._lock:
            self.stored_bytes += nbytes
        _STORED_BYTES.inc(nbytes)

    def add_allocations(self, allocations: Iterable[pb.BlockAllocation]) -> None:
        for allocation in allocations:
            _ENGINE_TOKENS.labels("cached").inc(allocation.cached_tokens)
            _ENGINE_TOKENS.labels("new").inc(allocation.new_tokens)

    def snapshot(self) -> "Totals":
        with self._lock:
            return replace(self)
