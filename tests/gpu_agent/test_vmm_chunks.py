"""An engine finds the physical chunks behind its memory, by what CUDA tells of single addresses."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend import cuda_driver
from kvblend.cuda_memory import CudaUnavailable, cuda_handle
from kvblend.cuda_vmm import VmmMemory, vmm_memory
from kvblend.v1 import agent_pb2 as pb

STEP = 2 << 20
BASE = 0x7F00_0000_0000
GPU = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
_REFUSED = 1


@dataclass(frozen=True)
class Mapped:
    address: int
    nbytes: int
    handle: int
    # 1: can be exported as a descriptor; 8: by a fabric.
    types: int = 1


class FakeCuda:
    """libcuda, with memory of cuMemCreate and, at address 4096, of cudaMalloc."""

    def __init__(self, mapped: list[Mapped]) -> None:
        self.mapped = mapped
        self.retained: list[int] = []
        self.exported: list[int] = []

    def _at(self, address: int) -> Mapped | None:
        return next((item for item in self.mapped if item.address <= address < item.address + item.nbytes), None)

    def _of(self, handle: Any) -> Mapped:
        assert handle.value in self.retained, "a handle is used that is not held"
        return next(item for item in self.mapped if item.handle == handle.value)

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        found = self._at(address.value)
        base._obj.value, size._obj.value = (found.address, found.nbytes) if found else (address.value & ~4095, 4096)
        return 0

    def cuIpcGetMemHandle(self, raw: Any, address: Any) -> int:
        return 0 if address.value == 4096 else _REFUSED

    def cuMemRetainAllocationHandle(self, handle: Any, address: Any) -> int:
        found = self._at(address.value or 0)
        if found is None:
            return _REFUSED
        handle._obj.value = found.handle
        self.retained.append(found.handle)
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        self.retained.remove(handle.value)
        return 0

    def cuMemGetAllocationPropertiesFromHandle(self, properties: Any, handle: Any) -> int:
        properties._obj.handle_types = self._of(handle).types
        return 0

    def cuMemGetAllocationGranularity(self, step: Any, properties: Any, option: Any) -> int:
        step._obj.value = STEP
        return 0

    def cuMemExportToShareableHandle(self, descriptor: Any, handle: Any, kind: Any, flags: Any) -> int:
        assert self._of(handle).types & kind.value
        self.exported.append(handle.value)
        descriptor._obj.value = os.memfd_create(f"chunk-{handle.value}")
        return 0

    def cuPointerGetAttribute(self, value: Any, attribute: Any, address: Any) -> int:
        value._obj.value = 0
        return 0

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        return 0

    def cuDeviceGetUuid_v2(self, raw: Any, device: Any) -> int:
        ctypes.memmove(raw._obj, bytes(range(16)), 16)
        return 0

    def cuGetErrorName(self, code: Any, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@contextmanager
def cuda(*mapped: Mapped) -> Iterator[FakeCuda]:
    """Nothing that was retained stays so."""
    fake = FakeCuda(list(mapped))
    with patch.object(cuda_driver, "_driver", lambda: fake):
        yield fake
    assert not fake.retained


def in_a_row(sizes: list[int], gap_before: list[bool] | None = None) -> list[Mapped]:
    """Chunks of so many steps."""
    mapped, at = [], BASE
    for number, size in enumerate(sizes):
        at += STEP if gap_before and gap_before[number] else 0
        mapped.append(Mapped(at, size * STEP, 100 + number))
        at += size * STEP
    return mapped


def slowly(mapped: list[Mapped], address: int, nbytes: int) -> VmmMemory | None:
    """By looking at every step of the memory that is wanted; None: a part of it is not there."""
    touched: list[Mapped] = []
    for at in range(address - address % STEP, address + nbytes, STEP):
        found = [item for item in mapped if item.address <= at < item.address + item.nbytes]
        if not found:
            return None
        touched += [item for item in found if item not in touched]
    chunks = tuple((item.address, item.nbytes) for item in touched)
    return VmmMemory(GPU, address - touched[0].address, nbytes, chunks)


@given(
    rows=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9).map(lambda n: n == 0)), min_size=1, max_size=8),
    place=st.floats(0, 1),
    length=st.floats(0, 1),
)
def test_the_chunks_are_those_behind_the_memory(rows: list[tuple[int, bool]], place: float, length: float) -> None:
    mapped = in_a_row([size for size, _ in rows], [gap for _, gap in rows])
    end = mapped[-1].address + mapped[-1].nbytes
    address = min(mapped[0].address + int(place * (end - mapped[0].address)), end - 1)
    nbytes = max(1, int(length * (end - address)))
    expected = slowly(mapped, address, nbytes)
    with cuda(*mapped):
        if expected is not None or not any(item.address <= address < item.address + item.nbytes for item in mapped):
            assert vmm_memory(address, nbytes) == expected
        else:
            with pytest.raises(CudaUnavailable, match="no memory at"):
                vmm_memory(address, nbytes)


def test_memory_that_ends_too_soon_is_refused() -> None:
    mapped = in_a_row([2, 3])
    with cuda(*mapped), pytest.raises(CudaUnavailable, match=f"no memory at {BASE + 5 * STEP:#x}"):
        vmm_memory(BASE + 100, 5 * STEP)


def test_a_handle_is_of_the_memorys_kind() -> None:
    with cuda(*in_a_row([1, 2])):
        plain = cuda_handle(4096, 1024)
        assert isinstance(plain, pb.DeviceHandle)
        assert (plain.kind, plain.exporter_pid) == (pb.HANDLE_KIND_CUDA_IPC, os.getpid())
        memory = cuda_handle(BASE + 512, STEP)
        assert memory == VmmMemory(GPU, 512, STEP, ((BASE, STEP), (BASE + STEP, 2 * STEP)))
        handle = memory.handle(b"slot")
        assert (handle.kind, handle.handle, handle.device_uuid) == (pb.HANDLE_KIND_CUDA_VMM, b"slot", GPU)
        assert (handle.allocation_offset, handle.bytes) == (512, STEP)
        with pytest.raises(CudaUnavailable, match="cuIpcGetMemHandle"):
            cuda_handle(1 << 40, 16)


@pytest.mark.parametrize("types", [0, 8])
def test_memory_that_cannot_be_exported_names_the_setting(types: int) -> None:
    """Also if that is so of one chunk alone."""
    first, second = in_a_row([1, 1])
    with cuda(first, Mapped(second.address, second.nbytes, second.handle, types)):
        assert cuda_handle(BASE, STEP)
        for address, nbytes in ((BASE + STEP, 16), (BASE, 2 * STEP)):
            with pytest.raises(CudaUnavailable, match=r"expandable_segments:False.*enable_sleep_mode=False"):
                cuda_handle(address, nbytes)


def test_each_export_is_a_descriptor_of_that_chunk() -> None:
    with cuda(*in_a_row([1, 1, 1])) as fake:
        memory = vmm_memory(BASE, 3 * STEP)
        assert memory is not None
        for chunk in (2, 0):
            descriptor = memory.export(chunk)
            assert f"chunk-{100 + chunk}" in os.readlink(f"/proc/self/fd/{descriptor}")
            os.close(descriptor)
        assert fake.exported == [102, 100]
        fake.mapped.clear()
        with pytest.raises(CudaUnavailable, match="cuMemRetainAllocationHandle"):
            memory.export(1)
