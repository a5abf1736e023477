"""Servers to compare the service with: asyncio around the same verbs, and no-ops that take the same requests.

`python -m benchmarks.matcher.server --kind sync|asyncio --call match|no-op --chunks N --listen ADDRESSES`. The
asyncio server does without the interceptors that the service has, which is to its advantage.
"""

import argparse
import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, ClassVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from benchmarks.matcher import data, pages
from benchmarks.matcher.worker import PAGE_CHUNKS
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.config import ServiceSettings, load_settings
from services.common.lifecycle import Boot
from services.common.metrics import Latencies
from services.common.server import GrpcServer
from services.matcher.fold import Fold
from services.matcher.log.memory import MemoryLog
from services.matcher.replica import Replica
from services.matcher.service import MatcherService
from services.matcher.table import Table
from services.matcher.warm_up import compile_kernels

STORE = "bench"
_LIMIT_BYTES = 8 << 30
_THREADS = 16
_MESSAGE_BYTES = 16 << 20
_FILL_SECONDS = 300.0

Answer = Callable[[matcher_pb2.MatchRequest, Any], matcher_pb2.MatchResponse]


class _Settings(ServiceSettings):
    service: ClassVar[str] = "bench"


class _NoOp(matcher_pb2_grpc.MatcherServiceServicer):
    def Match(self, request: matcher_pb2.MatchRequest, context: Any) -> matcher_pb2.MatchResponse:
        del request, context
        return matcher_pb2.MatchResponse()


class _Filled(MatcherService):
    """The service's own verbs, over a table with the library in it."""

    def __init__(self, chunks: int, stack: ExitStack) -> None:
        compile_kernels()
        replica = Replica(MemoryLog(), lambda: Fold(Table(_LIMIT_BYTES)), 1 << 40, on_ready=lambda: None)
        replica.start()
        stack.enter_context(closing(replica))
        for first in range(0, chunks, PAGE_CHUNKS):
            texts = list(data.library(first, min(first + PAGE_CHUNKS, chunks)))
            replica.publish(pages.page(STORE, 1 + first, texts), _FILL_SECONDS)
        replica.wait_applied(pages.ask(STORE, texts[0].tokens, chunks).at_least, _FILL_SECONDS)
        super().__init__(replica, Boot("bench"), Latencies())


class _TimeLeft:
    """What the verbs ask of a context."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def time_remaining(self) -> float:
        return self._seconds


class _InThreads(matcher_pb2_grpc.MatcherServiceServicer):
    """Verbs of a synchronous service, in threads of an asyncio server."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._pool = ThreadPoolExecutor(_THREADS)

    async def Match(self, request: matcher_pb2.MatchRequest, context: Any) -> matcher_pb2.MatchResponse:
        left = _TimeLeft(context.time_remaining())
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, request, left)


class _NoOpAtOnce(matcher_pb2_grpc.MatcherServiceServicer):
    async def Match(self, request: matcher_pb2.MatchRequest, context: Any) -> matcher_pb2.MatchResponse:
        del request, context
        return matcher_pb2.MatchResponse()


async def _serve(servicer: matcher_pb2_grpc.MatcherServiceServicer, addresses: Sequence[str]) -> None:
    options = [(f"grpc.max_{way}_message_length", _MESSAGE_BYTES) for way in ("receive", "send")]
    server = grpc.aio.server(options=options)
    matcher_pb2_grpc.add_MatcherServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    readiness = health.aio.HealthServicer()
    await readiness.set("readiness", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(readiness, server)
    for address in addresses:
        server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("sync", "asyncio"), required=True)
    parser.add_argument("--call", choices=("match", "no-op"), required=True)
    parser.add_argument("--chunks", type=int, default=0)
    parser.add_argument("--listen", required=True)
    arguments = parser.parse_args(argv)
    with ExitStack() as stack:
        servicer: Any = _NoOp() if arguments.call == "no-op" else _Filled(arguments.chunks, stack)
        if arguments.kind == "asyncio":
            asynchronous = _NoOpAtOnce() if arguments.call == "no-op" else _InThreads(servicer.Match)
            asyncio.run(_serve(asynchronous, arguments.listen.split(",")))
            return
        settings = load_settings(_Settings, ["--listen", arguments.listen])
        server = GrpcServer(settings, ["bench"])
        matcher_pb2_grpc.add_MatcherServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        server.start()
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
