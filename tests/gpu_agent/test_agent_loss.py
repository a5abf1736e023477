"""A device that is lost for good: everything in flight is a miss, the agent ends, the next one goes on."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from agent_rig import Rig
from losses import check_loss, start_losing_agent
from processes import Stack

from kvblend.v1 import agent_pb2 as pb
from services.common.errors import KvblendError
from services.gpu_agent.devices.base import Hung, Steps, Stopped
from services.gpu_agent.devices.loss import LosableDevice, Lost


def test_an_agent_that_loses_its_device_ends_and_the_next_one_goes_on(shm_dir: Path) -> None:
    with closing(Stack(shm_dir, arena_mib=8)) as stack:
        stack.start_store()
        flag = start_losing_agent(stack)
        stack.wait_agent()
        with closing(Rig(stack.target("agent"))) as rig:
            check_loss(stack, flag, rig)


class Fragile:
    """A device and its memory, that fail as `error` says."""

    name = "fragile"
    mapped_bytes = semaphores = 8

    def __init__(self) -> None:
        self.problem = ""
        self.error: Exception | None = None
        self.calls: list[str] = []
        self.told: list[str] = []
        self.device = LosableDevice(self, lambda: self.problem, self.told.append)  # type: ignore[arg-type]

    def open(self, *_: Any) -> "Fragile":
        return self._do("open")

    @contextmanager
    def opened(self, _: pb.Event) -> Iterator[Any]:
        yield lambda: self._do("ask")

    def _do(self, call: str) -> Any:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return self

    def __getattr__(self, call: str) -> Any:
        return lambda *_: self._do(call)

    @property
    def memory(self) -> Any:
        """Opened while everything works."""
        return self.device.open([], None)  # type: ignore[arg-type]


COPIES = ("scatter", "gather", "scatter_in_steps")


def copy(memory: Any, name: str) -> Any:
    return getattr(memory, name)(*[None] * (3 if name == "scatter_in_steps" else 4 if name == "scatter" else 3))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_fails_with_the_device_counts_as_running(name: str) -> None:
    fragile = Fragile()
    memory = fragile.memory
    assert copy(memory, name) is fragile
    fragile.error = RuntimeError("this copy alone")
    with pytest.raises(RuntimeError, match="this copy alone"):
        copy(memory, name)
    assert not fragile.told
    fragile.problem = "no more"
    for _ in range(2):
        with pytest.raises(Lost, match="no more") as caught:
            copy(memory, name)
    assert fragile.told == ["the device is lost: no more"], "once"
    ended, held = threading.Event(), ExitStack()
    held.callback(ended.set)
    caught.value.keep(held)
    assert not ended.wait(0.2)


def test_a_copy_that_has_lost_its_purpose_asks_nothing_of_the_device() -> None:
    fragile = Fragile()
    memory = fragile.memory
    fragile.problem, fragile.error = "no more", Stopped(0)
    with pytest.raises(Stopped):
        copy(memory, "gather")
    assert not fragile.told


@pytest.mark.parametrize("lost", [False, True])
def test_a_copy_that_hung_when_the_device_was_lost_never_ends(lost: bool) -> None:
    fragile = Fragile()
    memory = fragile.memory
    waiting = threading.Event()

    def wait() -> None:
        assert waiting.wait(10)
        if lost:
            fragile.problem = "no more"
            raise RuntimeError("what it hung in failed")

    fragile.error = Hung(wait)
    with pytest.raises(Hung) as caught:
        copy(memory, "gather")
    ended, held = threading.Event(), ExitStack()
    held.callback(ended.set)
    caught.value.keep(held)
    waiting.set()
    assert ended.wait(0.3 if lost else 10) != lost
    assert bool(fragile.told) == lost


def test_every_other_call_says_that_the_agent_starts_again() -> None:
    fragile = Fragile()
    memory = fragile.memory
    fragile.error, fragile.problem = KvblendError("HANDLE_UNUSABLE", "as it seemed"), "no more"
    calls = [
        lambda: fragile.device.open([], None),  # type: ignore[arg-type]
        lambda: ask(fragile.device),
        lambda: memory.semaphore(0, lambda: None),
        lambda: memory.prepare([]),
        lambda: memory.set_semaphores(Steps(1, 0, 1)),
    ]
    for call in calls:
        with pytest.raises(KvblendError, match=r"NOT_READY.*starts again: no more"):
            call()
    assert fragile.told == ["the device is lost: no more"]


def ask(device: LosableDevice) -> None:
    with device.opened(pb.Event()) as done:
        done()


def test_an_event_that_fails_while_it_is_looked_at_says_so_too() -> None:
    fragile = Fragile()
    ask(fragile.device)
    fragile.problem, fragile.error = "no more", RuntimeError("asking failed")
    with pytest.raises(KvblendError, match=r"NOT_READY.*no more"):
        ask(fragile.device)


def test_nothing_more_is_asked_of_a_lost_device() -> None:
    fragile = Fragile()
    memory, other = fragile.memory, fragile.memory
    fragile.error = RuntimeError("closing failed")
    with pytest.raises(RuntimeError, match="closing failed"):
        other.close()
    fragile.problem = "no more"
    other.close()
    assert fragile.told
    fragile.calls.clear()
    memory.close()
    fragile.device.adopt(None)  # type: ignore[arg-type]
    fragile.device.release(None)  # type: ignore[arg-type]
    assert not fragile.calls
