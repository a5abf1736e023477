"""Channels to other services: one a target a process, keepalive on, every call with a deadline."""

from collections.abc import Callable
from typing import Any

import grpc

# Below the server's permitted ping interval, else it answers GOAWAY too_many_pings.
CLIENT_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    # A restarted neighbour is tried again within a second, not after the default's minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # No `timeout` in a service config: grpcio fires it about a second early.
    (
        "grpc.service_config",
        '{"loadBalancingConfig": [{"round_robin": {}}], "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}}',
    ),
]


class MissingDeadline(RuntimeError):
    """A programming error: a call was made without a timeout."""


class _DeadlineRule(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    def _checked(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        if details.timeout is None:
            raise MissingDeadline(f"{details.method} was called without a timeout")
        return continuation(details, request)

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return self._checked(continuation, details, request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return self._checked(continuation, details, request)


def open_channel(target: str) -> grpc.Channel:
    """A channel to `host:port`, `dns:///name:port` or `unix:/path` that refuses calls without a timeout.

    Session streams (stream-stream) are exempt: heartbeats bound them.
    """
    return grpc.intercept_channel(grpc.insecure_channel(target, options=CLIENT_OPTIONS), _DeadlineRule())
