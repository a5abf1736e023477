"""When an engine's work on its GPU is done, told by semaphores: 64-bit numbers in its GPU memory that only grow.

They order engine and agent whatever the two processes share, and also where they share no /dev/shm.

words = torch.empty(16, dtype=torch.int64, device="cuda")   # once
semaphores = CudaSemaphores(words.data_ptr(), len(words), steps=8)
client.register_kv_cache(..., semaphores=semaphores.handle)

client.store(..., event=semaphores.event(stream.cuda_stream))   # when the stream's work so far is done
"""

import threading

from kvblend.cuda_memory import cuda_handle, set_semaphore, zero_memory
from kvblend.v1 import agent_pb2 as pb

_WORD_BYTES = 8
# The driver's name for "this thread's default stream": as many streams as there are threads.
_PER_THREAD_STREAM = 2


class CudaSemaphores:
    """`count` u64 at `address` of this process's GPU memory, the last `steps` of them for retrieves in steps.

    The memory is zeroed here, stays allocated until the engine unregisters, and is written by nobody else. Each stream
    that events are asked for takes a semaphore for good: what one stream writes comes in order, and nothing else does.

    Raises:
        CudaUnavailable: there is no CUDA driver, or it refused.
        ValueError: there are not so many semaphores, or not at such an address.
    """

    def __init__(self, address: int, count: int, *, steps: int = 0) -> None:
        if address % _WORD_BYTES or not 0 <= steps < count:
            raise ValueError(f"{count} semaphores, {steps} of them for steps, cannot lie at {address:#x}")
        # Where the semaphores for LayerSteps begin.
        self.first_step = count - steps
        self._address = address
        self._lock = threading.Lock()
        # stream -> (semaphore, the latest value written).
        self._streams: dict[int, tuple[int, int]] = {}
        zero_memory(address, count * _WORD_BYTES)
        self.handle = cuda_handle(address, count * _WORD_BYTES)

    def address(self, semaphore: int) -> int:
        """Where it lies, for `wait_for_semaphore`."""
        return self._address + semaphore * _WORD_BYTES

    def event(self, stream: int) -> pb.Event:
        """Comes when everything that is on the stream now is done. `stream` is its CUstream; 0: the default stream.

        Ask before the stream is made to wait for the steps of the same call, and keep the stream until that call has
        ended. Threads may share a stream.

        Raises:
            CudaUnavailable: the driver refused; then no event was made.
            ValueError: more streams than semaphores, or the default stream of each thread.
        """
        if stream == _PER_THREAD_STREAM:
            raise ValueError("the default stream of each thread is not one stream: name a stream")
        with self._lock:
            semaphore, value = self._streams.get(stream, (len(self._streams), 0))
            if semaphore >= self.first_step:
                raise ValueError(f"more streams than the {self.first_step} semaphores that are there for them")
            # First: a value is never used again, whatever became of its write.
            self._streams[stream] = semaphore, value + 1
            set_semaphore(stream, self.address(semaphore), value + 1)
        return pb.Event(kind=pb.EVENT_KIND_SEMAPHORE, semaphore=semaphore, value=value + 1)
