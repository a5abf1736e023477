"""How a store's arena lies in its directory; stores write it, agents map and read it.

    catalog         first page: FILE_HEADER; then `headers` records of HEADER, from byte PAGE on
    slab-0000 ...   `slab_bytes` each; an object's block lies inside one slab
    sessions/<hex>  one file a session; its agent holds an flock on it while it lives, and removes it
                    only when no copy of that session can run any more
    lock            the store holds an flock on it while it lives

A block: payload (canonical KV bytes), then at the next multiple of META_ALIGN a serialized ObjectMeta.
A header's generation is raised before its block may hold anything else, and the epoch at every start of
the store: a reader that finds both unchanged after its copy has read one object's bytes and nothing else.
"""

import fcntl
import mmap
import os
from enum import IntEnum
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

MAGIC = b"KVBARENA"
FORMAT_VERSION = 1
PAGE = 4096
META_ALIGN = 64
SESSION_ID_BYTES = 16

FILE_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("format_version", "<u4"),
        ("headers", "<u4"),
        ("epoch", "<u8"),
        ("slab_bytes", "<u8"),
        ("slabs", "<u4"),
        # 1 after an orderly stop: the next start need not verify what it finds.
        ("clean", "<u4"),
    ]
)

HEADER = np.dtype(
    {
        "names": [
            "generation",
            "state",
            "slab",
            "offset",
            "capacity_bytes",
            "payload_bytes",
            "meta_bytes",
            "flags",
            "checksum",
            "meta_checksum",
            "expires_at",
            "reservation",
            "session",
        ],
        "formats": ["<u8", "<u4", "<u4", "<u8", "<u8", "<u8", "<u4", "<u4", "<u8", "<u8", "<f8", "<u8", "V16"],
        "offsets": [0, 8, 12, 16, 24, 32, 40, 44, 48, 56, 64, 72, 80],
        "itemsize": 128,
    }
)

FLAG_PINNED = 1
# All of the chunk has been acknowledged by L2.
FLAG_IN_L2 = 2


class BlockState(IntEnum):
    FREE = 0
    # A writer may be copying into it; `session` and `reservation` say who.
    RESERVED = 1
    COMMITTED = 2
    # Its writer expired or vanished, and may still be copying.
    QUARANTINED = 3
    # No longer served; freed when its last reader has stopped.
    CONDEMNED = 4


def catalog_path(directory: str | Path) -> Path:
    return Path(directory) / "catalog"


def slab_path(directory: str | Path, slab: int) -> Path:
    return Path(directory) / f"slab-{slab:04d}"


def session_path(directory: str | Path, session_id: bytes) -> Path:
    return Path(directory) / "sessions" / session_id.hex()


def meta_offset(payload_bytes: int) -> int:
    """Where the ObjectMeta starts, from the block's first byte."""
    return -(-payload_bytes // META_ALIGN) * META_ALIGN


class CatalogFormatError(RuntimeError):
    """The catalog is not one, is of another format version, or is shorter than it says."""


class CatalogView:
    """A read-only view of a store's catalog, for agents. Cheap to read, no locks."""

    def __init__(self, directory: str | Path) -> None:
        """Raises OSError if there is no catalog, CatalogFormatError if it cannot be used."""
        with catalog_path(directory).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        page = check_file_header(self._map)
        headers = np.frombuffer(self._map, HEADER, count=int(page["headers"]), offset=PAGE)
        self._page: Any = page
        self._generation: npt.NDArray[np.uint64] = headers["generation"]
        self._state: npt.NDArray[np.uint32] = headers["state"]
        self.header_count = len(headers)
        self.slabs = int(page["slabs"])
        self.slab_bytes = int(page["slab_bytes"])

    @property
    def epoch(self) -> int:
        return int(self._page["epoch"])

    def generation(self, header: int) -> int:
        return int(self._generation[header])

    def generations(self, headers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._generation[headers].astype(np.int64)

    def state(self, header: int) -> BlockState:
        return BlockState(int(self._state[header]))

    def close(self) -> None:
        del self._page, self._generation, self._state
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_catalog(directory: str | Path) -> CatalogView:
    return CatalogView(directory)


def check_file_header(data: mmap.mmap) -> Any:
    """The catalog's first page as a FILE_HEADER record over `data`. Raises CatalogFormatError."""
    if len(data) < PAGE:
        raise CatalogFormatError(f"the catalog has {len(data)} bytes, less than its first page")
    page = np.frombuffer(data, FILE_HEADER, count=1)[0:1].reshape(())
    if page["magic"] != MAGIC or page["format_version"] != FORMAT_VERSION:
        raise CatalogFormatError(f"not a catalog of format version {FORMAT_VERSION}")
    if len(data) < PAGE + int(page["headers"]) * HEADER.itemsize:
        raise CatalogFormatError(f"the catalog is too short for its {int(page['headers'])} headers")
    return page


class SessionFile:
    """An agent's proof of life: an flock on sessions/<hex> that the kernel drops when the process ends.

    Take it before the session's hello; the store refuses a session whose file is not locked.
    """

    def __init__(self, directory: str | Path, session_id: bytes) -> None:
        """Raises OSError if the directory is not there or the session is somebody else's."""
        path = session_path(directory, session_id)
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o660)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)
