"""What the cuda device refuses before it asks CUDA, and in which words; registration of the arena."""

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_memory import make_rope, model_space

from kvblend.cuda_memory import CudaUnavailable, cuda_handle
from kvblend.layouts import KvShape, build_layout
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.errors import KvblendError
from services.gpu_agent.devices.cuda.driver import CudaError, uuid_text
from services.gpu_agent.devices.cuda.host import HostMemory
from services.gpu_agent.devices.cuda.ipc import OpenedHandles, check_handle
from services.gpu_agent.devices.cuda.planes import NO_ROPE, constants, plane_table
from services.gpu_agent.engines.layouts import check_layout
from services.gpu_agent.engines.rope import rope_spec

GPU = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
PID = 4242


def handle(**changes: Any) -> pb.DeviceHandle:
    fields = {
        "kind": pb.HANDLE_KIND_CUDA_IPC,
        "handle": b"h" * 64,
        "device_uuid": GPU,
        "bytes": 1024,
        "exporter_pid": PID,
    }
    return pb.DeviceHandle(**(fields | changes))


def test_a_uuid_is_written_as_people_know_it() -> None:
    assert uuid_text(bytes(range(16))) == GPU


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exporter_pid": 77}, "docker run --init"),
        ({"exporter_pid": 0}, "exporter_pid"),
        ({"device_uuid": "GPU-other"}, f"on GPU-other; this agent serves {GPU}"),
        ({"device_uuid": ""}, "not named"),
        ({"handle": b"short"}, "64 bytes, not 5"),
        ({"bytes": 0}, "0 bytes"),
        ({"kind": pb.HANDLE_KIND_SHARED_MEMORY}, "cpu device"),
        ({"kind": pb.HANDLE_KIND_UNSPECIFIED}, "no known kind"),
    ],
)
def test_what_can_never_be_opened_is_refused(changes: dict[str, Any], words: str) -> None:
    check_handle(handle(), GPU, 77)
    with pytest.raises(KvblendError, match=words) as caught:
        check_handle(handle(**changes), GPU, 77)
    assert caught.value.reason == "HANDLE_UNUSABLE"


class FakeDriver:
    """Allocations of 4096 bytes at the address that their handle spells."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.registered: set[int] = set()
        self.may_register = threading.Event()
        self.may_register.set()

    def bind(self) -> None:
        pass

    def open_memory(self, raw: bytes) -> int:
        if raw[:1] == b"x":
            raise CudaError("cuIpcOpenMemHandle_v2", 201, "CUDA_ERROR_INVALID_CONTEXT")
        self.open.append(int(raw[:6]))
        return self.open[-1]

    def close_memory(self, address: int) -> None:
        self.open.remove(address)

    def allocation(self, address: int) -> tuple[int, int]:
        return address, 4096

    def register(self, address: int, nbytes: int) -> None:
        assert self.may_register.wait(10)
        if nbytes == 13:
            raise CudaError("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        self.registered.add(address)

    def unregister(self, address: int) -> None:
        self.registered.remove(address)


def opened(driver: FakeDriver, *handles: pb.DeviceHandle) -> OpenedHandles:
    fake: Any = driver
    return OpenedHandles(fake, GPU, handles, None)


def test_parts_of_one_allocation_are_opened_once() -> None:
    driver = FakeDriver()
    first = handle(handle=b"010000".ljust(64, b"0"))
    second = handle(handle=first.handle, allocation_offset=2048)
    third = handle(handle=b"020000".ljust(64, b"0"), allocation_offset=3072)
    memory = opened(driver, first, second, third)
    assert memory.starts == [10000, 12048, 23072]
    assert (memory.mapped_bytes, driver.open) == (3072, [10000, 20000])
    memory.close()
    memory.close()
    assert not driver.open


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"handle": b"x" * 64}, "HANDLE_UNUSABLE"),
        ({"handle": b"020000".ljust(64, b"0"), "allocation_offset": 3073}, "HANDLE_OUT_OF_BOUNDS"),
    ],
)
def test_a_refused_registration_leaves_nothing_open(changes: dict[str, Any], reason: str) -> None:
    driver = FakeDriver()
    with pytest.raises(KvblendError) as caught:
        opened(driver, handle(handle=b"010000".ljust(64, b"0")), handle(**changes))
    assert caught.value.reason == reason
    assert not driver.open


def test_slabs_are_registered_in_the_background_and_given_back() -> None:
    driver = FakeDriver()
    driver.may_register.clear()
    fake: Any = driver
    host = HostMemory(fake)
    slabs = [np.zeros(4096, np.uint8) for _ in range(2)]
    addresses = [int(slab.ctypes.data) for slab in slabs]
    for slab in slabs:
        host.adopt(slab)
    assert not host.is_registered(addresses[0], 1)
    driver.may_register.set()
    assert host.wait(10)
    assert host.is_registered(addresses[0], 4096)
    assert host.is_registered(addresses[1] + 4000, 96)
    assert not host.is_registered(addresses[1] + 4000, 97)
    for slab in slabs:
        host.release(slab)
    eventually(lambda: not driver.registered)
    assert not host.is_registered(addresses[0], 1)
    host.close()


def test_a_slab_that_is_given_back_while_the_driver_has_it_stays_mapped_so_long() -> None:
    driver = FakeDriver()
    driver.may_register.clear()
    fake: Any = driver
    host = HostMemory(fake)
    slab = np.zeros(4096, np.uint8)
    unmapped = weakref.ref(slab)
    host.adopt(slab)
    assert not host.wait(0.01)
    host.release(slab)
    del slab
    assert unmapped() is not None
    driver.may_register.set()
    eventually(lambda: unmapped() is None)
    assert not driver.registered
    host.close()


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_slab_that_cannot_be_registered_stays_slow() -> None:
    fake: Any = FakeDriver()
    host = HostMemory(fake)
    slab = np.zeros(13, np.uint8)
    host.adopt(slab)
    assert host.wait(10)
    assert not host.is_registered(int(slab.ctypes.data), 13)
    host.release(slab)
    host.close()


@pytest.mark.parametrize(
    ("arrangement", "start", "vector", "unit"),
    [
        ("paged_nhd", 1 << 20, 8, True),
        ("paged_hnd", 1 << 20, 8, True),
        ("paged_nhd", (1 << 20) + 4, 2, True),
        ("vllm_cpu", 1 << 20, 1, False),
    ],
)
def test_loads_are_as_wide_as_the_layout_allows(arrangement: str, start: int, vector: int, unit: bool) -> None:
    shape = KvShape(2, 2, 16, 4, 16, common.DTYPE_BFLOAT16)
    handles = [pb.DeviceHandle(bytes=1 << 20)] * 4
    space = model_space(shape, make_rope(common.ROPE_STYLE_NONE, 16))
    layout = check_layout(build_layout(arrangement, shape), handles, space, common.Rank())
    known = constants(layout, 0, rope_spec(space.groups[0].rope), plane_table(layout, 0, [start] * 4))
    assert (known.vector, known.unit, known.style) == (vector, unit, NO_ROPE)
    assert known.tile_tokens * known.heads <= known.tile_rows


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU here")
def test_an_engine_without_a_driver_is_told_so() -> None:
    with pytest.raises(CudaUnavailable, match="no CUDA driver"):
        cuda_handle(4096, 16)
