"""Real servers on loopback with canned answers: what the screens show of a busy system."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvblend.v1 import agent_pb2, agent_pb2_grpc, common_pb2, matcher_pb2, matcher_pb2_grpc, store_pb2, store_pb2_grpc

SPACES = [bytes([number] * 16) for number in (0xA1, 0xB2, 0xC3)]
GIB = 1 << 30


def liveness(service: str, *dependencies: common_pb2.Dependency) -> common_pb2.Liveness:
    return common_pb2.Liveness(
        service=service, boot_id=b"\x07" * 16, uptime_seconds=7512.3, version="0.1.0", dependencies=dependencies
    )


def latency(name: str, count: int, p50: float, p99: float) -> common_pb2.LatencySummary:
    return common_pb2.LatencySummary(name=name, count=count, p50_ms=p50, p99_ms=p99)


STORE_STATS = store_pb2.GetStoreStatsResponse(
    spaces=[
        store_pb2.SpaceUsage(
            space_id=SPACES[0], display_name="SmolLM2-135M", tenant="default", chunks=1834, bytes=845 << 20
        ),
        store_pb2.SpaceUsage(
            space_id=SPACES[1], display_name="SmolLM2-135M [bold]x", tenant="acme", chunks=210, bytes=97 << 20
        ),
        store_pb2.SpaceUsage(space_id=SPACES[2], tenant="404", chunks=3, bytes=1 << 20),
    ],
    tiers=[
        store_pb2.TierUsage(
            tier=common_pb2.TIER_L1, used_bytes=943 << 20, capacity_bytes=2 * GIB, objects=2047, ready=True
        ),
        store_pb2.TierUsage(tier=common_pb2.TIER_L2, used_bytes=5 * GIB, objects=11020, detail="connection refused"),
    ],
    arena=store_pb2.ArenaUsage(
        whole_bytes=880 << 20, partial_bytes=63 << 20, free_bytes=1105 << 20, longest_free_bytes=GIB
    ),
    held_leases=48,
    busy_leases=12,
    reserved_objects=30,
    quarantined_objects=2,
    lookups=918,
    requested_tokens=29_376_000,
    prefix_hit_tokens=3_110_912,
    segment_hit_tokens=21_733_120,
    evicted_chunks=412,
    stored_chunks=2459,
    outbox_events=7,
    l2=store_pb2.SecondTierStats(queued_writes=17, lost_writes=2, bytes_per_second=3 * GIB),
    latencies=[
        latency("Lookup", 918, 2.31, 6.8),
        latency("Reserve", 312, 0.42, 1.9),
        latency("PingStore", 99999, 1, 1),
    ],
)
MATCHER_STATS = matcher_pb2.GetMatcherStatsResponse(
    spaces=[matcher_pb2.SpaceEntries(space_id=SPACES[0], chunks=1830, tokens=468_480)],
    table_bytes=3 << 20,
    memory_limit_bytes=4 * GIB,
    matches=918,
    candidates=88_410,
    verified=88_400,
    refused=10,
    evicted=31,
    log=matcher_pb2.LogState(
        kind="redis", applied_position=5120, end_position=5123, age_ms=4, snapshot_position=4096, error=""
    ),
    latencies=[latency("Match", 918, 0.71, 1.4)],
)
AGENT_STATS = agent_pb2.GetAgentStatsResponse(
    instances=[
        agent_pb2.InstanceStats(
            instance_id="i1", display_name="demo", rope_proven=True, mapped_bytes=97 << 20, open_requests=2
        )
    ],
    retrieved_bytes=11 * GIB,
    stored_bytes=3 * GIB,
    retrieved_tokens=24_844_032,
    latencies=[latency("Retrieve", 905, 3.3, 9.2)],
    device="cuda GPU-8f2c0e1d",
)


class Matcher(matcher_pb2_grpc.MatcherServiceServicer):
    def PingMatcher(self, request: Any, context: Any) -> matcher_pb2.PingMatcherResponse:
        return matcher_pb2.PingMatcherResponse(liveness=liveness("matcher"))

    def GetMatcherStats(self, request: Any, context: Any) -> matcher_pb2.GetMatcherStatsResponse:
        return MATCHER_STATS


class Store(store_pb2_grpc.StoreServiceServicer):
    def __init__(self, *dependencies: common_pb2.Dependency) -> None:
        self._dependencies = dependencies

    def PingStore(self, request: Any, context: Any) -> store_pb2.PingStoreResponse:
        return store_pb2.PingStoreResponse(liveness=liveness("store", *self._dependencies))

    def GetStoreStats(self, request: Any, context: Any) -> store_pb2.GetStoreStatsResponse:
        return STORE_STATS


class Agent(agent_pb2_grpc.AgentServiceServicer):
    def PingAgent(self, request: Any, context: Any) -> agent_pb2.PingAgentResponse:
        return agent_pb2.PingAgentResponse(liveness=liveness("gpu_agent"))

    def GetAgentStats(self, request: Any, context: Any) -> agent_pb2.GetAgentStatsResponse:
        return AGENT_STATS


@contextmanager
def serve(servicer: Any, *, serving: bool = True) -> Iterator[str]:
    """Its address while it serves; `serving=False`: answers, but says it is not ready."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add = {
        Matcher: matcher_pb2_grpc.add_MatcherServiceServicer_to_server,
        Store: store_pb2_grpc.add_StoreServiceServicer_to_server,
        Agent: agent_pb2_grpc.add_AgentServiceServicer_to_server,
    }[type(servicer)]
    add(servicer, server)
    state = health_pb2.HealthCheckResponse
    servant = health.HealthServicer()
    servant.set("readiness", state.SERVING if serving else state.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servant, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def serve_all() -> Iterator[dict[str, str]]:
    with serve(Matcher()) as matcher, serve(Store()) as store, serve(Agent()) as agent:
        yield {"matcher": matcher, "store": store, "agent": agent}
