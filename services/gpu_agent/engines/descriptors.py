"""Descriptors of engines' memory, in slots until a registration names them."""

import os
import resource
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

from kvblend.v1 import agent_pb2 as pb

_SLOT_BYTES = 16
# Open files that an agent wants, and those of them that it needs for other things.
_WANTED_FILES, _OTHER_FILES = 65_536, 512


class Chunk(NamedTuple):
    descriptor: int
    nbytes: int


# Slot -> chunks, in the order of their addresses.
Descriptors = Mapping[bytes, Sequence[Chunk]]
NO_DESCRIPTORS: Descriptors = MappingProxyType({})


class Refused(Exception):
    """In a line for people."""


class DescriptorSlots:
    """At most `most` descriptors at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._lock = threading.Lock()
        # slot -> (instance id, chunks).
        self._slots: dict[bytes, tuple[str, list[Chunk]]] = {}

    def hold(self, descriptors: Sequence[int]) -> None:
        """Takes them over. Raises Refused if they are too many; then they are closed."""
        with self._lock:
            self._held += len(descriptors)
            full = self._held > self._most
        if full:
            self.close(descriptors)
            raise Refused(f"the agent holds no more than {self._most} descriptors: raise its limit of open files")

    def add(self, instance_id: str, chunks: list[Chunk]) -> bytes:
        """The slot that they, which are held already, are in now."""
        slot = secrets.token_bytes(_SLOT_BYTES)
        with self._lock:
            self._slots[slot] = instance_id, chunks
        return slot

    def drop(self, slot: bytes) -> None:
        """Unless a registration has it."""
        with self._lock:
            _, chunks = self._slots.pop(slot, ("", []))
        self.close([chunk.descriptor for chunk in chunks])

    @contextmanager
    def claimed(self, instance_id: str, handles: Iterable[pb.DeviceHandle]) -> Iterator[Descriptors]:
        """The instance's own of the slots that the handles name, for good: they are empty afterwards."""
        taken: dict[bytes, list[Chunk]] = {}
        with self._lock:
            for handle in handles:
                owner, _ = self._slots.get(handle.handle, (None, []))
                if handle.kind == pb.HANDLE_KIND_CUDA_VMM and owner == instance_id:
                    _, taken[handle.handle] = self._slots.pop(handle.handle)
        try:
            yield taken
        finally:
            for chunks in taken.values():
                self.close([chunk.descriptor for chunk in chunks])

    def close(self, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        with self._lock:
            self._held -= len(descriptors)


def most_descriptors() -> int:
    """How many the process may hold, once its limit of open files is as high as it may set it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(0, limit - _OTHER_FILES)
