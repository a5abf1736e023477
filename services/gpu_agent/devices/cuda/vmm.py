"""An engine's memory of CUDA's virtual memory management: physical chunks, mapped one behind the other."""

from collections.abc import Sequence

from services.common.errors import KvblendError
from services.common.logs import get_logger
from services.gpu_agent.devices.cuda.driver import CudaError, Driver
from services.gpu_agent.engines.descriptors import Chunk

_log = get_logger("cuda-vmm")

# More than any GPU has, and far from where sums of sizes would wrap.
_MOST_BYTES = 1 << 44


class MappedChunks:
    """`nbytes` bytes from the address `first` on. The descriptors may be closed afterwards.

    The sizes are what the engine says: CUDA maps no chunk with a size that it does not have. The memory is free when
    both sides have let it go, so an engine's end does not pull it away from a copy.

    Raises:
        CudaError: something is no descriptor of such memory, or has another size; then nothing stays mapped.
        KvblendError: HANDLE_OUT_OF_BOUNDS for sizes that cannot be.
    """

    def __init__(self, driver: Driver, chunks: Sequence[Chunk]) -> None:
        self.nbytes = sum(chunk.nbytes for chunk in chunks)
        if not 0 < self.nbytes <= _MOST_BYTES:
            raise KvblendError("HANDLE_OUT_OF_BOUNDS", f"chunks of {self.nbytes} bytes cannot be")
        self._driver = driver
        # (address, bytes) of each chunk.
        self._mapped: list[tuple[int, int]] = []
        self.first = driver.reserve(self.nbytes)
        try:
            at = self.first
            for chunk in chunks:
                driver.map_descriptor(chunk.descriptor, at, chunk.nbytes)
                self._mapped.append((at, chunk.nbytes))
                at += chunk.nbytes
            driver.allow_access(self.first, self.nbytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmaps all of it. No kernel or copy may be running: unlike IPC memory's end this waits for nothing."""
        try:
            for address, nbytes in self._mapped:
                self._driver.unmap(address, nbytes)
            self._driver.free_addresses(self.first, self.nbytes)
        except CudaError as error:
            _log.error("an engine's memory cannot be unmapped", detail=str(error))
