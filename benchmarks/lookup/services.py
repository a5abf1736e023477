"""The services that a lookup passes through, as processes of their own on unix sockets, beside a no-op server."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.common.processes import Piped, cores, piped
from benchmarks.lookup.plan import Plan
from benchmarks.matcher.matchers import folder, started
from cli.local import LocalServices
from kvblend.v1 import agent_pb2, agent_pb2_grpc, matcher_pb2, matcher_pb2_grpc, store_pb2, store_pb2_grpc

_CALL_SECONDS = 10.0
# An arena has one header for so many bytes; blocks here are smaller. Eviction must not begin.
_BYTES_PER_CHUNK = 32 << 10
_ROOM = 1.1
_NO_OP = ["benchmarks.matcher.server", "--kind", "sync", "--call", "no-op", "--chunks", "0"]


@dataclass(frozen=True)
class Services:
    """Engines by number, and what the services say of themselves."""

    engines: list[Piped]
    agent: Any
    store: Any
    matcher: Any

    def latencies(self) -> dict[str, float]:
        """Median milliseconds of the last calls, by who served them; "agent to store" as the agent has waited."""
        agent = self.agent.GetAgentStats(agent_pb2.GetAgentStatsRequest(), timeout=_CALL_SECONDS)
        store = self.store.GetStoreStats(store_pb2.GetStoreStatsRequest(), timeout=_CALL_SECONDS)
        matcher = self.matcher.GetMatcherStats(matcher_pb2.GetMatcherStatsRequest(), timeout=_CALL_SECONDS)
        found: dict[str, float] = {}
        for service, answer in (("agent", agent), ("store", store), ("matcher", matcher)):
            found |= {f"{service} {item.name}": item.p50_ms for item in answer.latencies}
        return found

    def held_leases(self) -> int:
        stats: store_pb2.GetStoreStatsResponse = self.store.GetStoreStats(
            store_pb2.GetStoreStatsRequest(), timeout=_CALL_SECONDS
        )
        return stats.held_leases


@contextmanager
def services(plan: Plan) -> Iterator[Services]:
    """Started and empty."""
    arena = int(plan.stored_chunks * _BYTES_PER_CHUNK * _ROOM)
    anywhere = ",".join(map(str, cores()))
    with LocalServices(arena_bytes=arena) as local, folder() as where, started(where, "no-op", _NO_OP) as no_op:
        engines = {
            f"engine-{number}": (
                sys.executable,
                ["benchmarks.lookup.engine", anywhere, f"engine-{number}", local.agent_target, no_op.unix],
            )
            for number in range(max(plan.engines))
        }
        channels = [grpc.insecure_channel(target) for target in _targets(local)]
        with piped(engines) as running:  # type: ignore[arg-type]
            yield Services(
                list(running.values()),
                agent_pb2_grpc.AgentServiceStub(channels[0]),  # type: ignore[no-untyped-call]
                store_pb2_grpc.StoreServiceStub(channels[1]),  # type: ignore[no-untyped-call]
                matcher_pb2_grpc.MatcherServiceStub(channels[2]),  # type: ignore[no-untyped-call]
            )
        for channel in channels:
            channel.close()


def _targets(local: LocalServices) -> tuple[str, str, str]:
    return local.agent_target, local.store_target, local.matcher_target
