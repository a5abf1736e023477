"""Composes the store: the one place that knows all its parts."""

from contextlib import ExitStack, closing

from kvblend.v1 import store_pb2_grpc
from services.common.config import without_login
from services.common.lifecycle import Boot
from services.common.server import GrpcServer
from services.common.tenants import TenantPolicy
from services.store.arena.arena import Arena, refuse
from services.store.lookup.matcher_client import MatcherClient
from services.store.parts import compose, make_state
from services.store.publishing.publisher import NoMatchers, Publisher
from services.store.service import StoreServicer
from services.store.settings import StoreSettings
from services.store.state import Clock
from services.store.tiers.base import Tier
from services.store.tiers.redis import RedisTier

_SERVICE = "kvblend.v1.StoreService"


def make_tier(settings: StoreSettings) -> Tier | None:
    """Exits with one line for an address that cannot be; a server that is away is no error."""
    if not settings.redis_url:
        return None
    try:
        return RedisTier(
            settings.redis_url,
            key_prefix=settings.redis_key_prefix,
            ttl_seconds=settings.redis_ttl_seconds,
            part_bytes=settings.redis_part_bytes,
            connect_timeout=settings.redis_connect_seconds,
            max_connections=settings.redis_connections,
            half_open_seconds=settings.redis_retry_seconds,
            operation_timeout=settings.l2_timeout_seconds,
        )
    except ValueError as error:
        refuse("redis_url", without_login(settings.redis_url), str(error))


def build(settings: StoreSettings, stack: ExitStack) -> GrpcServer:
    """Starts the parts in order, each entered into the stack, and returns the server."""
    server = GrpcServer(settings, [_SERVICE])
    slabs, slab_bytes = settings.slab_shape
    arena = stack.enter_context(closing(Arena(settings.directory, slabs * slab_bytes, slab_bytes)))
    tier = make_tier(settings)
    state, writes, sessions = make_state(settings, arena, Clock(), tier.tier_id if tier else "")
    if settings.matcher_target:
        client = stack.enter_context(closing(MatcherClient(settings.matcher_target, server.latencies)))
        publisher = Publisher(settings.name, arena.epoch, settings.matcher_target, state.snapshot)
        parts = compose(settings, arena, state, writes, sessions, publisher, client, tier)
        publisher.start()
        stack.callback(publisher.close)
    else:
        alone = NoMatchers(settings.name, arena.epoch)
        parts = compose(settings, arena, state, writes, sessions, alone, None, tier)
    if parts.l2 is not None:
        parts.l2.start()
        stack.callback(parts.l2.close)
    parts.keeper.start()
    stack.callback(parts.keeper.close)
    servicer = StoreServicer(parts, Boot(settings.service), TenantPolicy(settings.tenant_tokens), server.latencies)
    store_pb2_grpc.add_StoreServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    return server
