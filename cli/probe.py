"""Asks one service whether it is there and ready."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvblend.v1 import agent_pb2, agent_pb2_grpc, common_pb2, matcher_pb2, matcher_pb2_grpc, store_pb2, store_pb2_grpc
from services.common.channels import open_channel
from services.common.errors import reason_of

_STUBS: dict[str, Callable[[grpc.Channel], Any]] = {
    "matcher": matcher_pb2_grpc.MatcherServiceStub,
    "store": store_pb2_grpc.StoreServiceStub,
    "agent": agent_pb2_grpc.AgentServiceStub,
}
_NAMES = {"matcher": "MatcherService", "store": "StoreService", "agent": "AgentService"}
_READINESS = health_pb2.HealthCheckRequest(service="readiness")


@dataclass(frozen=True)
class Probe:
    """What a service answered. `ready` needs all: an answer, a serving server, ready dependencies."""

    service: str
    target: str
    reachable: bool
    ready: bool
    # Why it is not ready; empty if it is.
    detail: str = ""
    liveness: common_pb2.Liveness | None = None
    round_trip_ms: float = 0.0

    def as_json(self) -> dict[str, Any]:
        live = self.liveness or common_pb2.Liveness()
        return {
            "service": self.service,
            "target": self.target,
            "reachable": self.reachable,
            "ready": self.ready,
            "detail": self.detail,
            "version": live.version,
            "boot_id": live.boot_id.hex(),
            "uptime_seconds": round(live.uptime_seconds, 1),
            "round_trip_ms": round(self.round_trip_ms, 2),
            "dependencies": [{"name": d.name, "ready": d.ready, "detail": d.detail} for d in live.dependencies],
        }


class Peer:
    """One service at one address; its channel reconnects by itself."""

    def __init__(self, service: str, target: str) -> None:
        self.service = service
        self.target = target
        self._channel = open_channel(target)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self.stub = _STUBS[service](self._channel)

    def ping(self, timeout: float) -> common_pb2.Liveness:
        """Raises grpc.RpcError."""
        if self.service == "matcher":
            response = self.stub.PingMatcher(matcher_pb2.PingMatcherRequest(), timeout=timeout)
        elif self.service == "store":
            response = self.stub.PingStore(store_pb2.PingStoreRequest(), timeout=timeout)
        else:
            response = self.stub.PingAgent(agent_pb2.PingAgentRequest(), timeout=timeout)
        liveness: common_pb2.Liveness = response.liveness
        return liveness

    def is_ready(self, timeout: float = 1.0) -> bool:
        """As it says itself: a matcher answers before it has caught up with its log. Not asked: what it depends on."""
        try:
            health = self._health.Check(_READINESS, timeout=timeout)
        except grpc.RpcError:
            return False
        return bool(health.status == health_pb2.HealthCheckResponse.SERVING)

    def has_met_matcher(self, timeout: float = 1.0) -> bool:
        """Of a store: it reaches its matcher and has told it what it holds. Its L2 may be away."""
        try:
            liveness = self.ping(timeout)
        except grpc.RpcError:
            return False
        return all(item.ready for item in liveness.dependencies if item.name in ("matcher", "publisher"))

    def probe(self, timeout: float) -> Probe:
        """Never raises; takes at most `timeout` seconds."""
        start = time.monotonic()
        try:
            liveness = self.ping(timeout)
            round_trip_ms = 1e3 * (time.monotonic() - start)
            left = max(0.01, timeout - (time.monotonic() - start))
            health = self._health.Check(_READINESS, timeout=left)
        except grpc.RpcError as error:
            return Probe(self.service, self.target, reachable=False, ready=False, detail=self._why(error, timeout))
        detail = ""
        if health.status != health_pb2.HealthCheckResponse.SERVING:
            detail = "starting or draining"
        missing = [f"{d.name}: {d.detail or 'not ready'}" for d in liveness.dependencies if not d.ready]
        detail = "; ".join(filter(None, [detail, *missing]))
        return Probe(self.service, self.target, True, not detail, detail, liveness, round_trip_ms)

    def _why(self, error: grpc.RpcError, timeout: float) -> str:
        if error.code() == grpc.StatusCode.UNAVAILABLE and reason_of(error) == "UNAVAILABLE":
            return f"cannot reach the {self.service} at {self.target}: start it with `kvblend up`"
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the {self.service} at {self.target} gave no answer within {timeout:g} s"
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return f"{self.target} answers, but is no kvblend {_NAMES[self.service]}"
        return f"the {self.service} at {self.target} answered {reason_of(error)}: {error.details()}"

    def close(self) -> None:
        self._channel.close()


def probe_all(peers: list[Peer], timeout: float) -> list[Probe]:
    """All at once, so that one that hangs delays no other."""
    if not peers:
        return []
    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(lambda peer: peer.probe(timeout), peers))
