"""Whose bytes fill the arena, and how many each tenant may have."""

from collections import Counter
from collections.abc import Mapping

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.store.catalog import Chunk

ANY_TENANT = "*"


class Usage:
    """Bytes of committed chunks and of blocks being written, by tenant. Not thread-safe."""

    def __init__(self, capacity: int, quotas: Mapping[str, int], pinned_share: float) -> None:
        """`quotas`: tenant (* for any other) -> bytes. `pinned_share`: of the arena in all, and of each quota."""
        self._capacity = capacity
        self._quotas = quotas
        self._pinned_share = pinned_share
        self._held: Counter[str] = Counter()
        self._reserved: Counter[str] = Counter()
        # Of both, what is to stay for ever.
        self._pinned: Counter[str] = Counter()
        # What BLENDED copies of known text hold.
        self.duplicate_bytes = 0

    def quota(self, tenant: str) -> int:
        """Bytes that the tenant may hold: the arena's without one of its own."""
        return min(self._capacity, self._quotas.get(tenant, self._quotas.get(ANY_TENANT, self._capacity)))

    def total(self, tenant: str) -> int:
        return self._held[tenant] + self._reserved[tenant]

    def over_quota(self, tenant: str, more: int) -> int:
        """Bytes that must go before the tenant may have `more`; 0 or less: none."""
        quota = self.quota(tenant)
        return self.total(tenant) + more - quota if quota < self._capacity else 0

    def may_pin(self, tenant: str, more: int) -> bool:
        mine = self._pinned[tenant] + more <= self._pinned_share * self.quota(tenant)
        return mine and self._pinned.total() + more <= self._pinned_share * self._capacity

    def why_refused(self, tenant: str, size: int, pinned: bool) -> pb.Reason:
        """Why a block could not be had, after everything that may go has gone."""
        within = self.over_quota(tenant, size) <= 0 and (not pinned or self.may_pin(tenant, size))
        return pb.REASON_NO_SPACE if within else pb.REASON_QUOTA

    def reserve(self, tenant: str, size: int, pinned: bool) -> None:
        self._reserved[tenant] += size
        self._pinned[tenant] += size * pinned

    def unreserve(self, tenant: str, size: int, pinned: bool) -> None:
        """It was committed or given up."""
        self._reserved[tenant] -= size
        self._pinned[tenant] -= size * pinned

    def hold(self, chunk: Chunk, size: int) -> None:
        """A block of the chunk was committed."""
        chunk.size += size
        self._change(chunk, size)

    def release(self, chunk: Chunk) -> None:
        """The chunk has left."""
        self._change(chunk, -chunk.size)

    def _change(self, chunk: Chunk, size: int) -> None:
        self._held[chunk.info.tenant] += size
        self._pinned[chunk.info.tenant] += size * chunk.pinned
        if chunk.info.duplicate:
            self.duplicate_bytes += size

    def pin(self, chunk: Chunk) -> None:
        if not chunk.pinned:
            chunk.pinned = True
            self._pinned[chunk.info.tenant] += chunk.size

    def report(self) -> list[store_pb2.TenantUsage]:
        tenants = sorted(tenant for tenant in self._held | self._reserved if self.total(tenant))
        return [
            store_pb2.TenantUsage(
                tenant=tenant,
                bytes=self._held[tenant],
                reserved_bytes=self._reserved[tenant],
                pinned_bytes=self._pinned[tenant],
                quota_bytes=self.quota(tenant) if self.quota(tenant) < self._capacity else 0,
            )
            for tenant in tenants
        ]
