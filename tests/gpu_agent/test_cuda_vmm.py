"""Memory in physical chunks on the agent's side: what of it is mapped, refused, and given back."""

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from memfd_memory import GPU, MemfdDriver, MemfdMemory, open_files

from kvblend.v1 import agent_pb2 as pb
from services.common.errors import KvblendError
from services.gpu_agent.devices.cuda.ipc import OpenedHandles, check_handle
from services.gpu_agent.engines.descriptors import Chunk, Descriptors

PAGE = 4096
SLOT = b"s" * 16


@pytest.fixture
def memory() -> Iterator[MemfdMemory]:
    """Of random bytes, from the middle of its first chunk on."""
    with closing(MemfdMemory([PAGE, 3 * PAGE, 2 * PAGE], 1000)) as made:
        made.write(np.random.default_rng(1).bytes(6 * PAGE))
        yield made


@pytest.fixture
def driver() -> Iterator[MemfdDriver]:
    """Nothing stays mapped or reserved in it."""
    made = MemfdDriver()
    yield made
    assert (made.mapped, made.reserved) == ({}, {})


def received(memory: MemfdMemory, sizes: list[int] | None = None) -> Descriptors:
    """As the agent has them, with the sizes that the engine claims."""
    chunks = zip(memory.files, sizes or memory.chunk_bytes, strict=True)
    return {SLOT: [Chunk(file, size) for file, size in chunks]}


def opened(
    driver: MemfdDriver,
    descriptors: Descriptors,
    *handles: pb.DeviceHandle,
    semaphores: pb.DeviceHandle | None = None,
) -> OpenedHandles:
    fake: Any = driver
    return OpenedHandles(fake, GPU, handles, semaphores, descriptors)


def at(address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory of this process."""
    interface = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
    return np.asarray(type("Memory", (), {"__array_interface__": interface})())


def test_chunks_are_one_range_of_the_engines_own_bytes(driver: MemfdDriver, memory: MemfdMemory) -> None:
    """Mapped, not copied, and not by the descriptors that they came in."""
    copies = [os.dup(file) for file in memory.files]
    descriptors = {SLOT: [Chunk(*chunk) for chunk in zip(copies, memory.chunk_bytes, strict=True)]}
    handle = memory.handle(SLOT)
    before = open_files()
    with closing(opened(driver, descriptors, handle)) as found:
        for copy in copies:
            os.close(copy)
        assert open_files() == before - len(copies)
        (start,) = found.starts
        assert at(start, handle.bytes).tobytes() == memory.read()[1000:]
        at(start, handle.bytes)[PAGE] ^= 1
        assert at(start, handle.bytes).tobytes() == memory.read()[1000:]
        assert found.mapped_bytes == 6 * PAGE - 1000


def test_parts_of_one_allocation_are_mapped_once(driver: MemfdDriver, memory: MemfdMemory) -> None:
    part = memory.handle(SLOT)
    part.allocation_offset, part.bytes = 4 * PAGE, PAGE
    semaphores = memory.handle(SLOT)
    semaphores.allocation_offset, semaphores.bytes = 5 * PAGE, 64
    found = opened(driver, received(memory), memory.handle(SLOT), part, semaphores=semaphores)
    first = found.starts[0] - 1000
    assert (found.starts[1], found.first_semaphore, found.semaphores) == (first + 4 * PAGE, first + 5 * PAGE, 8)
    assert len(driver.reserved) == 1
    found.close()
    found.close()


@pytest.mark.parametrize(
    ("sizes", "reason", "words"),
    [
        ([PAGE, 4 * PAGE, PAGE], "HANDLE_UNUSABLE", "cuMemMap"),
        ([PAGE, 2 * PAGE, 3 * PAGE], "HANDLE_UNUSABLE", "cuMemMap"),
        ([PAGE, 3 * PAGE, 1 << 40], "HANDLE_UNUSABLE", "cuMemMap"),
        ([PAGE, 3 * PAGE, 0], "HANDLE_UNUSABLE", "cuMemMap"),
        # Their sum is 6 pages, modulo 2**64.
        ([PAGE, (1 << 63) + 3 * PAGE, (1 << 63) + 2 * PAGE], "HANDLE_OUT_OF_BOUNDS", "cannot be"),
        ([0, 0, 0], "HANDLE_OUT_OF_BOUNDS", "cannot be"),
    ],
)
def test_a_lie_about_sizes_maps_nothing(
    driver: MemfdDriver, memory: MemfdMemory, sizes: list[int], reason: str, words: str
) -> None:
    before = open_files()
    with pytest.raises(KvblendError, match=words) as caught:
        opened(driver, received(memory, sizes), memory.handle(SLOT))
    assert caught.value.reason == reason
    assert open_files() == before


@pytest.mark.parametrize(
    "changes", [{"bytes": 6 * PAGE - 999}, {"allocation_offset": 1001}, {"bytes": (1 << 64) - 1000}]
)
def test_what_reaches_past_the_chunks_is_out_of_bounds(
    driver: MemfdDriver, memory: MemfdMemory, changes: dict[str, int]
) -> None:
    handle = memory.handle(SLOT)
    for name, value in changes.items():
        setattr(handle, name, value)
    with pytest.raises(KvblendError) as caught:
        opened(driver, received(memory), memory.handle(SLOT), handle)
    assert caught.value.reason == "HANDLE_OUT_OF_BOUNDS"


def test_what_this_gpu_may_not_read_is_refused(driver: MemfdDriver, memory: MemfdMemory) -> None:
    driver.access_refused = True
    with pytest.raises(KvblendError, match="cuMemSetAccess") as caught:
        opened(driver, received(memory), memory.handle(SLOT))
    assert caught.value.reason == "HANDLE_UNUSABLE"


def test_descriptors_that_are_not_here_are_asked_for(driver: MemfdDriver, memory: MemfdMemory) -> None:
    with pytest.raises(KvblendError, match="are not here") as caught:
        opened(driver, received(memory), memory.handle(SLOT), memory.handle(b"t" * 16))
    assert caught.value.reason == "HANDLE_UNUSABLE"


def test_equal_process_numbers_do_not_matter(memory: MemfdMemory) -> None:
    """As those of two containers whose process is number 1."""
    handle = memory.handle(SLOT)
    for pid in (0, 1):
        handle.exporter_pid = pid
        check_handle(handle, GPU, 1)
    for changes, words in (({"device_uuid": "GPU-other"}, "on GPU-other"), ({"bytes": 0}, "0 bytes")):
        wrong = memory.handle(SLOT)
        for name, value in changes.items():
            setattr(wrong, name, value)
        with pytest.raises(KvblendError, match=words):
            check_handle(wrong, GPU, 1)
