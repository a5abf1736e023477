"""A checksum computed while copying is the one of the whole, and maps are filled before their use."""

import mmap
import tempfile

import numpy as np
import pytest
import xxhash

from services.common.checksums import PIECE_BYTES, copy_with_checksum
from services.common.populate import populate


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 7])
def test_a_copy_is_whole_and_its_checksum_is_that_of_the_whole(size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    target = np.zeros(size, np.uint8)
    assert copy_with_checksum(target, source) == xxhash.xxh3_64_intdigest(source.tobytes())
    assert (target == source).all()


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
