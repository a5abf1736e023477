"""What the store says of itself: usage, tiers, counters, and what it depends on."""

from collections.abc import Iterable, Sequence

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.store.catalog import Chunk
from services.store.parts import Parts


def dependencies(parts: Parts) -> list[pb.Dependency]:
    """Matchers, L2 and the store's own keeper; an optional one that is not configured is left out."""
    found = [pb.Dependency(name="keeper", ready=not parts.keeper.failure, detail=parts.keeper.failure)]
    if parts.matchers.configured:
        ready, detail = parts.matchers.ready()
        found.append(pb.Dependency(name="matcher", ready=ready, detail="" if ready else detail))
        trouble = parts.state.outbox.trouble()
        found.append(pb.Dependency(name="publisher", ready=not trouble, detail=trouble))
    if parts.l2 is not None:
        health = parts.l2.tier.health()
        found.append(pb.Dependency(name="l2", ready=health.ready, detail=health.detail))
    return found


def stats_of(parts: Parts, latencies: Sequence[pb.LatencySummary]) -> store_pb2.GetStoreStatsResponse:
    state, counts = parts.state, parts.state.stats
    tiers = _tiers(parts)
    with state.lock:
        arena = state.arena_usage.message()
        arena.huge_page_bytes = parts.arena.huge_page_bytes
        reserved, quarantined = parts.writes.reserved(), [*parts.writes.quarantined(), *state.condemned]
        return store_pb2.GetStoreStatsResponse(
            spaces=_spaces(parts),
            tiers=tiers,
            held_leases=state.leases.held_count,
            busy_leases=state.leases.busy_count,
            reserved_objects=len(reserved),
            reserved_bytes=_bytes_of(parts, reserved),
            quarantined_objects=len(quarantined),
            quarantined_bytes=_bytes_of(parts, quarantined),
            lookups=counts.get("lookups"),
            requested_tokens=counts.get("requested_tokens"),
            prefix_hit_tokens=counts.get("prefix_hit_tokens"),
            segment_hit_tokens=counts.get("segment_hit_tokens"),
            evicted_chunks=counts.get("evicted_chunks"),
            stored_chunks=counts.get("stored_chunks"),
            outbox_events=state.outbox.depth(),
            checksum_failures=counts.get("checksum_failures"),
            latencies=latencies,
            position=state.outbox.position(),
            arena=arena,
            l2=_second_tier(parts),
            tenants=state.usage.report(),
        )


def _second_tier(parts: Parts) -> store_pb2.SecondTierStats | None:
    if parts.l2 is None:
        return None
    counts, speed = parts.state.stats, parts.l2.speed
    return store_pb2.SecondTierStats(
        queued_writes=parts.l2.writing.unwritten,
        written_chunks=counts.get("l2_written_chunks"),
        failed_writes=counts.get("l2_write_failures"),
        dropped_writes=counts.get("l2_writes_dropped"),
        lost_writes=counts.get("l2_writes_lost"),
        fetching_bytes=parts.l2.fetches.wanted_bytes,
        fetched_chunks=counts.get("l2_fetched_chunks"),
        fetched_bytes=counts.get("l2_fetched_bytes"),
        bytes_per_second=round(1 / speed.pace) if speed.pace else 0,
        latency_us=round(1e6 * speed.latency),
    )


def _bytes_of(parts: Parts, headers: Iterable[int]) -> int:
    return sum(parts.state.pool.headers.get(header, "capacity_bytes") for header in headers)


def _spaces(parts: Parts) -> list[store_pb2.SpaceUsage]:
    """Needs the state's lock."""
    chunks: dict[bytes, list[Chunk]] = {}
    for chunk in parts.state.catalog:
        chunks.setdefault(chunk.key.space_id, []).append(chunk)
    return [
        store_pb2.SpaceUsage(
            space_id=space_id,
            display_name=parts.spaces.display_name(some[0].info.model_space_id),
            tenant=some[0].info.tenant,
            chunks=sum(chunk.complete for chunk in some),
            bytes=sum(chunk.size for chunk in some),
        )
        for space_id, some in sorted(chunks.items())
    ]


def _tiers(parts: Parts) -> list[store_pb2.TierUsage]:
    state = parts.state
    with state.lock:
        arena = store_pb2.TierUsage(
            tier=pb.TIER_L1,
            used_bytes=state.pool.used_bytes,
            capacity_bytes=state.pool.capacity_bytes,
            objects=state.catalog.object_count,
            ready=True,
        )
    if parts.l2 is None:
        return [arena]
    health = parts.l2.tier.health()
    lower = store_pb2.TierUsage(
        tier=pb.TIER_L2,
        used_bytes=health.used_bytes,
        capacity_bytes=health.capacity_bytes,
        objects=health.objects,
        ready=health.ready,
        detail=health.detail,
    )
    return [arena, lower]
