"""Grace periods: what a reader may still look at is not used again before it has left.

Readers take no lock while they read. The writer unlinks things first and retires them; a reader that comes later
cannot reach them. Each retirement gets a number, each reader remembers the number that was next when it came; so what
was retired under a number is free when every reader inside came later. A reader that never leaves would only keep
memory from being used again, and calls end by their deadlines.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Grace:
    """Any number of readers, one writer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._inside: Counter[int] = Counter()
        self._retired: deque[tuple[int, Callable[[], None]]] = deque()

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._lock:
            came = self._next
            self._inside[came] += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[came] -= 1
                if not self._inside[came]:
                    del self._inside[came]

    def retire(self, free: Callable[[], None]) -> None:
        """`free` will be called by the writer (in `collect`), when nobody can see what it frees any more."""
        with self._lock:
            self._retired.append((self._next, free))
            self._next += 1

    def collect(self) -> None:
        """Frees what can be freed by now. The writer calls it now and then."""
        with self._lock:
            oldest = min(self._inside, default=self._next)
            due = []
            while self._retired and self._retired[0][0] < oldest:
                due.append(self._retired.popleft()[1])
        for free in due:
            free()

    @property
    def pending(self) -> int:
        """Retirements that still wait for readers."""
        return len(self._retired)
