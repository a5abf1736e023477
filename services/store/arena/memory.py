"""Memory behind a file: truly there before anybody relies on it, in huge pages and near its user where that can be."""

import mmap
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.common.populate import populate
from services.store.arena.numa import Placement, place

_HUGE_SIZES = re.compile(r"^(?:ShmemPmdMapped|FilePmdMapped|Shared_Hugetlb|Private_Hugetlb):\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class FileSystem:
    """`block_bytes`: what file sizes must be multiples of."""

    kind: str
    block_bytes: int
    free_bytes: int


def file_system(directory: Path) -> FileSystem:
    """Raises OSError."""
    facts = os.statvfs(directory)
    kind = _kind(directory.resolve(), Path("/proc/self/mountinfo").read_text())
    if kind != "hugetlbfs":
        return FileSystem(kind, mmap.PAGESIZE, facts.f_bavail * facts.f_frsize)
    # Without a limit of its own it does not say how many pages the system has left.
    free = facts.f_bavail if facts.f_blocks else _free_huge_pages(facts.f_bsize)
    return FileSystem(kind, facts.f_bsize, free * facts.f_bsize)


def _kind(directory: Path, mounts: str) -> str:
    """Of the innermost mount that holds the directory."""
    best = (0, "unknown")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4]))
        if directory.is_relative_to(point):
            # A later mount at the same point hides the earlier one.
            best = max(best, (len(point.parts), right.split()[0]), key=lambda found: found[0])
    return best[1]


def _free_huge_pages(page_bytes: int) -> int:
    folder = Path(f"/sys/kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB")
    return int((folder / "free_hugepages").read_text()) - int((folder / "resv_hugepages").read_text())


def reserve(path: Path, size: int, placement: Placement | None = None) -> list[str]:
    """Makes the file, every byte of it allocated: a hole would be a bus error later. What was asked for in vain.

    Raises OSError if there is no room.
    """
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o660)
    try:
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as memory:
            refused = _prepare(memory, placement)
        os.posix_fallocate(fd, 0, size)
        return refused
    finally:
        os.close(fd)


def _prepare(memory: mmap.mmap, placement: Placement | None) -> list[str]:
    """Hints have to come before the memory: allocated through this map, it heeds them."""
    refused = []
    if placement is not None:
        try:
            place(memory, placement)
        except OSError as error:
            refused.append(f"NUMA nodes {placement.nodes}: {error.strerror or error}")
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    populate(np.frombuffer(memory, np.uint8))
    return refused


def huge_page_bytes(paths: Iterable[Path], maps: str | None = None) -> int:
    """Of these files' maps in this process, what lies in huge pages."""
    names = {str(path) for path in paths}
    text = maps if maps is not None else Path("/proc/self/smaps").read_text()
    total = 0
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        first = entry.partition("\n")[0].split(None, 5)
        if len(first) == 6 and first[5] in names:
            total += sum(int(size) for size in _HUGE_SIZES.findall(entry)) << 10
    return total
