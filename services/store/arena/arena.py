"""The arena: slabs of shared memory in one directory, truly reserved, found again after a crash."""

import fcntl
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from services.common.arena_format import (
    FILE_HEADER,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    PAGE,
    CatalogFormatError,
    catalog_path,
    check_file_header,
    slab_path,
)
from services.common.logs import get_logger
from services.store.arena.memory import FileSystem, file_system, huge_page_bytes, reserve
from services.store.arena.numa import memory_nodes, placements

_log = get_logger("arena")

# One header for each so many bytes of slabs: 0.4 % of the arena, and objects are rarely smaller.
_BYTES_PER_HEADER = 32 << 10
_MIN_HEADERS = 1024


def header_count(arena_bytes: int) -> int:
    return max(_MIN_HEADERS, arena_bytes // _BYTES_PER_HEADER)


def catalog_bytes(arena_bytes: int, block_bytes: int = PAGE) -> int:
    """Rounded up to `block_bytes`."""
    return -(-(PAGE + header_count(arena_bytes) * HEADER.itemsize) // block_bytes) * block_bytes


def refuse(setting: str, value: object, why: str) -> NoReturn:
    sys.exit(f"kvblend store: setting {setting} = {value!r} is refused: {why}")


def check_room(directory: Path, arena_bytes: int, slab_bytes: int, missing_bytes: int, system: FileSystem) -> None:
    """Exits with one line if the file system cannot hold what is still missing of the arena."""
    if slab_bytes % system.block_bytes:
        refuse(
            "arena_bytes",
            arena_bytes,
            f"slabs of {slab_bytes} bytes are not whole pages of {system.block_bytes}, as {system.kind} needs; "
            "choose sizes that are multiples of it",
        )
    if missing_bytes > system.free_bytes:
        refuse(
            "arena_bytes",
            arena_bytes,
            f"{missing_bytes} bytes are needed and the file system of {directory} ({system.kind}) has room for "
            f"{system.free_bytes}",
        )


class Arena:
    """The mapped files. Holds the directory's lock until `close`.

    A start raises the epoch. Files of another size (the settings have changed) are retired: their catalog's
    epoch is raised, so that agents that still map them fail their checks, and they are made anew.
    """

    def __init__(self, directory: Path, arena_bytes: int, slab_bytes: int) -> None:
        """Exits with one line if the directory is another store's or too small. Sizes in bytes."""
        self.directory = directory
        self.slab_bytes = slab_bytes
        self.slabs = arena_bytes // slab_bytes
        self.headers = header_count(arena_bytes)
        self._arena_bytes = arena_bytes
        try:
            (directory / "sessions").mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self.reattached, old_epoch = self._find_old()
            self._system = file_system(directory)
            self._make_slabs()
            self._slabs = [self._map(slab_path(directory, slab)) for slab in range(self.slabs)]
            if not self.reattached:
                self._make_catalog()
            self.catalog = self._map(catalog_path(directory))
            # As they were found or made: the system may still change small ones into huge ones.
            self.huge_page_bytes = huge_page_bytes(self._slab_paths())
        except OSError as error:
            refuse("arena_dir", str(directory), error.strerror or str(error))
        self._page: Any = check_file_header(self.catalog)
        # False: the last owner was killed, so what it left is verified on first read.
        self.was_clean = bool(self._page["clean"])
        self._page["clean"] = 0
        # Never lower than a lost arena's epoch: a stream at an old epoch would be ignored by matchers.
        self.epoch = max(old_epoch + 1, time.time_ns() // 1_000_000)
        self._page["epoch"] = self.epoch
        _log.info(
            "arena mapped",
            bytes=arena_bytes,
            slabs=self.slabs,
            file_system=self._system.kind,
            huge_page_bytes=self.huge_page_bytes,
            reattached=self.reattached,
        )

    def _take_lock(self) -> int:
        fd = os.open(self.directory / "lock", os.O_CREAT | os.O_RDWR, 0o660)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse("arena_dir", str(self.directory), "another store runs in this directory")
        return fd

    def _find_old(self) -> tuple[bool, int]:
        """(the files there are this arena, their epoch); files that are not are retired."""
        try:
            with catalog_path(self.directory).open("r+b") as file:
                data = mmap.mmap(file.fileno(), 0)
            page = check_file_header(data)
        except FileNotFoundError:
            self._remove_files()
            return False, 0
        except (CatalogFormatError, ValueError) as error:
            _log.warning("unusable catalog, starting empty", error=str(error))
            self._remove_files()
            return False, 0
        epoch = int(page["epoch"])
        shape = (int(page["headers"]), int(page["slabs"]), int(page["slab_bytes"]))
        wanted = (self.headers, self.slabs, self.slab_bytes)
        if shape == wanted and self._whole_slabs() == self.slabs:
            return True, epoch
        _log.warning("the arena has another shape than before, starting empty", before=shape, now=wanted)
        page["epoch"] = epoch + 1
        self._remove_files()
        return False, epoch + 1

    def _whole_slabs(self) -> int:
        return sum(path.stat().st_size == self.slab_bytes for path in self.directory.glob("slab-*"))

    def _remove_files(self) -> None:
        """Slabs first: without a catalog they could not be told from another arena's."""
        for path in self.directory.glob("slab-*"):
            path.unlink()
        for path in self.directory.glob("catalog*"):
            path.unlink()

    def _slab_paths(self) -> list[Path]:
        return [slab_path(self.directory, slab) for slab in range(self.slabs)]

    def _make_slabs(self) -> None:
        missing = (self.slabs - self._whole_slabs()) * self.slab_bytes
        if not self.reattached:
            missing += catalog_bytes(self._arena_bytes, self._system.block_bytes)
        check_room(self.directory, self._arena_bytes, self.slab_bytes, missing, self._system)
        nodes = placements(self.slabs, memory_nodes())
        refused = [reserve(path, self.slab_bytes, node) for path, node in zip(self._slab_paths(), nodes, strict=True)]
        for why in sorted({line for lines in refused for line in lines}):
            _log.warning("the arena's memory lies where the system puts it", why=why)

    def _make_catalog(self) -> None:
        """Appears under its name only when whole: a start that was killed leaves no half catalog."""
        draft = self.directory / "catalog.new"
        reserve(draft, catalog_bytes(self._arena_bytes, self._system.block_bytes))
        with draft.open("r+b") as file:
            data = mmap.mmap(file.fileno(), 0)
        page = np.frombuffer(data, FILE_HEADER, count=1)
        page["magic"], page["format_version"], page["headers"] = MAGIC, FORMAT_VERSION, self.headers
        page["slab_bytes"], page["slabs"], page["clean"] = self.slab_bytes, self.slabs, 1
        draft.rename(catalog_path(self.directory))

    @staticmethod
    def _map(path: Path) -> mmap.mmap:
        with path.open("r+b") as file:
            # Populated: a first touch later would run at a tenth of the memory's speed.
            return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def view(self, slab: int, offset: int, size: int) -> memoryview:
        """Writable bytes [offset, offset + size) of a slab."""
        return memoryview(self._slabs[slab])[offset : offset + size]

    def close(self) -> None:
        """After this nothing may change the arena. The maps go with the process: views may be alive."""
        self._page["clean"] = 1
        os.close(self._lock)
