"""The matcher's one composition point."""

import sys
from contextlib import ExitStack, closing

from kvblend.v1 import matcher_pb2_grpc
from services.common.errors import KvblendError
from services.common.lifecycle import Boot
from services.common.logs import get_logger
from services.common.server import GrpcServer
from services.matcher.fold import Fold
from services.matcher.log.base import Log
from services.matcher.log.open import open_log
from services.matcher.replica import Replica
from services.matcher.service import MatcherService
from services.matcher.settings import MatcherSettings
from services.matcher.table import Table
from services.matcher.warm_up import compile_kernels

SERVICE = "kvblend.v1.MatcherService"
_CHECK_SECONDS = 5.0

_log = get_logger("server")


def make_log(settings: MatcherSettings) -> Log:
    """Exits with one line for a log that may never be used; one that is away is no error."""
    try:
        log = open_log(settings.log, settings.log_key_prefix)
        try:
            log.check(_CHECK_SECONDS)
        except KvblendError as error:
            _log.warning("the log cannot be reached yet", why=str(error))
        return log
    except ValueError as error:
        # Without a password that it may have.
        shown = settings.log.rpartition("@")[2]
        sys.exit(f"kvblend matcher: setting log = {shown!r} is refused: {error}")


def build(settings: MatcherSettings, stack: ExitStack) -> GrpcServer:
    """Components in start order. The server is ready when the replica has caught up with its log."""
    log = make_log(settings)
    compile_kernels()
    server = GrpcServer(settings, [SERVICE], replicated=True, starts_ready=False)
    replica = Replica(
        log,
        lambda: Fold(Table(settings.memory_limit_bytes)),
        settings.snapshot_bytes,
        on_ready=lambda: server.set_ready(True),
    )
    stack.enter_context(closing(replica))
    service = MatcherService(replica, Boot(settings.service), server.latencies)
    matcher_pb2_grpc.add_MatcherServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    replica.start()
    return server
