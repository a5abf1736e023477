"""Host memory that the GPU copies from and to directly: the arena's slabs, registered in the background."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from services.common.logs import get_logger
from services.gpu_agent.devices.base import Bytes
from services.gpu_agent.devices.cuda.driver import CudaError, Driver

_log = get_logger("host-memory")


def address_of(memory: Bytes) -> int:
    return int(memory.ctypes.data)


class HostMemory:
    """Ranges by address. What is not registered (yet) goes through a bounce buffer, at a fraction of the speed."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        # address -> end, of what is registered.
        self._registered: dict[int, int] = {}
        self._adopted: dict[int, Future[None]] = {}
        self._worker = ThreadPoolExecutor(1, "register-host-memory", driver.bind)

    def adopt(self, memory: Bytes) -> None:
        """Registers mapped memory soon; it must stay mapped until `release`."""
        address = address_of(memory)
        self._adopted[address] = self._worker.submit(self._register, address, memory.nbytes)

    def _register(self, address: int, nbytes: int) -> None:
        try:
            self._driver.register(address, nbytes)
        except CudaError as error:
            _log.error("a slab cannot be registered: its copies stay slow", detail=str(error), bytes=nbytes)
            return
        with self._lock:
            self._registered[address] = address + nbytes

    def release(self, memory: Bytes) -> None:
        """Forgets memory that is about to be unmapped; no copy of it may be running."""
        address = address_of(memory)
        pending = self._adopted.pop(address, None)
        if pending is not None and not pending.cancel():
            pending.result()
        with self._lock:
            known = self._registered.pop(address, None)
        if known is not None:
            # By the thread that registers, as its context is this driver's.
            self._worker.submit(self._driver.unregister, address).result()

    def is_registered(self, address: int, nbytes: int) -> bool:
        with self._lock:
            return any(first <= address and address + nbytes <= end for first, end in self._registered.items())

    def wait(self) -> None:
        """Until everything adopted so far is registered."""
        for pending in list(self._adopted.values()):
            pending.result()

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)
