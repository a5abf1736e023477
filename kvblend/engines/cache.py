"""An engine's side of reuse: what of a prompt came out of the cache, and what goes into it."""

import time
from typing import Any

from kvblend.blend import Source
from kvblend.client import KvblendClient
from kvblend.engines.kv_memory import KvMemory
from kvblend.engines.reuse import Reuse
from kvblend.engines.tokens import Tokens
from kvblend.results import LookupResult, Shortfall, StoreResult


class EngineCache:
    """Reads and writes `memory` through `client`'s agent. Nothing here raises for cache trouble."""

    def __init__(self, client: KvblendClient, memory: KvMemory, lookup_seconds: float, transfer_seconds: float) -> None:
        self._client = client
        self._memory = memory
        self._lookup_seconds = lookup_seconds
        self._transfer_seconds = transfer_seconds

    def reuse(self, prompt: Tokens, request_id: str, **options: Any) -> Reuse:
        """Looks a prompt up and has what was found written to its slots; `end` must follow.

        `options` are those of `KvblendClient.lookup`.
        """
        reuse = Reuse.nothing(len(prompt))
        start = time.perf_counter()
        registered = self._memory.register()
        if not registered:
            why = (Shortfall(registered.reason, len(prompt), registered.detail),)
            reuse.lookup = LookupResult(ok=False, reason=registered.reason, request_id=request_id, shortfalls=why)
            return reuse
        found = self._client.lookup(prompt, request_id, timeout=self._lookup_seconds, **options)
        looked_up = time.perf_counter()
        reuse.lookup = found
        reuse.lookup_ms = 1e3 * (looked_up - start)
        if found.ok and found.covered_tokens:
            self._retrieve(found, reuse)
            reuse.retrieve_ms = 1e3 * (time.perf_counter() - looked_up)
        return reuse

    def end(self, request_id: str) -> None:
        self._client.end_session(request_id, timeout=self._lookup_seconds)

    def store(self, tokens: Tokens, request_id: str, **options: Any) -> StoreResult:
        """`options` are those of `KvblendClient.store`."""
        registered = self._memory.register()
        if not registered:
            return StoreResult(ok=False, reason=registered.reason, detail=registered.detail)
        settled = False
        try:
            result = self._client.store(tokens, request_id, timeout=self._transfer_seconds, **options)
            settled = result.ok or bool(result.chunks)
            return result
        finally:
            if not settled:
                # The agent may still be reading; what it reads must not change under it.
                self._memory.abandon()
            self.end(request_id)

    def _retrieve(self, found: LookupResult, reuse: Reuse) -> None:
        settled = False
        try:
            result = self._client.retrieve(found.request_id, timeout=self._transfer_seconds)
            settled = result.ok or bool(result.failed)
        finally:
            if not settled:
                # No word of what became of it: the agent may be writing still.
                self._memory.abandon()
        if not settled:
            reuse.failed = ((0, len(reuse.sources), result.reason),)
            return
        reuse.failed = result.failed
        for first, length in result.written:
            reuse.sources[first : first + length] = Source.SEGMENT
        exact = reuse.sources[: found.prefix_tokens - found.blended_tokens]
        exact[exact == Source.SEGMENT] = Source.PREFIX
