"""The cuda device reads semaphores beside everything else, on a GPU that runs as late as it may."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeDevice, FakeGpu
from hypothesis import given
from hypothesis import strategies as st
from test_steps import Retrieve

from kvblend.v1 import common_pb2 as common
from services.common.errors import KvblendError
from services.gpu_agent.devices.base import Hung, Steps, Stopped
from services.gpu_agent.devices.cuda.driver import CudaError
from services.gpu_agent.devices.cuda.words import WordReader

SEEDS = count()


def reader(gpu: FakeGpu, hang_seconds: float = 10.0) -> WordReader:
    fake: Any = gpu
    return WordReader(fake, hang_seconds)


def address_of(words: np.ndarray, index: int) -> int:
    return int(words.ctypes.data) + 8 * index


def go_on() -> None:
    pass


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8), st.integers(0, 1000))
def test_every_word_is_what_it_was_set_to(values: list[int], seed: int) -> None:
    words = np.array(values, np.uint64)
    words_of_gpu = reader(FakeGpu(seed))
    assert [words_of_gpu.read(address_of(words, index), go_on) for index in range(len(values))] == values
    words[0] ^= np.uint64(1)
    assert words_of_gpu.read(address_of(words, 0), go_on) == values[0] ^ 1


def test_streams_that_wait_for_ever_hold_nothing_up() -> None:
    """Those of a transfer, or one that waits for what an engine never sets."""
    gpu = FakeGpu(3)
    words, words_of_gpu = np.array([7], np.uint64), reader(gpu)
    for _ in range(4):
        gpu.stream().work.append(lambda: False)
    assert words_of_gpu.read(address_of(words, 0), go_on) == 7


def test_a_gpu_that_does_not_answer_is_given_up_until_it_does() -> None:
    gpu = FakeGpu(4)
    words, words_of_gpu = np.array([7], np.uint64), reader(gpu, hang_seconds=0.05)
    gpu.stuck = True
    given_back = threading.Event()
    with pytest.raises(Hung) as caught:
        words_of_gpu.read(address_of(words, 0), go_on)
    with ExitStack() as held:
        held.callback(given_back.set)
        caught.value.keep(held)
    # Its copy may still come: the memory is kept, and nobody reads meanwhile.
    looks = iter(range(3))

    def watch() -> None:
        if next(looks, None) is None:
            raise Stopped(common.REASON_DEADLINE)

    with pytest.raises(Stopped):
        words_of_gpu.read(address_of(words, 0), watch)
    assert not given_back.is_set()
    gpu.stuck = False
    assert given_back.wait(10)
    assert words_of_gpu.read(address_of(words, 0), go_on) == 7


@pytest.fixture
def retrieve() -> Iterator[Retrieve]:
    with closing(Retrieve(FakeDevice(next(SEEDS), 1024))) as made:
        yield made


def test_a_registration_s_semaphores_are_read_by_their_place(retrieve: Retrieve) -> None:
    retrieve.semaphores[:] = np.arange(100, 112)
    assert [retrieve.memory.semaphore(index, go_on) for index in range(12)] == list(range(100, 112))
    retrieve.run(Steps(5, 3, 9000))
    assert [retrieve.memory.semaphore(index, go_on) for index in (2, 3, 7, 8)] == [102, 9000, 9000, 108]


@pytest.mark.parametrize("error", [CudaError("cuMemcpyDtoHAsync_v2", 700, "ILLEGAL_ADDRESS"), RuntimeError("CUDA")])
def test_a_gpu_that_refuses_is_told_and_the_next_is_served(
    retrieve: Retrieve, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(FakeGpu, "to_host", refuse)
        with pytest.raises(KvblendError) as caught:
            retrieve.memory.semaphore(0, go_on)
    assert caught.value.reason == "HANDLE_UNUSABLE"
    assert retrieve.memory.semaphore(0, go_on) == 0
