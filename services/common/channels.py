"""Channels to other services: one a target a process, keepalive on, every call with a deadline."""

import ipaddress
import json
from collections.abc import Sequence
from typing import Any

import grpc

from kvblend.host_calls import host_channel

# Below the server's permitted ping interval, else it answers GOAWAY too_many_pings.
CLIENT_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    # A request above this is not tried again; the default is 64 K tokens.
    ("grpc.per_rpc_retry_buffer_size", 16 << 20),
    # A restarted neighbour is tried again within a second, not after the default's minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one attempt may take: a busy server does not accept at once.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A stream of answers is read by the thread that asks for the next, not through another one.
    ("SingleThreadedUnaryStream", 1),
    # When a connection ends, a name is asked for new addresses this soon again: replicas come and go.
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),
]

_RETRY_POLICY = {
    "maxAttempts": 3,
    "initialBackoff": "0.005s",
    "maxBackoff": "0.05s",
    "backoffMultiplier": 3,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def _service_config(replicated: bool, repeatable: Sequence[str]) -> str:
    # No `timeout` here: grpcio fires it about a second early. A refused client certificate looks like
    # UNAVAILABLE too, so retries must end by themselves: throttling.
    config: dict[str, Any] = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
    }
    if replicated:
        config["healthCheckConfig"] = {"serviceName": "readiness"}
    if repeatable:
        names = [dict(zip(("service", "method"), name.split("/"), strict=True)) for name in repeatable]
        config["methodConfig"] = [{"name": names, "retryPolicy": _RETRY_POLICY}]
    return json.dumps(config)


def open_channel(target: str, *, replicated: bool = False, repeatable: Sequence[str] = ()) -> grpc.Channel:
    """A channel to whatever is behind a target (see `target_of`) that refuses calls without a timeout.

    Session streams (stream-stream) are exempt: heartbeats bound them.

    Args:
        replicated: each call goes to another one of the servers behind the target that say they are ready.
        repeatable: "package.Service/Method" of calls that may be carried out twice: if a server cannot be
            reached or says UNAVAILABLE, another is asked within the call's deadline.
    """
    options = [*CLIENT_OPTIONS, ("grpc.service_config", _service_config(replicated, repeatable))]
    # No interceptor: a call through one on a channel that another thread closes ends the process (SIGSEGV).
    return host_channel(target, grpc.insecure_channel(target, options=options), repeatable)


def target_of(addresses: str) -> str:
    """gRPC's target for one address, or for several replicas: comma-separated.

    One address is host:port (every address of that name), dns:///name:port or unix:/path. Several are IP:port
    of one family, or unix:/path; hosts by name belong behind one name.

    Raises:
        ValueError: says what is allowed.
    """
    several = addresses.split(",")
    if all(address.startswith("unix:/") and len(address) > len("unix:/") for address in several):
        return "unix:" + ",".join(address.removeprefix("unix:") for address in several)
    pairs = [address.rpartition(":") for address in several]
    if not all(host and port.isdigit() and not host.startswith("unix:") for host, _, port in pairs):
        raise ValueError("must be host:port, dns:///name:port or unix:/absolute/path")
    if len(several) == 1:
        return addresses
    families = {_family(host) for host, _, _ in pairs}
    if len(families) > 1 or 0 in families:
        raise ValueError(
            "several must be IP:port of one family or unix:/path; put hosts behind one name: dns:///name:port"
        )
    return f"ipv{families.pop()}:{addresses}"


def _family(host: str) -> int:
    """4 or 6; 0: a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version
    except ValueError:
        return 0
