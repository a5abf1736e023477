"""One direction of the link: its streams and its staging slots, all taken at start.

A transfer is a sequence of batches. While one batch is copied over the link the kernel of the one before
runs and the host prepares the next. The host waits for a slot before it fills it again, and that is where
a transfer is stopped, or found to hang.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch

from services.common.errors import KvblendError
from services.gpu_agent.devices.base import Bytes, Hung, Watch
from services.gpu_agent.devices.cuda.batches import SUMS_BYTES, Batch, Fragment, Packed, pack, table_bytes
from services.gpu_agent.devices.cuda.gpu import Gpu
from services.gpu_agent.devices.cuda.host import HostMemory, address_of
from services.gpu_agent.devices.cuda.turn import Turn

# Filled, copied and moved by the kernel at the same time.
_SLOTS = 3
# Rotated pairs of a head; what is wider is refused at registration.
MAX_PAIRS = 256
# How long the host sleeps between two looks at the GPU, in seconds: short at first.
_FIRST_LOOK, _LATER_LOOK = 20e-6, 200e-6

# (staging, tables, where they are, grid): starts the kernel on the current stream.
Launch = Callable[[torch.Tensor, torch.Tensor, Packed, tuple[int, int]], None]


class Move(NamedTuple):
    """A batch and what starts its kernel."""

    batch: Batch
    launch: Launch


class Signal(NamedTuple):
    """A semaphore that is set when the last byte of every move before it has arrived."""

    address: int
    value: int


class Slot:
    """Staging memory for one batch, its tables, and pinned memory for blocks that are not registered."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.staging = gpu.empty(nbytes)
        self.tables = gpu.empty(table_bytes(MAX_PAIRS))
        self.host_tables: Bytes = gpu.pinned(table_bytes(MAX_PAIRS)).numpy()
        self.bounce: Bytes = gpu.pinned(nbytes).numpy()
        self.ready = gpu.event()
        self.done = gpu.event()
        # When it was last given work, by the monotonic clock; None: it has none.
        self.since: float | None = None
        # Fragments that lie in `bounce` once the work is done and belong into their blocks.
        self.owed: list[Fragment] = []
        # Fragments whose sums of terms lie here once the work is done.
        self.sums = gpu.pinned(SUMS_BYTES).numpy().view(np.uint64)
        self.summed: list[Fragment] = []

    def bounced(self, fragment: Fragment) -> Bytes:
        return self.bounce[fragment.start : fragment.start + fragment.nbytes]


