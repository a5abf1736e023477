"""Checks the arena of a store that does not run, under its lock; without a fix nothing in it changes.

Headers and catalog are read as a start would read them: what a start would drop is what disagrees.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from kvblend.v1 import store_pb2
from services.common.arena_format import CatalogFormatError, catalog_path, check_file_header, slab_path
from services.common.errors import KvblendError
from services.store.arena.arena import Arena
from services.store.check.blocks import check_blocks
from services.store.check.checks import run_part
from services.store.check.findings import Check, Inspection
from services.store.check.objects import check_objects
from services.store.parts import make_state
from services.store.publishing.publisher import NoMatchers
from services.store.settings import StoreSettings
from services.store.state import Clock


class _StoppedArena:
    """As much of an `Arena` as recovery and checks use. Changes to the catalog stay in this process unless fixing."""

    def __init__(self, directory: Path, fix: bool) -> None:
        """Raises OSError, CatalogFormatError."""
        self.directory = directory
        with catalog_path(directory).open("r+b" if fix else "rb") as file:
            access = mmap.ACCESS_WRITE if fix else mmap.ACCESS_COPY
            self.catalog = mmap.mmap(file.fileno(), 0, access=access)
        page: Any = check_file_header(self.catalog)
        self.headers, self.slabs, self.slab_bytes = (int(page[name]) for name in ("headers", "slabs", "slab_bytes"))
        self.was_clean = True
        self._slabs = [self._map(slab_path(directory, slab)) for slab in range(self.slabs)]

    def _map(self, path: Path) -> mmap.mmap:
        with path.open("rb") as file:
            try:
                return mmap.mmap(file.fileno(), self.slab_bytes, access=mmap.ACCESS_READ)
            except ValueError:
                raise CatalogFormatError(f"{path.name} is shorter than the catalog says") from None

    def view(self, slab: int, offset: int, size: int) -> memoryview:
        return memoryview(self._slabs[slab])[offset : offset + size]


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def check_stopped(directory: Path, fix: bool) -> Iterator[store_pb2.CheckStoreResponse]:
    """Blocks and objects; the matchers' log and L2 can only be compared by a running store.

    Raises:
        KvblendError: INVALID_ARGUMENT if there is no arena, or its store runs.
    """
    try:
        with _locked(directory):
            arena = _StoppedArena(directory, fix)
            settings = StoreSettings(arena_dir=str(directory))  # type: ignore[call-arg]
            state, writes, _ = make_state(settings, cast(Arena, arena), Clock(), "")
            state.connect(NoMatchers("", 0), lambda _: None)
            for part, check in (
                (store_pb2.CHECK_PART_BLOCKS, _check_blocks),
                (store_pb2.CHECK_PART_OBJECTS, check_objects),
            ):
                inspection = Inspection(state, writes, directory, fix, lambda: float("inf"))
                yield from run_part(part, check, inspection)
    except BlockingIOError:
        raise KvblendError("INVALID_ARGUMENT", f"the store of {directory} runs: check it through --store") from None
    except FileNotFoundError as error:
        raise KvblendError("INVALID_ARGUMENT", f"there is no arena in {directory}: {error.filename}") from None
    except (OSError, CatalogFormatError) as error:
        raise KvblendError("INVALID_ARGUMENT", f"the arena in {directory} cannot be read: {error}") from None


def _check_blocks(inspection: Inspection) -> Check:
    for kind, count in inspection.state.dropped_at_start.items():
        inspection.findings.add_many(kind, count, count * inspection.fix, "found while the headers were read")
    yield from check_blocks(inspection)
