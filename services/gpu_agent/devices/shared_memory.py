"""Opens an engine's shared-memory file by name, within one directory only."""

import mmap
import os
import re
import stat
from pathlib import Path

from kvblend.v1 import agent_pb2 as pb
from services.common.errors import KvblendError

# No slash and no leading dot: a name can leave the directory neither upwards nor downwards.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


class SharedMemoryFile:
    """A mapping of one handle, read-write.

    Raises:
        KvblendError: HANDLE_UNUSABLE for a bad name, a missing file, one that is no plain file or that memory
            cannot be reserved for; HANDLE_OUT_OF_BOUNDS for a file shorter than the handle says.
    """

    def __init__(self, handle: pb.DeviceHandle, directory: Path) -> None:
        self.name = _checked_name(handle)
        self._end = handle.allocation_offset + handle.bytes
        try:
            self._fd = os.open(directory / self.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(f"{self.name}: {error.strerror}") from error
        try:
            self._check_file()
            self.map = mmap.mmap(self._fd, self._end)
        except BaseException:
            os.close(self._fd)
            raise

    def _check_file(self) -> None:
        facts = os.fstat(self._fd)
        if not stat.S_ISREG(facts.st_mode):
            raise _unusable(f"{self.name} is not a plain file")
        if facts.st_size < self._end:
            raise KvblendError(
                "HANDLE_OUT_OF_BOUNDS", f"{self.name} has {facts.st_size} bytes; the handle ends at {self._end}"
            )
        try:
            # A hole that could not be filled later would be a bus error in the middle of a copy.
            os.posix_fallocate(self._fd, 0, self._end)
        except OSError as error:
            raise _unusable(f"{self.name}: {self._end} bytes cannot be reserved: {error.strerror}") from error

    def check(self) -> None:
        """Raises KvblendError HANDLE_UNUSABLE if the file was cut short since; touching it would be a bus error."""
        if os.fstat(self._fd).st_size < self._end:
            raise _unusable(f"{self.name} was cut short by the engine")

    def close(self) -> None:
        self.map.close()
        os.close(self._fd)


def _unusable(text: str) -> KvblendError:
    return KvblendError("HANDLE_UNUSABLE", text)


def _checked_name(handle: pb.DeviceHandle) -> str:
    if handle.kind in (pb.HANDLE_KIND_CUDA_IPC, pb.HANDLE_KIND_CUDA_VMM):
        raise _unusable("a CUDA handle needs the cuda device; this agent runs the cpu device")
    if handle.kind != pb.HANDLE_KIND_SHARED_MEMORY:
        raise _unusable("the handle has no known kind")
    name = handle.handle.decode("utf-8", "replace")
    if not _NAME.fullmatch(name):
        raise _unusable("a shared-memory handle is the bare name of a file: letters, digits, dots, dashes, underscores")
    if not handle.bytes:
        raise _unusable(f"{name} is declared with 0 bytes")
    return name
