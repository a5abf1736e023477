"""Maps are filled before their use."""

import mmap
import tempfile

import numpy as np

from services.common.populate import populate


def _resident_pages(memory: mmap.mmap) -> int:
    """Of this map, in this process's page tables."""
    start = np.frombuffer(memory, np.uint8).ctypes.data
    with open("/proc/self/smaps") as maps:
        inside = False
        for line in maps:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                inside = int(first.split("-")[0], 16) == start
            elif inside and first == "Rss:":
                return int(line.split()[1]) // 4
    return 0


def test_every_page_of_a_map_is_at_hand_after_it_was_filled() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(4 << 20)
        memory = mmap.mmap(file.fileno(), 4 << 20)
        assert _resident_pages(memory) == 0
        assert populate(np.frombuffer(memory, np.uint8))
        assert _resident_pages(memory) == 1024


def test_a_map_without_memory_behind_it_is_said_and_no_signal() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(1 << 20)
        memory = mmap.mmap(file.fileno(), 1 << 20)
        file.truncate(0)
        assert not populate(np.frombuffer(memory, np.uint8))
