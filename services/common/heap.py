"""The C heap of a service: what calls free is kept for the next calls.

glibc gives freed memory of more than a few hundred KiB back to the system at once. A call that carries a prompt of
128 K tokens allocates several times 512 KiB, and would have the system fill every page of them with zeros anew: about
a millisecond in each service, several times what the call's own copies take.
"""

import ctypes
import sys

# Of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# glibc takes no more than 32 MiB for the second.
_KEPT_BYTES = 64 << 20
_LARGEST_KEPT_BYTES = 32 << 20


def keep_freed_memory() -> None:
    """Up to 64 MiB that are free at the end of each of the process's heaps stay with it. Elsewhere than with glibc:
    nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
