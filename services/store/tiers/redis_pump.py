"""Several connections at once, on the caller's thread: while one waits for the server, another moves."""

import select
import time
from collections.abc import Generator, Mapping
from typing import TypeAlias

from services.common.redis_connection import BoundedConnection, LinkError

# Yields the events (POLLIN, POLLOUT) that it waits for, or 0 to go on at once; ends when it is done.
Lane: TypeAlias = Generator[int, None, None]

_SPIN_SECONDS = 100e-6


def pump(lanes: Mapping[BoundedConnection, Lane], deadline: float) -> None:
    """Runs each lane on its connection to its end. Raises LinkError by `deadline` (monotonic seconds) at the latest."""
    by_number = {connection.fileno(): lane for connection, lane in lanes.items()}
    poller = select.poll()
    awaited: dict[int, int] = {}
    ready = list(by_number)
    try:
        while by_number:
            for number in ready:
                events = next(by_number[number], None)
                if events is None:
                    del by_number[number]
                    if awaited.pop(number, 0):
                        poller.unregister(number)
                    continue
                # Whoever would go on at once is ready by what it writes, if not by what it reads.
                events = events or select.POLLOUT
                if awaited.get(number) != events:
                    poller.register(number, events)
                    awaited[number] = events
            if by_number:
                ready = _wait(poller, deadline)
    finally:
        for lane in by_number.values():
            lane.close()


def _wait(poller: select.poll, deadline: float) -> list[int]:
    """Who can go on. What is near answers sooner than a thread is put to sleep and woken, so that comes second."""
    begun = time.monotonic()
    while (now := time.monotonic()) < deadline:
        left = deadline - now if now - begun > _SPIN_SECONDS else 0
        if events := poller.poll(left * 1000):
            return [number for number, _ in events]
    raise LinkError("no answer in time", late=True)


def advance(buffers: list[memoryview], count: int) -> None:
    """So many bytes of them are done with."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]
