"""The memory behind the arena: really there or refused, huge pages and NUMA nodes as far as the system has them."""

import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.store.arena.arena import check_room
from services.store.arena.memory import FileSystem, _kind, file_system, huge_page_bytes, reserve
from services.store.arena.numa import Placement, memory_nodes, parse_nodes, place, placements

_MIB = 1 << 20


@pytest.fixture
def mounted(shm_dir: Path) -> Iterator[Path]:
    """A memory file system of 16 MiB that gives huge pages to whom asks."""
    folder = shm_dir / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m,huge=advise", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_every_byte_is_allocated_at_once(shm_dir: Path) -> None:
    path = shm_dir / "slab-0000"
    assert reserve(path, 4 * _MIB) == []
    assert path.stat().st_blocks * 512 >= 4 * _MIB


def test_a_file_that_does_not_fit_is_an_error_and_never_a_signal(mounted: Path) -> None:
    assert file_system(mounted) == FileSystem("tmpfs", 4096, 16 * _MIB)
    with pytest.raises(OSError, match="No space left"):
        reserve(mounted / "slab-0000", 17 * _MIB)


def test_huge_pages_are_used_where_the_file_system_gives_them(mounted: Path) -> None:
    slab = mounted / "slab-0000"
    reserve(slab, 8 * _MIB)
    with slab.open("r+b") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE):
        found = huge_page_bytes([slab])
    assert found % (2 * _MIB) == 0
    assert found <= 8 * _MIB
    allowed = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    if "[deny]" not in allowed:
        assert found == 8 * _MIB


def test_only_the_arenas_own_maps_count_as_its_huge_pages() -> None:
    def entry(path: str, kind: str, size: int) -> str:
        return f"7f00{size:04x}-7f01 rw-s 00000000 00:19 17 {path}\nSize: 9999 kB\n{kind}: {size} kB\nVmFlags: rd wr\n"

    slabs = [Path("/a b/slab-0000"), Path("/a b/slab-0001")]
    maps = entry("/a b/slab-0000", "ShmemPmdMapped", 4096) + entry("/other/slab-0000", "ShmemPmdMapped", 2048)
    maps += entry("", "AnonHugePages", 2048) + entry("/a b/slab-0001", "Shared_Hugetlb", 2048)
    assert huge_page_bytes(slabs, maps) == 6 * _MIB


def test_the_innermost_mount_says_what_a_directory_is() -> None:
    mounts = """22 1 0:2 / / rw - ext4 /dev/vda rw
23 22 0:19 / /dev/shm rw,relatime shared:3 - tmpfs tmpfs rw
24 22 0:20 / /dev/huge\\040pages rw - hugetlbfs none rw,pagesize=2M
"""
    assert _kind(Path("/dev/shm/kvblend"), mounts) == "tmpfs"
    assert _kind(Path("/dev/huge pages/kvblend"), mounts) == "hugetlbfs"
    assert _kind(Path("/dev/shmother"), mounts) == "ext4"


@pytest.mark.parametrize(
    ("slab_bytes", "missing", "parts"),
    [(4 * _MIB, 9 * _MIB, [9 * _MIB, 8 * _MIB]), (3 * _MIB, _MIB, [3 * _MIB, 2 * _MIB])],
)
def test_what_cannot_be_held_is_refused_with_both_sizes(slab_bytes: int, missing: int, parts: list[int]) -> None:
    with pytest.raises(SystemExit) as refusal:
        check_room(Path("/x"), 8 * _MIB, slab_bytes, missing, FileSystem("hugetlbfs", 2 * _MIB, 8 * _MIB))
    line = str(refusal.value)
    assert all(str(part) in line for part in [8 * _MIB, *parts])
    assert "hugetlbfs" in line


def test_a_store_on_hugetlbfs_without_free_pages_is_refused_in_one_line(shm_dir: Path) -> None:
    folder = shm_dir / "huge"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "hugetlbfs", "none", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("hugetlbfs cannot be mounted here")
    try:
        free = file_system(folder).free_bytes
        command = [sys.executable, "-m", "services.store", "--listen", f"unix:{shm_dir}/s.sock", "--arena-dir"]
        command += [str(folder), "--arena-bytes", str(free + (256 * _MIB))]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        (line,) = ended.stderr.splitlines()
        assert ended.returncode
        assert "hugetlbfs" in line
        assert f"room for {free}" in line
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# NUMA.


def test_slabs_are_dealt_out_to_the_nodes_and_the_rest_is_interleaved() -> None:
    assert placements(5, [0, 1]) == [Placement((node,)) for node in (0, 1, 0, 1)] + [Placement((0, 1))]
    assert placements(1, [0, 2, 5]) == [Placement((0, 2, 5))]


def test_one_node_leaves_nothing_to_choose(tmp_path: Path) -> None:
    assert placements(3, [0]) == [None, None, None]
    assert memory_nodes(tmp_path / "missing") == [0]


def test_the_kernels_lists_are_read() -> None:
    assert parse_nodes("0-1,4,6-7\n") == [0, 1, 4, 6, 7]
    with pytest.raises(ValueError, match="invalid literal"):
        parse_nodes("")


def test_the_system_takes_a_placement_on_a_node_that_it_has() -> None:
    node = memory_nodes()[0]
    with mmap.mmap(-1, _MIB) as memory:
        try:
            place(memory, Placement((node,)))
        except PermissionError:
            pytest.skip("mbind is not allowed here")
        memory[0] = 1
    with mmap.mmap(-1, _MIB) as memory, pytest.raises(OSError, match="mbind"):
        place(memory, Placement((1023,)))
