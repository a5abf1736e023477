"""GPU memory of cuMemCreate, in chunks of chosen sizes; needs the driver, not torch."""

import ctypes
from typing import Any

from kvblend.cuda_driver import call
from kvblend.cuda_vmm import POSIX_FILE_DESCRIPTOR, AllocationProperties, Location

MIB = 1 << 20
_PINNED, _ON_A_DEVICE, _READ_AND_WRITE = 1, 1, 3


class _Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class VmmBuffer:
    """Chunks of so many MiB, one behind the other from `address` on, on the first GPU; the context must be current."""

    def __init__(self, chunk_mib: list[int], handle_types: int = POSIX_FILE_DESCRIPTOR) -> None:
        self.sizes = [mib * MIB for mib in chunk_mib]
        self.nbytes = sum(self.sizes)
        gpu = Location(_ON_A_DEVICE, 0)
        properties = AllocationProperties(kind=_PINNED, handle_types=handle_types, location=gpu)
        address = ctypes.c_uint64()
        anywhere = (ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0))
        call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(self.nbytes), *anywhere)
        self.address = at = address.value
        for size in self.sizes:
            chunk = ctypes.c_uint64()
            none = ctypes.c_ulonglong(0)
            call("cuMemCreate", ctypes.byref(chunk), ctypes.c_size_t(size), ctypes.byref(properties), none)
            call("cuMemMap", ctypes.c_uint64(at), ctypes.c_size_t(size), ctypes.c_size_t(0), chunk, none)
            call("cuMemRelease", chunk)
            at += size
        access = _Access(gpu, _READ_AND_WRITE)
        whole = (ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))
        call("cuMemSetAccess", *whole, ctypes.byref(access), ctypes.c_size_t(1))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Bytes; torch.as_tensor shares them."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def close(self) -> None:
        """Nothing may use it any more."""
        at = self.address
        for size in self.sizes:
            call("cuMemUnmap", ctypes.c_uint64(at), ctypes.c_size_t(size))
            at += size
        call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))
