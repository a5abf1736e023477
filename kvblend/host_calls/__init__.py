"""Calls to a service on the same host over a plain socket beside gRPC's: the same stubs, messages and errors."""

from kvblend.host_calls.channel import MissingDeadline, host_channel

__all__ = ["MissingDeadline", "host_channel"]
