"""Who pays when room is needed: the tenant that is furthest over its fair share."""

import heapq
from collections.abc import Callable, Iterator, Sequence

from services.store.catalog import Chunk
from services.store.eviction.policy import Policy


class FairShares:
    """A policy for each tenant, so that nobody's traffic pushes out what another needs, and a choice among them.

    The fair share is an equal part of the arena for each tenant that has asked something lately, or the tenant's
    quota if that is less. One that has not asked has no share: it pays before others.
    """

    def __init__(
        self,
        make: Callable[[], Policy],
        held: Callable[[str], int],
        quota: Callable[[str], int],
        *,
        capacity: int,
        idle_seconds: float,
    ) -> None:
        """`held` and `quota`: a tenant's bytes. A tenant is idle after `idle_seconds` without a request."""
        self._make = make
        self._held = held
        self._quota = quota
        self._capacity = capacity
        self._idle_seconds = idle_seconds
        self._policies: dict[str, Policy] = {}
        self._asked: dict[str, float] = {}

    def _of(self, tenant: str, now: float) -> Policy:
        self._asked[tenant] = now
        policy = self._policies.get(tenant)
        if policy is None:
            policy = self._policies[tenant] = self._make()
        return policy

    def added(self, chunk: Chunk, now: float) -> None:
        self._of(chunk.info.tenant, now).added(chunk, now)

    def used(self, chunks: Sequence[Chunk], now: float) -> None:
        if chunks:
            self._of(chunks[0].info.tenant, now).used(chunks, now)

    def kept(self, chunks: Sequence[Chunk], now: float) -> None:
        if chunks:
            self._of(chunks[0].info.tenant, now).kept(chunks, now)

    def removed(self, chunk: Chunk) -> None:
        policy = self._policies.get(chunk.info.tenant)
        if policy is not None:
            policy.removed(chunk)

    def victims(self, now: float) -> Iterator[Chunk]:
        """Who pays is decided anew for each chunk, as the caller may have removed the one before."""
        self._forget_gone(now)
        share = self._capacity // max(1, sum(not self._is_idle(tenant, now) for tenant in self._policies))

        def excess(tenant: str) -> int:
            fair = 0 if self._is_idle(tenant, now) else min(share, self._quota(tenant))
            return self._held(tenant) - fair

        lines = {tenant: self.victims_of(tenant, now) for tenant in self._policies}
        payers = [(-excess(tenant), tenant) for tenant in lines]
        heapq.heapify(payers)
        while payers:
            _, tenant = payers[0]
            chunk = next(lines[tenant], None)
            if chunk is None:
                heapq.heappop(payers)
                continue
            yield chunk
            heapq.heapreplace(payers, (-excess(tenant), tenant))

    def victims_of(self, tenant: str, now: float) -> Iterator[Chunk]:
        """One tenant's chunks, in the order in which they should go."""
        policy = self._policies.get(tenant)
        return policy.victims(now) if policy is not None else iter(())

    def _is_idle(self, tenant: str, now: float) -> bool:
        return now - self._asked[tenant] > self._idle_seconds

    def _forget_gone(self, now: float) -> None:
        """Idle tenants that hold nothing."""
        for tenant in [tenant for tenant in self._policies if self._is_idle(tenant, now) and not self._held(tenant)]:
            del self._policies[tenant], self._asked[tenant]
