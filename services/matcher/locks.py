"""Many readers or one writer; a waiting writer goes before new readers, so neither side starves."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.errors import KvblendError


class ReadWriteLock:
    """Waits end with KvblendError DEADLINE_EXCEEDED after `timeout` seconds."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0

    @contextmanager
    def reading(self, timeout: float) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._writing and not self._writers_waiting, timeout):
                raise KvblendError("DEADLINE_EXCEEDED", "the table was being written for all of the call's time")
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self, timeout: float) -> Iterator[None]:
        with self._changed:
            self._writers_waiting += 1
            try:
                free = self._changed.wait_for(lambda: not self._writing and not self._readers, timeout)
            finally:
                self._writers_waiting -= 1
            if not free:
                self._changed.notify_all()
                raise KvblendError("DEADLINE_EXCEEDED", "the table was being read for all of the call's time")
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
