"""Memory in chunks that are shared by descriptors, as CUDA's virtual memory management has it, made of plain memory."""

import ctypes
import mmap
import os
from pathlib import Path

from kvblend.v1 import agent_pb2 as pb
from services.gpu_agent.devices.cuda.driver import CudaError

GPU = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
_FIXED, _NO_ACCESS = 0x10, 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


class MemfdMemory:
    """An engine's chunks; the usable part begins at `offset`. Sizes are multiples of a page."""

    def __init__(self, chunk_bytes: list[int], offset: int = 0, nbytes: int | None = None) -> None:
        self.chunk_bytes = chunk_bytes
        self.offset = offset
        self.nbytes = sum(chunk_bytes) - offset if nbytes is None else nbytes
        self.files = [os.memfd_create("chunk") for _ in chunk_bytes]
        for file, size in zip(self.files, chunk_bytes, strict=True):
            os.ftruncate(file, size)

    def export(self, chunk: int) -> int:
        return os.dup(self.files[chunk])

    def handle(self, slot: bytes) -> pb.DeviceHandle:
        return pb.DeviceHandle(
            kind=pb.HANDLE_KIND_CUDA_VMM,
            handle=slot,
            device_uuid=GPU,
            allocation_offset=self.offset,
            bytes=self.nbytes,
        )

    def read(self) -> bytes:
        """Of all chunks."""
        return b"".join(os.pread(file, size, 0) for file, size in zip(self.files, self.chunk_bytes, strict=True))

    def write(self, data: bytes) -> None:
        for file, size in zip(self.files, self.chunk_bytes, strict=True):
            os.pwrite(file, data[:size], 0)
            data = data[size:]

    def inodes(self) -> list[int]:
        return [os.fstat(file).st_ino for file in self.files]

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        self.files = []


class MemfdDriver:
    """What the cuda device asks of CUDA for such memory, with CUDA's rules, by mmap of this process."""

    def __init__(self) -> None:
        # Address -> bytes.
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.access_refused = False

    def reserve(self, nbytes: int) -> int:
        address = self._mmap(None, nbytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.reserved[address] = nbytes
        return address

    def map_descriptor(self, descriptor: int, address: int, nbytes: int) -> None:
        inside = any(first <= address and address + nbytes <= first + size for first, size in self.reserved.items())
        taken = any(address < first + size and first < address + nbytes for first, size in self.mapped.items())
        if not nbytes or not inside or taken or os.fstat(descriptor).st_size != nbytes:
            raise CudaError("cuMemMap", 1, "CUDA_ERROR_INVALID_VALUE")
        self._mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, descriptor)
        self.mapped[address] = nbytes

    def allow_access(self, address: int, nbytes: int) -> None:
        if self.access_refused:
            raise CudaError("cuMemSetAccess", 101, "CUDA_ERROR_INVALID_DEVICE")
        assert sum(size for first, size in self.mapped.items() if address <= first < address + nbytes) == nbytes

    def unmap(self, address: int, nbytes: int) -> None:
        assert self.mapped.pop(address) == nbytes, "a chunk is unmapped as a whole"
        self._mmap(address, nbytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1)

    def free_addresses(self, address: int, nbytes: int) -> None:
        assert self.reserved.pop(address) == nbytes
        assert not any(address <= first < address + nbytes for first in self.mapped), "something is still mapped"
        assert _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0

    def _mmap(self, address: int | None, nbytes: int, access: int, flags: int, descriptor: int) -> int:
        found = _libc.mmap(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), access, flags, descriptor, ctypes.c_size_t(0)
        )
        assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        return int(found)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
