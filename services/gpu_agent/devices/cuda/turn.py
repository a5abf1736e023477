"""Work on the GPU that is done one after the other, and stands still while a piece of it hangs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from services.gpu_agent.devices.base import Hung, Watch

_LOOK_SECONDS = 0.01


class Turn:
    """One has it at a time. Who ends with Hung keeps it: whoever waits for the end of the work gives it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, watch: Watch) -> Iterator[None]:
        """Raises as `watch` says, while somebody else has it."""
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            watch()
        try:
            yield
        except Hung:
            raise
        except BaseException:
            self._lock.release()
            raise
        self._lock.release()

    def give_back(self) -> None:
        self._lock.release()
