"""What a device must do: open an engine's KV memory and copy between it and the arena.

A copy is whole when its call returns, and has stopped when its call raises: the arena's blocks are given
back on that promise. The one exception is `Hung`: that copy may still touch both memories, and its caller
keeps both until it has ended.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.gpu_agent.engines.descriptors import NO_DESCRIPTORS, Descriptors
from services.gpu_agent.engines.layouts import Layout
from services.gpu_agent.engines.rope import RopeSpec
from services.gpu_agent.engines.slots import Slots

Bytes = npt.NDArray[np.uint8]

SEMAPHORE_BYTES = 8

# Asked between layers: raises `Stopped` when the copy has lost its purpose.
Watch = Callable[[], None]


class Stopped(Exception):
    """A copy ended early, with nothing of it in flight; `reason` is told for its ranges."""

    def __init__(self, reason: common.Reason) -> None:
        super().__init__(common.Reason.Name(reason))
        self.reason = reason


class Hung(Exception):
    """A copy does not end and cannot be stopped."""

    def __init__(self, wait: Callable[[], None], text: str = "a copy on the device does not end") -> None:
        """`wait` returns when the copy has ended after all."""
        super().__init__(text)
        self.wait = wait

    def keep(self, held: ExitStack) -> None:
        """Takes over what must not be given back before the copy has ended."""
        rest = held.pop_all()

        def run() -> None:
            with rest:
                self.wait()

        threading.Thread(target=run, name="hung-copy", daemon=True).start()


@dataclass(frozen=True)
class Piece:
    """Tokens [first, first + len(slots)) of an object's block and the slots they belong to.

    `block` is the object's payload in the arena, [layers, planes, tokens, heads, size] as bytes.
    """

    block: Bytes
    tokens: int
    first: int
    slots: Slots
    # Positions that K moves by on its way to the engine.
    delta: int = 0
    # The block's checksum is wanted with its copy.
    checked: bool = False

    @property
    def whole(self) -> bool:
        return self.first == 0 and len(self.slots) == self.tokens


@dataclass(frozen=True)
class Steps:
    """Layer l of a group of n layers belongs to step l * count // n. Semaphore `first` + step is set to `value`."""

    count: int
    first: int
    value: int

    def layers(self, step: int, layers: int) -> range:
        """Of a group of so many layers those that belong to this step."""
        return range(-(-step * layers // self.count), -(-(step + 1) * layers // self.count))


@dataclass(frozen=True)
class Transfer:
    """What is written of one layer group."""

    group: int
    pieces: Sequence[Piece]
    rope: RopeSpec


class KvMemory(Protocol):
    """One registration's opened memory."""

    mapped_bytes: int
    # How many semaphores the engine has given; they are u64 in its memory.
    semaphores: int

    def prepare(self, ropes: Sequence[RopeSpec]) -> None:
        """Does now, with the rope of each layer group, what the first copy would otherwise wait for.

        Raises KvblendError for a rope that the device cannot apply.
        """

    def scatter(self, group: int, pieces: Sequence[Piece], rope: RopeSpec, watch: Watch) -> Sequence[int | None]:
        """Arena to engine: K moved by each piece's delta (bit-equal where that is 0), V as it is.

        The checksum of what arrived of each block, before K was moved; None where it is not wanted, or is left to the
        caller: the piece is not its whole block, or the device has none.
        """

    def scatter_in_steps(
        self, transfers: Sequence[Transfer], steps: Steps, watch: Watch
    ) -> Sequence[Sequence[int | None]]:
        """As `scatter` of each, but layer by layer; a step's semaphore is set when all of its layers are there.

        When it raises some of the semaphores are not set.
        """

    def set_semaphores(self, steps: Steps) -> None:
        """Sets those of all steps, now, whatever else is going on.

        Raises Hung when the device is late: they are set then, but not yet.
        """

    def semaphore(self, index: int, watch: Watch) -> int:
        """What this one of `semaphores` is by now, whatever else is going on.

        Raises Stopped as `watch` says, Hung, KvblendError HANDLE_UNUSABLE if it cannot be read any more.
        """

    def gather(self, group: int, pieces: Sequence[Piece], watch: Watch) -> Sequence[int | None]:
        """Engine to arena; deltas are ignored. The checksums of what was read, as `scatter` has them."""

    def check(self) -> None:
        """Raises KvblendError HANDLE_UNUSABLE if the engine has taken memory back since it was opened."""

    def close(self) -> None:
        """Unmaps everything. No copy may be running. Idempotent."""


class Device(Protocol):
    name: str

    def adopt(self, memory: Bytes) -> None:
        """Host memory that pieces will lie in, until `release`: a device may make it fast to copy, soon."""

    def release(self, memory: Bytes) -> None:
        """It is about to be unmapped. No copy of it may be running."""

    def open(
        self,
        handles: Sequence[pb.DeviceHandle],
        layout: Layout,
        semaphores: pb.DeviceHandle | None = None,
        descriptors: Descriptors = NO_DESCRIPTORS,
    ) -> KvMemory:
        """`descriptors` of the slots that handles name; they need not stay open.

        Raises KvblendError HANDLE_UNUSABLE or HANDLE_OUT_OF_BOUNDS; then nothing stays open.
        """

    def opened(self, event: pb.Event) -> AbstractContextManager[Callable[[], bool]]:
        """Whether an event of the device's own kind is done, asked as often as one likes.

        Entering it and asking raise KvblendError HANDLE_UNUSABLE.
        """
