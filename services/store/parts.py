"""The components of a store, put together around what its arena holds."""

from dataclasses import dataclass

from services.store.arena.arena import Arena
from services.store.arena.recovery import open_pool, restore
from services.store.catalog import Catalog
from services.store.eviction import FairShares, make_policy
from services.store.keeping import Keeper
from services.store.l2.second_tier import L2, L2Options
from services.store.l2.writing import WritePolicies
from services.store.leasing.sessions import Sessions
from services.store.lookup.lookups import Lookups
from services.store.lookup.matchers import Client, Matchers
from services.store.settings import StoreSettings
from services.store.spaces import ModelSpaces
from services.store.state import Clock, Outbox, StoreState
from services.store.tiers.base import Tier
from services.store.usage import Usage
from services.store.writing.admission import Admission
from services.store.writing.writes import Writes


@dataclass(frozen=True)
class Parts:
    name: str
    arena: Arena
    state: StoreState
    spaces: ModelSpaces
    sessions: Sessions
    writes: Writes
    admission: Admission
    lookups: Lookups
    matchers: Matchers
    # None without a lower tier.
    l2: L2 | None
    keeper: Keeper


def make_state(settings: StoreSettings, arena: Arena, clock: Clock, l2_id: str) -> tuple[StoreState, Writes, Sessions]:
    """What the arena holds, as it was found."""
    found = open_pool(arena)
    catalog = Catalog()
    capacity = found.pool.capacity_bytes
    usage = Usage(capacity, settings.tenant_quota_bytes, settings.pinned_share)
    state = StoreState(
        found.pool,
        catalog,
        FairShares(
            lambda: make_policy(settings.eviction_policy, catalog.children),
            usage.total,
            usage.quota,
            capacity=capacity,
            idle_seconds=settings.tenant_idle_seconds,
        ),
        usage,
        clock,
        lease_ttl=settings.lease_ttl_seconds,
        session_cap=int(settings.lease_session_share * capacity),
        tenant_cap=int(settings.lease_tenant_share * capacity),
        l2_id=l2_id,
        verify_share=settings.verify_share,
    )
    sessions = Sessions(arena.directory, settings.session_grace_seconds, clock.now)
    writes = Writes(state, settings.reservation_ttl_seconds)
    state.dropped_at_start = restore(found, arena, state, writes, sessions)
    return state, writes, sessions


def compose(
    settings: StoreSettings,
    arena: Arena,
    state: StoreState,
    writes: Writes,
    sessions: Sessions,
    outbox: Outbox,
    client: Client | None,
    tier: Tier | None,
) -> Parts:
    """The parts around a state; nothing is started yet. `client`: None without matchers."""
    matchers = Matchers(client)
    l2 = L2(tier, state, _l2_options(settings, state)) if tier is not None else None
    state.connect(outbox, l2.writing.offer if l2 else lambda _: None, l2.writing.spare if l2 else lambda _: False)
    lookups = Lookups(
        state,
        matchers,
        l2,
        store=settings.name,
        epoch=arena.epoch,
        matcher_timeout=settings.matcher_timeout_seconds,
    )
    capacity = state.pool.capacity_bytes
    return Parts(
        name=settings.name,
        arena=arena,
        state=state,
        spaces=ModelSpaces(arena.directory / "models", settings.chunk_tokens),
        sessions=sessions,
        writes=writes,
        admission=Admission(settings.duplicate_window_seconds, capacity, state.clock.now),
        lookups=lookups,
        matchers=matchers,
        l2=l2,
        keeper=Keeper(
            state,
            writes,
            sessions,
            lookups.answers,
            high_bytes=int(settings.evict_above * capacity),
            low_bytes=int(settings.evict_to * capacity),
            request_ttl=settings.request_ttl_seconds,
        ),
    )


def _l2_options(settings: StoreSettings, state: StoreState) -> L2Options:
    return L2Options(
        policies=WritePolicies(settings.l2_documents, settings.l2_prompts, settings.l2_blended),
        queue_chunks=settings.l2_queue_chunks,
        write_threads=settings.l2_write_threads,
        fetch_threads=settings.l2_threads,
        fetch_bytes=int(settings.l2_fetch_share * state.pool.capacity_bytes),
        fetched=settings.l2_fetched,
        patience=settings.l2_patience,
        steady_patience=max(settings.l2_patience, settings.l2_steady_patience),
        timeout=settings.l2_timeout_seconds,
    )
