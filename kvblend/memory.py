"""Shared memory that an engine gives its agent: KV tensors live in it, so that no bytes pass through gRPC."""

import mmap
import os
import secrets
import weakref
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvblend.v1 import agent_pb2 as pb

SHM_DIR = Path("/dev/shm")


class SharedBuffer:
    """A file in the shared-memory directory, mapped read-write and unlinked at `close`.

    `array` is its memory, [nbytes] uint8, zeroed; view it with any dtype and shape. The pages are truly
    reserved, so that a full file system is an error here and never a bus error at a later touch.

    Raises:
        OSError: the directory cannot hold that many bytes.
    """

    def __init__(self, nbytes: int, directory: Path = SHM_DIR) -> None:
        if nbytes <= 0:
            raise ValueError(f"a shared buffer of {nbytes} bytes cannot be made")
        self.name = f"kvblend-{os.getpid()}-{secrets.token_hex(8)}"
        self.nbytes = nbytes
        path = directory / self.name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        # Also unlinks when the owner forgets `close` or the interpreter exits.
        self._unlink = weakref.finalize(self, path.unlink, missing_ok=True)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            self._map = mmap.mmap(descriptor, nbytes)
        except OSError as error:
            self._unlink()
            raise OSError(error.errno, f"{directory} cannot hold {nbytes} more bytes: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def handle(self) -> pb.DeviceHandle:
        """The whole buffer as a registration names it."""
        return pb.DeviceHandle(
            kind=pb.HANDLE_KIND_SHARED_MEMORY,
            handle=self.name.encode(),
            bytes=self.nbytes,
            exporter_pid=os.getpid(),
        )

    def close(self) -> None:
        """Removes the name; the memory itself goes with the last view of `array`. Idempotent."""
        self._unlink()
        self.array = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:
            # Somebody still holds a view; the map closes with it.
            return

    def __enter__(self) -> "SharedBuffer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
