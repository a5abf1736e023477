"""A lower tier in memory whose speed and health the test chooses, and what tests of it wait for."""

import threading
import time
from collections.abc import Callable, Sequence

from store_kit import LocalStore

from kvblend.v1 import object_pb2
from services.store.objects import ObjectKey
from services.store.tiers.base import Read, TierHealth, Write


class MemoryTier:
    tier_id = "memory"

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, tuple[object_pb2.ObjectMeta, bytes]] = {}
        self.down = False
        # Reads and writes wait for these.
        self.reading = threading.Event()
        self.writing = threading.Event()
        self.reading.set()
        self.writing.set()
        self.asked: list[ObjectKey] = []

    def find(self, keys: Sequence[ObjectKey], timeout: float) -> list[object_pb2.ObjectMeta | None]:
        del timeout
        self.asked += keys
        found = [self.objects.get(key) for key in keys]
        return [None if item is None or self.down else item[0] for item in found]

    def read_into(self, reads: Sequence[Read], timeout: float) -> list[bool]:
        return [self.read_one(key, target, timeout) for key, _, target in reads]

    def read_one(self, key: ObjectKey, target: memoryview, timeout: float) -> bool:
        if not self.reading.wait(timeout) or self.down or key not in self.objects:
            target[:] = b"x" * len(target)
            return False
        target[:] = self.objects[key][1]
        return True

    def write(self, writes: Sequence[Write], timeout: float) -> list[bool]:
        if not self.writing.wait(timeout) or self.down:
            return [False] * len(writes)
        for key, meta, payload in writes:
            self.objects[key] = (object_pb2.ObjectMeta.FromString(meta.SerializeToString()), bytes(payload))
        return [True] * len(writes)

    def delete(self, keys: Sequence[ObjectKey], timeout: float) -> int:
        del timeout
        return sum(self.objects.pop(key, None) is not None for key in keys)

    def delete_where(self, matches: Callable[[object_pb2.ObjectMeta], bool], timeout: float) -> int:
        if self.down:
            return 0
        return self.delete([key for key, (meta, _) in self.objects.items() if matches(meta)], timeout)

    def health(self) -> TierHealth:
        return TierHealth(not self.down, "down" if self.down else "", objects=len(self.objects))

    def close(self) -> None:
        pass


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for what another thread does."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.001)


def in_l2(store: LocalStore, chunks: int) -> Callable[[], bool]:
    return lambda: sum(owner == MemoryTier.tier_id for owner, *_ in store.outbox.held()) == chunks


def empty_arena(store: LocalStore) -> None:
    """By the watermark, which leaves what is still to be written."""

    def emptied() -> bool:
        with store.state.lock:
            store.state.evict_down_to(0)
            return len(store.state.catalog) == 0

    until(emptied)
