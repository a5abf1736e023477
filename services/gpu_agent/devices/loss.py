"""A device may be lost for good: after an illegal address or an uncorrectable memory error a GPU does nothing more for
the process that it happened to. Only a new process can use it again, so this one must end.

Until it has ended nobody knows whether copies that were in flight still touch the arena. They are answered as failed
and their blocks stay quarantined: the store frees them when it finds the process dead.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvblend.v1 import agent_pb2 as pb
from services.common.errors import KvblendError
from services.gpu_agent.devices.base import Bytes, Device, Hung, KvMemory, Piece, Steps, Stopped, Transfer, Watch
from services.gpu_agent.engines.descriptors import NO_DESCRIPTORS, Descriptors
from services.gpu_agent.engines.layouts import Layout
from services.gpu_agent.engines.rope import RopeSpec


class Lost(Hung):
    """The device is lost. What was in flight counts as running until the process has ended."""

    def __init__(self, why: str) -> None:
        super().__init__(_never, f"the device is lost: {why}")


def _never() -> None:
    threading.Event().wait()


class Loss:
    """Whether the device is lost. Thread-safe."""

    def __init__(self, problem: Callable[[], str], tell: Callable[[str], None]) -> None:
        """`problem` says why nothing works any more, or nothing; the first time it does, `tell` is told."""
        self._problem = problem
        self._tell = tell
        self._lock = threading.Lock()
        self._why = ""

    @property
    def happened(self) -> bool:
        return bool(self._why)

    def look(self) -> str:
        """Asks the device; why it is lost, or nothing."""
        with self._lock:
            if not self._why and (why := self._problem()):
                self._why = why
                self._tell(f"the device is lost: {why}")
            return self._why

    @contextmanager
    def in_copy(self) -> Iterator[None]:
        """A copy that fails because of it raises Lost."""
        try:
            yield
        except Stopped:
            raise
        except Hung as hung:
            wait = hung.wait
            raise Hung(lambda: self._until(wait), str(hung)) from hung
        except Exception as error:
            if why := self.look():
                raise Lost(why) from error
            raise

    def _until(self, ended: Callable[[], None]) -> None:
        try:
            ended()
        except Exception:
            if self.look():
                _never()
            raise

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Anything else that fails because of it raises KvblendError NOT_READY."""
        try:
            yield
        except Exception as error:
            if why := self.look():
                raise KvblendError("NOT_READY", f"the device is lost and the agent starts again: {why}") from error
            raise


class LosableDevice:
    """`device`, whose failures are looked into."""

    def __init__(self, device: Device, problem: Callable[[], str], tell: Callable[[str], None]) -> None:
        """As Loss has them."""
        self.name = device.name
        self._device = device
        self._loss = Loss(problem, tell)

    def adopt(self, memory: Bytes) -> None:
        if not self._loss.happened:
            self._device.adopt(memory)

    def release(self, memory: Bytes) -> None:
        if not self._loss.happened:
            self._device.release(memory)

    def open(
        self,
        handles: Sequence[pb.DeviceHandle],
        layout: Layout,
        semaphores: pb.DeviceHandle | None = None,
        descriptors: Descriptors = NO_DESCRIPTORS,
    ) -> KvMemory:
        with self._loss.in_call():
            return LosableMemory(self._device.open(handles, layout, semaphores, descriptors), self._loss)

    @contextmanager
    def opened(self, event: pb.Event) -> Iterator[Callable[[], bool]]:
        # What is raised inside comes through here: also what asking the event raises.
        with self._loss.in_call(), self._device.opened(event) as done:
            yield done


class LosableMemory:
    """`memory` of a device that may be lost."""

    def __init__(self, memory: KvMemory, loss: Loss) -> None:
        self.mapped_bytes = memory.mapped_bytes
        self.semaphores = memory.semaphores
        self._memory = memory
        self._loss = loss

    def prepare(self, ropes: Sequence[RopeSpec]) -> None:
        with self._loss.in_call():
            self._memory.prepare(ropes)

    def scatter(self, group: int, pieces: Sequence[Piece], rope: RopeSpec, watch: Watch) -> Sequence[int | None]:
        with self._loss.in_copy():
            return self._memory.scatter(group, pieces, rope, watch)

    def scatter_in_steps(
        self, transfers: Sequence[Transfer], steps: Steps, watch: Watch
    ) -> Sequence[Sequence[int | None]]:
        with self._loss.in_copy():
            return self._memory.scatter_in_steps(transfers, steps, watch)

    def set_semaphores(self, steps: Steps) -> None:
        """Raises when they cannot be set: who waits for them is then answered by an error, and sets them itself."""
        with self._loss.in_call():
            self._memory.set_semaphores(steps)

    def semaphore(self, index: int, watch: Watch) -> int:
        with self._loss.in_call():
            return self._memory.semaphore(index, watch)

    def gather(self, group: int, pieces: Sequence[Piece], watch: Watch) -> Sequence[int | None]:
        with self._loss.in_copy():
            return self._memory.gather(group, pieces, watch)

    def check(self) -> None:
        self._memory.check()

    def close(self) -> None:
        """What a lost device holds open goes with the process."""
        if self._loss.happened:
            return
        try:
            self._memory.close()
        except Exception:
            if not self._loss.look():
                raise
