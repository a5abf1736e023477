"""Calls within a host, served: what gRPC serves on a unix socket, over a plain one beside it (host_calls.proto)."""
