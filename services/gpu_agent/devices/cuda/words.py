"""Single words of GPU memory, read by the host."""

import time

import numpy as np

from services.gpu_agent.devices.base import Hung, Watch
from services.gpu_agent.devices.cuda.gpu import Gpu
from services.gpu_agent.devices.cuda.turn import Turn

WORD_BYTES = 8

_LOOK_SECONDS = 20e-6


class WordReader:
    """Copies words on a stream of its own, which waits for nothing: no engine and no transfer can hold it up."""

    def __init__(self, gpu: Gpu, hang_seconds: float) -> None:
        self._gpu = gpu
        self._hang_seconds = hang_seconds
        self._stream = gpu.stream()
        self._copied = gpu.event()
        self._word = gpu.pinned(WORD_BYTES).numpy().view(np.uint64)
        self._turn = Turn()

    def read(self, address: int, watch: Watch) -> int:
        """The u64 at this address of the GPU, which is a multiple of 8.

        Raises:
            Stopped: as `watch` says, before anything was begun.
            Hung: the copy does not end; nothing can be read until it does.
            CudaError: the GPU refused.
        """
        with self._turn.taken(watch):
            return self._read(address)

    def _read(self, address: int) -> int:
        host = int(self._word.ctypes.data)
        self._gpu.to_host(address, host, WORD_BYTES, WORD_BYTES, 1, self._stream.cuda_stream)
        self._copied.record(self._stream)
        until = time.monotonic() + self._hang_seconds
        while not self._copied.query():
            if time.monotonic() > until:
                raise Hung(self._wait_for_the_end)
            time.sleep(_LOOK_SECONDS)
        return int(self._word[0])

    def _wait_for_the_end(self) -> None:
        try:
            self._gpu.enter()
            self._stream.synchronize()
        finally:
            self._turn.give_back()
