"""The life of a service process: start in order, serve, drain on SIGTERM, stop in reverse order."""

import gc
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from typing import NoReturn

from kvblend.v1 import common_pb2 as pb
from services.common.config import ServiceSettings
from services.common.heap import keep_freed_memory
from services.common.logs import configure_logs, get_logger
from services.common.metrics import serve_metrics
from services.common.server import GrpcServer

_log = get_logger("lifecycle")

# Calls make thousands of objects that live as long as the call, and reference counts free them: the collector, which
# looks for cycles alone, would go through them several times a call.
_COLLECTOR = (50_000, 20, 50)

# Between two looks at what else than a signal ends a service, in seconds.
_LOOK_SECONDS = 0.2

Build = Callable[[ExitStack], GrpcServer]


class Boot:
    """This start of this process: its id, age and version."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.boot_id = secrets.token_bytes(16)
        self._started = time.monotonic()

    def liveness(self, dependencies: list[pb.Dependency] | None = None) -> pb.Liveness:
        return pb.Liveness(
            service=self.service,
            boot_id=self.boot_id,
            uptime_seconds=time.monotonic() - self._started,
            version=metadata.version("kvblend"),
            dependencies=dependencies or [],
        )


def run_service(settings: ServiceSettings, build: Build) -> None:
    """Runs a service until SIGTERM or SIGINT.

    `build` makes the components in start order, entering each into the stack, and returns the
    server; the stack closes them in reverse order after the last call has ended. A server that failed (`fail`) ends
    the process with status 1 instead, without them: what they hold goes with the process.
    """
    configure_logs(settings.service, settings.log_level, settings.log_json)
    gc.set_threshold(*_COLLECTOR)
    keep_freed_memory()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with ExitStack() as stack:
        server = build(stack)
        serve_metrics(settings.metrics_port)
        server.start()
        while not stopping.wait(_LOOK_SECONDS):
            if server.failure:
                _crash(server, settings.grace_seconds)
            if _is_orphan():
                _log.warning("supervisor is gone, stopping")
                break
        server.set_ready(False)
        _log.info("draining", seconds=settings.drain_seconds)
        time.sleep(settings.drain_seconds)
        server.stop(settings.grace_seconds)
    _log.info("stopped")


def _crash(server: GrpcServer, grace_seconds: float) -> NoReturn:
    """Answers what is in flight, then ends at once."""
    _log.error("of no use any more: ending, to be started again", detail=server.failure)
    server.set_ready(False)
    server.stop(grace_seconds)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def _is_orphan() -> bool:
    """Its supervisor (KVBLEND_SUPERVISED: a pid) is gone: `kvblend up` must leave nothing behind when it is killed.

    Compared with the supervisor's pid, not with 1: a container's or session's reaper may have any pid, and
    a supervisor may itself be process 1.
    """
    supervisor = os.environ.get("KVBLEND_SUPERVISED")
    return supervisor is not None and os.getppid() != int(supervisor)
