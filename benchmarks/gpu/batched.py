"""Many small copies in one call of the driver, straight between the arena and the engine's planes: no kernel."""

import ctypes
from typing import Any

import numpy as np

from benchmarks.gpu.copies import Bench
from benchmarks.gpu.plans import copies
from benchmarks.gpu.transfer import Absent, Transfer
from services.gpu_agent.devices.base import Piece
from services.gpu_agent.devices.cuda.driver import CudaError, check, load
from services.gpu_agent.devices.cuda.memory import CudaKvMemory

# The call as CUDA 12.8 brought it; later versions have another of the same name.
_VERSION = 12080
# The source is read in the stream's order: what was enqueued before may have written it.
_IN_STREAM_ORDER = 1
# Pieces whose copies one call gets: thousands, while the GPU works on those of the call before.
_PIECES = 8
_Batch = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *[ctypes.c_void_p] * 3,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
)


class BatchedCopies:
    """K stays where it is: nothing is computed on the way."""

    name = "batched copies"
    rotates = False

    def __init__(self, made: Bench) -> None:
        """Raises Absent where the driver has no such call, or refuses it."""
        assert isinstance(made.memory, CudaKvMemory)
        self._planes = made.memory.tables[0]
        self._shape = made.memory.layout.groups[0]
        self._block_tokens = made.memory.layout.block_tokens
        self.inbound, self.outbound = Transfer(), Transfer()
        try:
            self._call = _load()
            # A driver may have it and refuse such copies: a chunk is tried.
            self.store(made.pieces(1, 0))
        except CudaError as error:
            raise Absent(self.name, f"absent: {error}") from error

    def retrieve(self, pieces: list[Piece]) -> None:
        self.inbound.run(lambda stream: self._enqueue(pieces, stream, store=False))

    def store(self, pieces: list[Piece]) -> None:
        self.outbound.run(lambda stream: self._enqueue(pieces, stream, store=True))

    def _enqueue(self, pieces: list[Piece], stream: int, *, store: bool) -> None:
        for first in range(0, len(pieces), _PIECES):
            some = copies(pieces[first : first + _PIECES], self._planes, self._block_tokens, self._shape)
            to, source = (some.host, some.device) if store else (some.device, some.host)
            attributes = np.array([_IN_STREAM_ORDER, 0, 0, 0, 0, 0], np.uint32)
            first_of_attributes = np.zeros(1, np.uintp)
            failed = ctypes.c_size_t()
            code = self._call(
                to.ctypes.data,
                source.ctypes.data,
                some.sizes.ctypes.data,
                len(to),
                attributes.ctypes.data,
                first_of_attributes.ctypes.data,
                1,
                ctypes.addressof(failed),
                stream,
            )
            if code:
                raise CudaError("cuMemcpyBatchAsync", code, f"of {len(to)} copies, at {failed.value}")


def _load() -> Any:
    """Raises CudaError."""
    function, status = ctypes.c_void_p(), ctypes.c_int()
    cuda, name = load(), "cuMemcpyBatchAsync"
    check(
        cuda,
        "cuGetProcAddress_v2",
        ctypes.c_char_p(name.encode()),
        ctypes.byref(function),
        ctypes.c_int(_VERSION),
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if not function.value:
        raise CudaError(name, status.value, "the driver does not have it")
    return _Batch(function.value)
