"""Failpoints: named places at which a test stops, kills or fails a service. Off unless asked for, then only for tests.

    KVBLEND_FAILPOINTS="commit.state=kill@3;l2.write=sleep(0.2)"

arms points for a process: `point=action`, at every passage, or `@n`: at the n-th one alone. Actions:

    stop           SIGSTOP to the own process, until somebody continues it
    kill           SIGKILL to the own process
    raise          RuntimeError, a fault that nobody expected
    error(REASON)  KvblendError of that reason
    sleep(s)       waits s seconds, at most 60

`POINTS` says what each point lies between.
"""

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.common.errors import ERRORS, KvblendError
from services.common.logs import get_logger

VARIABLE = "KVBLEND_FAILPOINTS"

POINTS = {
    "reserve.chunk": "before the blocks of a wanted chunk are taken",
    "reserve.answer": "all blocks are reserved, the agent does not know it yet",
    "header.reserved": "a header has its place and its writer; its state is not RESERVED yet",
    "header.freed": "a header's generation is raised; its state is not FREE yet",
    "meta.write": "a payload is complete; nothing is written behind it yet",
    "commit.state": "a payload and its meta are complete; the state is not COMMITTED yet",
    "commit.visible": "the state is COMMITTED; the catalog does not know the object yet",
    "commit.answer": "everything is committed, the agent does not know it yet",
    "name.write": "another name of a text is behind its meta; it does not count yet",
    "quarantine.state": "a write has expired; its block's state is not QUARANTINED yet",
    "evict.chunk": "a chunk has left the catalog; its blocks are not freed yet",
    "copy.begin": "before leases become BUSY",
    "copy.end": "before BUSY leases end",
    "outbox.append": "before a change enters the outbox",
    "publish.send": "before a page is sent to a matcher",
    "publish.acknowledge": "a page is in the log; the outbox does not know it yet",
    "l2.write": "before an object is written to L2",
    "l2.mark": "a chunk is in L2; the arena does not say so yet",
    "l2.fetch": "blocks are reserved; nothing has been read from L2 yet",
    "l2.land": "everything has been read from L2; nothing is visible yet",
    "recovery.header": "a start scans a header that is in use",
    "recovery.object": "a start adopts a committed object",
    "agent.gather": "blocks are granted to the agent; nothing is copied yet",
    "agent.commit": "the agent has copied; it has not committed yet",
    "agent.scatter": "leases are BUSY; nothing is copied yet",
    "agent.end": "the agent has copied; the store does not know it yet",
}

_MAX_SLEEP_SECONDS = 60.0
_SPEC = re.compile(r"(?P<point>[a-z0-9.]+)=(?P<action>[a-z]+)(\((?P<argument>[\w.]+)\))?(@(?P<nth>[1-9]\d*))?")

_log = get_logger("failpoints")


@dataclass(frozen=True)
class _Armed:
    action: str
    argument: str
    # 0: at every passage.
    nth: int


_armed: dict[str, _Armed] = {}
_passages: Counter[str] = Counter()
_lock = threading.Lock()


def parse(text: str) -> dict[str, _Armed]:
    """The armed points of a setting. Raises ValueError, which says what is wrong with it."""
    found = {}
    for spec in filter(None, text.split(";")):
        match = _SPEC.fullmatch(spec.strip())
        if match is None:
            raise ValueError(f"{spec!r} is not point=action, point=action(argument) or point=action@n")
        point, action, argument = match["point"], match["action"], match["argument"] or ""
        if point not in POINTS:
            raise ValueError(f"there is no point {point!r}")
        if action not in ("stop", "kill", "raise", "error", "sleep"):
            raise ValueError(f"there is no action {action!r}")
        if action == "error" and argument not in ERRORS:
            raise ValueError(f"there is no error {argument!r}")
        if action == "sleep" and not 0 <= float(argument) <= _MAX_SLEEP_SECONDS:
            raise ValueError(f"sleeps take 0 to {_MAX_SLEEP_SECONDS:.0f} seconds")
        found[point] = _Armed(action, argument, int(match["nth"] or 0))
    return found


def passage(point: str) -> None:
    """Does what is armed for this point; nothing if nothing is."""
    if _armed:
        _act(point)


def _act(point: str) -> None:
    with _lock:
        armed = _armed.get(point)
        _passages[point] += 1
        if armed is None or armed.nth not in (0, _passages[point]):
            return
    if armed.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif armed.action == "sleep":
        time.sleep(float(armed.argument))
    elif armed.action == "error":
        raise KvblendError(armed.argument, f"failpoint {point}")
    else:
        raise RuntimeError(f"failpoint {point}")


@contextmanager
def armed(text: str) -> Iterator[Counter[str]]:
    """Within: these points and no others, for this process. Yields how often each point was passed."""
    before = dict(_armed)
    _replace(parse(text))
    try:
        yield _passages
    finally:
        _replace(before)


def _replace(points: dict[str, _Armed]) -> None:
    with _lock:
        _armed.clear()
        _armed.update(points)
        _passages.clear()


def arm_from_environment() -> None:
    """What the variable says. Raises ValueError."""
    text = os.environ.get(VARIABLE, "")
    _replace(parse(text))
    if text:
        _log.warning("failpoints are armed: this process is under test", points=text)


arm_from_environment()
