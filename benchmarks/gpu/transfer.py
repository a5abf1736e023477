"""One transfer on a stream of its own, timed as a lane times it; and what a machine may not offer."""

import time
from collections.abc import Callable

import torch

# As a lane, the host sleeps while the GPU works.
_LOOK_SECONDS = 20e-6


class Absent(Exception):
    """This machine has no such method."""

    def __init__(self, method: str, why: str) -> None:
        super().__init__(why)
        self.method = method


class Transfer:
    """`device_seconds`: from before the first thing was enqueued to the end of the last, by the GPU's clock."""

    def __init__(self) -> None:
        self.device_seconds = 0.0
        self._stream = torch.cuda.Stream()
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(self, enqueue: Callable[[int], None]) -> None:
        """`enqueue` is given the stream, which is also torch's current one. Returns when all of it is done."""
        with torch.cuda.stream(self._stream):
            self._begin.record()
            try:
                enqueue(self._stream.cuda_stream)
            finally:
                # The host's arrays may be reused by the next: what has begun ends first.
                self._end.record()
                while not self._end.query():
                    time.sleep(_LOOK_SECONDS)
        self.device_seconds = self._begin.elapsed_time(self._end) / 1e3
