"""The engine's own work comes first: a call reads or writes KV only when the event that it names has come."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.errors import KvblendError
from services.gpu_agent.call import Call
from services.gpu_agent.devices.base import Device, Hung, KvMemory, Stopped
from services.gpu_agent.engines.instances import Instance

# Seconds between two looks: short at first, then an eighth of what was waited for already, as what lasts long is not
# noticed much later by that.
_FIRST_LOOK, _LATEST_LOOK, _SHARE = 50e-6, 1e-3, 8

# Why nobody waits any more, as an error.
_ENDS = {
    common.REASON_DEADLINE: ("DEADLINE_EXCEEDED", "the engine's event did not come in time"),
    common.REASON_SUPERSEDED: ("SUPERSEDED", "the request ended before the engine's event came"),
    common.REASON_SESSION_LOST: ("UNKNOWN_INSTANCE", "the engine is gone, and its event did not come"),
}


def wait_for_engine(device: Device, instance: Instance, event: pb.Event, call: Call) -> None:
    """Returns when the engine's work that `event` names is done.

    The host looks, again and again: a stream that waited could not be freed if the event never comes. Between two
    looks nothing is held, so that whoever closes the instance never waits for its engine.

    Raises:
        KvblendError: INVALID_ARGUMENT, HANDLE_UNUSABLE: there is no such event. DEADLINE_EXCEEDED: it did not come.
            SUPERSEDED, UNKNOWN_INSTANCE: the request or the instance ended meanwhile.
    """
    if event.kind == pb.EVENT_KIND_COMPLETE or event == pb.Event():
        return
    if event.kind == pb.EVENT_KIND_UNSPECIFIED:
        raise KvblendError("INVALID_ARGUMENT", "the event does not say of which kind it is")
    began = time.monotonic()
    with ExitStack() as opened:
        if event.kind == pb.EVENT_KIND_SEMAPHORE:
            done = _reached(instance, event, call)
        else:
            done = _looked_at(opened.enter_context(device.opened(event)))
        try:
            while not _look(instance, done):
                call.watch()
                waited = time.monotonic() - began
                time.sleep(min(_LATEST_LOOK, max(_FIRST_LOOK, waited / _SHARE)))
        except Stopped as stopped:
            raise KvblendError(*_ENDS[stopped.reason]) from stopped


def _reached(instance: Instance, event: pb.Event, call: Call) -> Callable[[KvMemory], bool]:
    count = instance.memory.semaphores
    if event.semaphore >= count:
        raise KvblendError("INVALID_ARGUMENT", f"semaphore {event.semaphore} of {count} that are registered")
    if not event.value:
        raise KvblendError("INVALID_ARGUMENT", "a semaphore is waited for with a value of at least 1: it begins at 0")
    return lambda memory: memory.semaphore(event.semaphore, call.watch) >= event.value


def _looked_at(done: Callable[[], bool]) -> Callable[[KvMemory], bool]:
    return lambda _: done()


def _look(instance: Instance, done: Callable[[KvMemory], bool]) -> bool:
    with ExitStack() as held:
        memory = held.enter_context(instance.copying())
        try:
            return done(memory)
        except Hung as hung:
            hung.keep(held)
            raise KvblendError("DEADLINE_EXCEEDED", f"the engine's event cannot be looked at: {hung}") from hung
