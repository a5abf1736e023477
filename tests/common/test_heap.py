"""A service keeps the memory that a long prompt's call has freed."""

import platform
import subprocess
import sys

import pytest

# Page faults of a hundred rounds, of which each allocates 4 MiB in pieces of 512 KiB and frees them.
_ROUNDS = """
import ctypes, resource, sys
from services.common.heap import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def round():
    pieces = [libc.malloc(512 << 10) for _ in range(8)]
    for piece in pieces:
        ctypes.memset(piece, 1, 512 << 10)
    for piece in reversed(pieces):
        libc.free(piece)
for _ in range(3):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", _ROUNDS, how], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep memory by rules of their own")
def test_memory_that_calls_free_is_used_again_without_page_faults() -> None:
    pages = 100 * (4 << 20) // 4096
    assert _faults("kept") < pages / 100
    # Else the setting is for nothing.
    assert _faults("as it is") > pages / 2
