"""This agent's view of its store's arena: blocks to copy from and to, and whether they are still what they were."""

import mmap
import os
import threading
from pathlib import Path

import numpy as np

from kvblend.v1 import common_pb2 as common
from services.common.arena_format import open_catalog, slab_path
from services.common.columns import Numbers
from services.gpu_agent.devices.base import Bytes, Device


class Arena:
    """Maps catalog and slabs of one directory, slabs at first use.

    `device` is told of every slab that is mapped.

    Raises:
        OSError: a file is missing or cannot be opened.
        CatalogFormatError: the catalog is of another format.
    """

    def __init__(self, directory: Path, device: Device) -> None:
        self.directory = directory
        self._device = device
        self._catalog = open_catalog(directory)
        self.epoch = self._catalog.epoch
        self._mapping = threading.Lock()
        self._slabs: dict[int, Bytes] = {}

    def block(self, header: int, slab: int, offset: int, payload_bytes: int) -> Bytes:
        """The payload of an object, [payload_bytes] uint8, in the arena itself.

        Raises:
            ValueError: the place lies outside the arena.
            OSError: its slab cannot be mapped.
        """
        if header >= self._catalog.header_count or slab >= self._catalog.slabs:
            raise ValueError(f"header {header} or slab {slab} is not in the arena")
        end = offset + payload_bytes
        if end > self._catalog.slab_bytes or not payload_bytes:
            raise ValueError(f"bytes {offset} to {end} are not in a slab of {self._catalog.slab_bytes}")
        return self._slab(slab)[offset:end]

    def map_all(self) -> None:
        """Maps every slab now, for a device that needs time with them. Raises OSError, ValueError."""
        for slab in range(self._catalog.slabs):
            self._slab(slab)

    def _slab(self, number: int) -> Bytes:
        with self._mapping:
            slab = self._slabs.get(number)
            if slab is None:
                slab = self._slabs[number] = self._map(number)
                self._device.adopt(slab)
        return slab

    def _map(self, slab: int) -> Bytes:
        descriptor = os.open(slab_path(self.directory, slab), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # A file shorter than the catalog says is refused by mmap itself.
            return np.frombuffer(mmap.mmap(descriptor, self._catalog.slab_bytes), np.uint8)
        finally:
            os.close(descriptor)

    def staleness(self, headers: Numbers, generations: Numbers) -> Numbers:
        """Why blocks may no longer be what they were; REASON_UNSPECIFIED: they are. Ask after the last byte."""
        if self._catalog.epoch != self.epoch:
            return np.full(len(headers), common.REASON_STALE_EPOCH, np.int64)
        same = self._catalog.generations(headers) == generations
        return np.where(same, common.REASON_UNSPECIFIED, common.REASON_STALE_GENERATION)

    def close(self) -> None:
        """Gives the maps back; no copy may be running."""
        for slab in self._slabs.values():
            self._device.release(slab)
        self._slabs.clear()
        self._catalog.close()
