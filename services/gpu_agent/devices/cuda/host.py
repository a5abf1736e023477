"""Host memory that the GPU copies from and to directly: the arena's slabs, registered in the background."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

from services.common.logs import get_logger
from services.gpu_agent.devices.base import Bytes
from services.gpu_agent.devices.cuda.driver import CudaError, Driver

_log = get_logger("host-memory")


def address_of(memory: Bytes) -> int:
    return int(memory.ctypes.data)


class HostMemory:
    """Ranges by address. What is not registered (yet) goes through a bounce buffer, at a fraction of the speed.

    The driver is asked by one thread, in order, and nobody waits for it: it holds the memory itself, which so stays
    mapped until the driver has let it go.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        # address -> end, of what is registered.
        self._registered: dict[int, int] = {}
        self._adopted: dict[int, Future[bool]] = {}
        self._worker = ThreadPoolExecutor(1, "register-host-memory", driver.bind)

    def adopt(self, memory: Bytes) -> None:
        """Registers mapped memory soon."""
        self._adopted[address_of(memory)] = self._worker.submit(self._register, memory)

    def _register(self, memory: Bytes) -> bool:
        address = address_of(memory)
        try:
            self._driver.register(address, memory.nbytes)
        except CudaError as error:
            _log.error("a slab cannot be registered: its copies stay slow", detail=str(error), bytes=memory.nbytes)
            return False
        with self._lock:
            self._registered[address] = address + memory.nbytes
        return True

    def release(self, memory: Bytes) -> None:
        """The caller has no use for it any more; no copy of it may be running. Returns at once."""
        pending = self._adopted.pop(address_of(memory), None)
        if pending is not None and not pending.cancel():
            self._worker.submit(self._unregister, memory, pending)

    def _unregister(self, memory: Bytes, registering: "Future[bool]") -> None:
        """By the thread that registers, after it."""
        if not registering.result(timeout=0):
            return
        address = address_of(memory)
        with self._lock:
            del self._registered[address]
        try:
            self._driver.unregister(address)
        except CudaError as error:
            _log.error("a slab cannot be unregistered", detail=str(error), bytes=memory.nbytes)

    def is_registered(self, address: int, nbytes: int) -> bool:
        with self._lock:
            return any(first <= address and address + nbytes <= end for first, end in self._registered.items())

    def wait(self, timeout: float) -> bool:
        """Until everything adopted so far has been registered or refused; False: not in so many seconds."""
        return not wait(list(self._adopted.values()), timeout).not_done

    def close(self) -> None:
        """What still waits is left out; the process is about to end."""
        self._worker.shutdown(wait=False, cancel_futures=True)