class Lane:
    """`inbound`: arena to engine; else engine to arena. Transfers take turns."""

    def __init__(self, gpu: Gpu, host: HostMemory, slot_bytes: int, hang_seconds: float, inbound: bool) -> None:
        self.slot_bytes = slot_bytes
        # Seconds from the first byte to the last of the latest transfer, by the GPU's clock.
        self.device_seconds = 0.0
        self._gpu = gpu
        self._host = host
        self._hang_seconds = hang_seconds
        self._inbound = inbound
        self._link = gpu.stream()
        self._kernels = gpu.stream()
        self._slots = [Slot(gpu, slot_bytes) for _ in range(_SLOTS)]
        self._begin, self._end = gpu.event(timing=True), gpu.event(timing=True)
        self._begun = False
        self._turn = Turn()
        # Of the running transfer, by the number of its pieces.
        self._terms: defaultdict[int, int] = defaultdict(int)

    def run(self, work: Iterable[Move | Signal], watch: Watch) -> Mapping[int, int]:
        """Returns when the last byte has arrived: for each number of a piece the sum of its words' terms.

        Raises:
            Stopped: as `watch` says, with nothing in flight.
            Hung: what is in flight does not end; the lane is shut until it does.
            CudaError: the GPU refused; nothing is in flight.
        """
        with self._taking_turns(watch):
            self._terms = defaultdict(int)
            self._run(work, watch)
            return self._terms

    def warm(self, launch: Launch) -> None:
        """Compiles and loads a kernel, which finds nothing to do.

        Raises:
            KvblendError: OVERLOADED if the GPU does not come to it, or does not end it.
            CudaError: the GPU refused.
        """
        slot, until = self._slots[0], time.monotonic() + 2 * self._hang_seconds

        def watch() -> None:
            if time.monotonic() > until:
                raise KvblendError("OVERLOADED", "transfers hold the GPU for so long that nothing can be prepared")

        try:
            with self._taking_turns(watch):
                slot.tables[:256].zero_()
                launch(slot.staging, slot.tables, Packed(0, 0, 0, 0, 0, 0, 0), (1, 1))
                slot.since = time.monotonic()
                slot.done.record(self._kernels)
                # Compiling may have taken longer than any watch allows; hanging is noticed all the same.
                self._settle(slot, lambda: None)
        except Hung as hung:
            hung.keep(ExitStack())
            raise KvblendError("OVERLOADED", "the GPU does not end a kernel") from hung

    @contextmanager
    def _taking_turns(self, watch: Watch) -> Iterator[None]:
        with self._turn.taken(watch), self._gpu.on(self._kernels):
            yield

    def _run(self, work: Iterable[Move | Signal], watch: Watch) -> None:
        first, last = (self._link, self._kernels) if self._inbound else (self._kernels, self._link)
        self._begun = False
        try:
            slots = cycle(self._slots)
            slot = self._slots[-1]
            for item in work:
                if isinstance(item, Signal):
                    self._gpu.signal(*item, last)
                    # Part of the latest slot's work: whoever gives the memory back waits for it as well.
                    slot.since = time.monotonic()
                    slot.done.record(last)
                    continue
                slot = next(slots)
                self._settle(slot, watch)
                watch()
                slot.since = time.monotonic()
                try:
                    self._enqueue(slot, *item)
                except BaseException:
                    # What was enqueued of it must be waited for as well.
                    last.wait_stream(first)
                    raise
                finally:
                    slot.done.record(last)
            self._begins(first)
            self._end.record(last)
            self._drain(watch)
        except Hung:
            raise
        except BaseException:
            self._drain(lambda: None, pay=False)
            raise
        self._end.synchronize()
        self.device_seconds = self._begin.elapsed_time(self._end) / 1e3

    def _drain(self, watch: Watch, pay: bool = True) -> None:
        for slot in self._slots:
            self._settle(slot, watch, pay)

    def _settle(self, slot: Slot, watch: Watch, pay: bool = True) -> None:
        """Until the slot's work is done; then what it owes goes to its blocks (or nowhere, if nobody wants it)."""
        look = _FIRST_LOOK
        while slot.since is not None:
            if slot.done.query():
                slot.since = None
            elif time.monotonic() - slot.since > self._hang_seconds:
                raise Hung(self._wait_for_the_end)
            else:
                time.sleep(look)
                look = _LATER_LOOK if time.monotonic() - slot.since > 0.01 else look
                watch()
        for fragment in slot.owed if pay else ():
            fragment.host_rows()[:] = slot.bounced(fragment).reshape(fragment.planes, fragment.width)
        slot.owed.clear()
        for fragment, terms in zip(slot.summed, slot.sums[: len(slot.summed)].tolist(), strict=True):
            self._terms[fragment.number] += terms
        slot.summed.clear()

    def _wait_for_the_end(self) -> None:
        try:
            self._gpu.enter()
            self._link.synchronize()
            self._kernels.synchronize()
        finally:
            for slot in self._slots:
                slot.since = None
                slot.owed.clear()
                slot.summed.clear()
            self._turn.give_back()

    def _enqueue(self, slot: Slot, batch: Batch, launch: Launch) -> None:
        if self._inbound:
            # Before its tables, which take the host longer than this.
            self._begins(self._link)
            self._fetch(slot, batch)
        packed = pack(batch, slot.host_tables)
        tables = address_of(slot.host_tables)
        stream = self._link if self._inbound else self._kernels
        self._begins(stream)
        self._gpu.to_device(tables, packed.nbytes, slot.tables.data_ptr(), packed.nbytes, 1, stream.cuda_stream)
        if self._inbound:
            slot.ready.record(self._link)
            self._kernels.wait_event(slot.ready)
        launch(slot.staging, slot.tables, packed, (len(batch.tables.tiles), batch.most_planes))
        if not self._inbound:
            slot.ready.record(self._kernels)
            self._link.wait_event(slot.ready)
            self._send(slot, batch)
        if batch.summed:
            slot.summed.extend(batch.summed)
            nbytes, last = slot.sums[: len(batch.summed)].nbytes, self._kernels if self._inbound else self._link
            device, host = slot.tables.data_ptr() + packed.sums, int(slot.sums.ctypes.data)
            self._gpu.to_host(device, host, nbytes, nbytes, 1, last.cuda_stream)

    def _begins(self, stream: Any) -> None:
        """The transfer's first work comes next."""
        if not self._begun:
            self._begun = True
            self._begin.record(stream)

    def _fetch(self, slot: Slot, batch: Batch) -> None:
        for fragment in batch.fragments:
            host, pitch = self._direct(fragment)
            if host is None:
                bounced = slot.bounced(fragment)
                bounced.reshape(fragment.planes, fragment.width)[:] = fragment.host_rows()
                host, pitch = address_of(bounced), fragment.width
            device = slot.staging.data_ptr() + fragment.start
            self._gpu.to_device(host, pitch, device, fragment.width, fragment.planes, self._link.cuda_stream)

    def _send(self, slot: Slot, batch: Batch) -> None:
        for fragment in batch.fragments:
            host, pitch = self._direct(fragment)
            if host is None:
                slot.owed.append(fragment)
                host, pitch = address_of(slot.bounced(fragment)), fragment.width
            device = slot.staging.data_ptr() + fragment.start
            self._gpu.to_host(device, host, pitch, fragment.width, fragment.planes, self._link.cuda_stream)

    def _direct(self, fragment: Fragment) -> tuple[int | None, int]:
        """(where the fragment's first wanted byte is, its pitch) if the GPU can reach it."""
        block = fragment.piece.block
        address = address_of(block)
        if not self._host.is_registered(address, block.nbytes):
            return None, 0
        return address + fragment.host_start, fragment.pitch
