"""Unix sockets of services in a folder: calls within a host are faster over them than over TCP (decision 17)."""

import os
import socket
from pathlib import Path

from cli.targets import SERVICES
from kvblend.host_calls.frames import SUFFIX

# Of a unix socket's path.
_MOST_BYTES = 107
# An address is a URI to gRPC, and several are written with commas.
_NOT_IN_ADDRESSES = "%#?,"


def socket_in(folder: Path, service: str) -> str:
    """Its address."""
    return f"unix:{folder / service}.sock"


def why_no_sockets(folder: Path) -> str:
    """What is against sockets in a folder that exists, by its absolute path; empty: nothing is."""
    longest = max(len(os.fsencode(f"{folder / service}.sock{SUFFIX}")) for service in SERVICES)
    if longest > _MOST_BYTES:
        return f"a socket's path there would have {longest} bytes, and {_MOST_BYTES} are allowed"
    if any(character in str(folder) for character in _NOT_IN_ADDRESSES):
        return f"its name has one of {_NOT_IN_ADDRESSES}"
    trial = folder / "trial.sock"
    try:
        # Of a process that was killed.
        trial.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(trial))
        trial.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""
