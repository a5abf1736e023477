"""The whole check, part by part, beside a running store.

It takes the state's lock for moments only, and repairs by the ways by which chunks leave anyway.
"""

import threading
import time
from collections.abc import Callable, Iterator

from kvblend.v1 import store_pb2
from services.common.errors import KvblendError
from services.store.check.blocks import check_blocks
from services.store.check.findings import Check, Inspection
from services.store.check.log import Asker, check_log
from services.store.check.objects import check_objects
from services.store.check.tier import check_tier
from services.store.check.tier_log import check_tier_log
from services.store.parts import Parts

_Part = tuple["store_pb2.CheckPart", Callable[[Inspection], Check]]

# Between two messages about progress.
_TELL_SECONDS = 0.25


class Checks:
    """One check at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._running = threading.Lock()

    def run(self, fix: bool, remaining: Callable[[], float]) -> Iterator[store_pb2.CheckStoreResponse]:
        """`remaining`: seconds that the caller still waits.

        Raises:
            KvblendError: OVERLOADED while another check runs.
        """
        if not self._running.acquire(blocking=False):
            raise KvblendError("OVERLOADED", "another check of this store is running")
        try:
            for part, check in _parts_of(self._parts):
                state, writes = self._parts.state, self._parts.writes
                inspection = Inspection(state, writes, self._parts.arena.directory, fix, remaining)
                yield from run_part(part, check, inspection)
        finally:
            self._running.release()


def _parts_of(parts: Parts) -> Iterator[_Part]:
    yield store_pb2.CHECK_PART_BLOCKS, check_blocks
    yield store_pb2.CHECK_PART_OBJECTS, check_objects
    asker = Asker(parts.matchers, parts.name, parts.arena.epoch)
    if parts.matchers.configured:
        yield store_pb2.CHECK_PART_LOG, lambda inspection: check_log(inspection, asker)
    if parts.l2 is not None:
        tier = parts.l2.tier
        yield store_pb2.CHECK_PART_L2, lambda inspection: check_tier(inspection, tier)
        if parts.matchers.configured:
            yield store_pb2.CHECK_PART_L2_LOG, lambda inspection: check_tier_log(inspection, tier, asker)


def run_part(
    part: "store_pb2.CheckPart", check: Callable[[Inspection], Check], inspection: Inspection
) -> Iterator[store_pb2.CheckStoreResponse]:
    """Progress now and then, and at the end what was found. A part that cannot be finished says why."""
    done = total = 0
    why = ""
    told = time.monotonic()
    try:
        for done, total in check(inspection):
            if inspection.remaining() <= 0:
                raise KvblendError("DEADLINE_EXCEEDED", "the time given did not suffice")
            if time.monotonic() - told >= _TELL_SECONDS:
                told = time.monotonic()
                yield store_pb2.CheckStoreResponse(part=part, done=done, total=total)
    except KvblendError as error:
        why = error.message
    yield store_pb2.CheckStoreResponse(
        part=part, done=done, total=total, ended=True, unfinished=why, findings=inspection.findings.messages()
    )
