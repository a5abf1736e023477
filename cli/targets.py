"""Where the three services of `kvblend up` are, and how commands write an address."""

import socket

# The services' own default of `listen` (a test compares them).
MATCHER_LISTEN = "127.0.0.1:50051"
STORE_LISTEN = "127.0.0.1:50052"
AGENT_LISTEN = "127.0.0.1:50053"

# In start order; the engine-facing one is last.
SERVICES = ("matcher", "store", "agent")

_ANY_HOST = ("0.0.0.0", "[::]")
_LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:")


def target_of(listen: str) -> str:
    """The address to call a server at that listens on `listen` (comma-separated: the first)."""
    first = listen.split(",", 1)[0]
    host, _, port = first.rpartition(":")
    return f"127.0.0.1:{port}" if host in _ANY_HOST else first


def socket_of(listen: str) -> str:
    """The first unix socket of `listen`, which callers within the host should use; empty: there is none."""
    return next((address for address in listen.split(",") if address.startswith("unix:")), "")


def is_free(address: str) -> bool:
    """Whether a server may listen on one address: nothing else does, and a host:port is of this machine."""
    if address.startswith("unix:"):
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(address.removeprefix("unix:")) != 0
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return False
    family, kind, _, _, name = found[0]
    with socket.socket(family, kind) as probe:
        # As gRPC does: a connection that lingers from the last run is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(name)
        except OSError:
            return False
    return True


def is_exposed(listen: str) -> bool:
    """Whether other hosts can reach a server that listens on `listen`."""
    return any(not address.startswith(_LOOPBACK) for address in listen.split(","))
