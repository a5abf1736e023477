"""An engine's events by semaphores: none comes before the work that it stands for."""

import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend import cuda_semaphores
from kvblend.cuda_memory import CudaUnavailable
from kvblend.cuda_semaphores import CudaSemaphores
from kvblend.v1 import agent_pb2 as pb

ADDRESS, COUNT, STEPS = 4096, 6, 2


class Streams:
    """Work that is done when the test says so, and semaphores in a dictionary."""

    def __init__(self) -> None:
        self.words: dict[int, int] = dict.fromkeys(range(ADDRESS, ADDRESS + 8 * COUNT, 8), 2**63)
        self.work: dict[int, deque[tuple[int, int] | int]] = defaultdict(deque)
        self.done: set[int] = set()
        self.refuses = False

    def zero_memory(self, address: int, nbytes: int) -> None:
        for word in range(address, address + nbytes, 8):
            self.words[word] = 0

    def set_semaphore(self, stream: int, address: int, value: int) -> None:
        assert address in self.words
        if self.refuses:
            raise CudaUnavailable("no")
        self.work[stream].append((address, value))

    def step(self, stream: int) -> None:
        if self.work[stream]:
            item = self.work[stream].popleft()
            if isinstance(item, int):
                self.done.add(item)
            else:
                self.words[item[0]] = item[1]

    def reached(self, event: pb.Event) -> bool:
        """As an agent looks at it."""
        assert event.kind == pb.EVENT_KIND_SEMAPHORE
        assert event.value > 0
        return self.words[ADDRESS + 8 * event.semaphore] >= event.value


@pytest.fixture
def streams() -> Iterator[Streams]:
    with patched() as streams:
        yield streams


class patched:
    """The driver of kvblend.cuda_semaphores is a `Streams`."""

    def __enter__(self) -> Streams:
        streams = Streams()
        handle = mock.patch.object(
            cuda_semaphores, "cuda_handle", lambda address, nbytes: pb.DeviceHandle(bytes=nbytes, exporter_pid=address)
        )
        self._patches = [
            handle,
            mock.patch.object(cuda_semaphores, "zero_memory", streams.zero_memory),
            mock.patch.object(cuda_semaphores, "set_semaphore", streams.set_semaphore),
        ]
        for patch in self._patches:
            patch.start()
        return streams

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


# What happens on streams 10 to 13: work is given, an event is asked for, a bit of what was given is done.
actions = st.lists(st.tuples(st.sampled_from(["work", "event", "step", "step"]), st.integers(10, 13)), max_size=60)


def check(script: list[tuple[str, int]], one_for_all: bool = False) -> None:
    with patched() as streams:
        semaphores = CudaSemaphores(ADDRESS, COUNT, steps=STEPS)
        if one_for_all:
            semaphores._streams = OneForAll()
        given: dict[int, list[int]] = defaultdict(list)
        events: list[tuple[pb.Event, list[int]]] = []
        for number, (action, stream) in enumerate([*script, *[("step", stream) for stream in range(10, 14)] * 60]):
            match action:
                case "work":
                    streams.work[stream].append(number)
                    given[stream].append(number)
                case "event":
                    events.append((semaphores.event(stream), list(given[stream])))
                case "step":
                    streams.step(stream)
            for event, work in events:
                assert not streams.reached(event) or streams.done.issuperset(work), "an event came before its work"
        assert all(streams.reached(event) for event, _ in events), "an event never came"


class OneForAll(dict[int, tuple[int, int]]):
    """The mistake: all streams write one semaphore."""

    def get(self, stream: int, default: object = None) -> tuple[int, int]:  # type: ignore[override]
        return super().get(0, (0, 0))

    def __setitem__(self, stream: int, value: tuple[int, int]) -> None:
        super().__setitem__(0, value)


@given(actions)
def test_no_event_comes_before_its_work_and_all_come(script: list[tuple[str, int]]) -> None:
    check(script)


def test_streams_that_share_a_semaphore_are_noticed() -> None:
    with pytest.raises(AssertionError, match="before its work"):
        check([("work", 10), ("event", 10), ("event", 11), ("step", 11)], one_for_all=True)


def test_semaphores_begin_at_zero_whatever_was_there(streams: Streams) -> None:
    semaphores = CudaSemaphores(ADDRESS, COUNT, steps=STEPS)
    assert set(streams.words.values()) == {0}
    assert (semaphores.handle.bytes, semaphores.handle.exporter_pid) == (8 * COUNT, ADDRESS)
    assert semaphores.address(semaphores.first_step) == ADDRESS + 8 * (COUNT - STEPS)


def test_events_leave_the_semaphores_of_steps_alone(streams: Streams) -> None:
    semaphores = CudaSemaphores(ADDRESS, COUNT, steps=STEPS)
    used = {semaphores.event(stream).semaphore for stream in (0, 20, 21, 22, 0, 22)}
    assert used == set(range(semaphores.first_step))
    with pytest.raises(ValueError, match="more streams"):
        semaphores.event(23)


def test_a_value_whose_write_was_refused_is_not_used_again(streams: Streams) -> None:
    semaphores = CudaSemaphores(ADDRESS, COUNT)
    first = semaphores.event(0)
    streams.refuses = True
    with pytest.raises(CudaUnavailable):
        semaphores.event(0)
    streams.refuses = False
    assert semaphores.event(0).value == first.value + 2


def test_threads_may_share_a_stream(streams: Streams) -> None:
    semaphores = CudaSemaphores(ADDRESS, COUNT)
    threads = [threading.Thread(target=lambda: [semaphores.event(5) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [value for _, value in streams.work[5]] == list(range(1, 801))


def test_the_default_stream_of_each_thread_is_refused(streams: Streams) -> None:
    with pytest.raises(ValueError, match="name a stream"):
        CudaSemaphores(ADDRESS, COUNT).event(2)


@pytest.mark.parametrize(("address", "count", "steps"), [(ADDRESS + 4, 6, 0), (ADDRESS, 0, 0), (ADDRESS, 4, 4)])
def test_semaphores_that_cannot_be_are_refused(streams: Streams, address: int, count: int, steps: int) -> None:
    with pytest.raises(ValueError, match="cannot lie"):
        CudaSemaphores(address, count, steps=steps)
