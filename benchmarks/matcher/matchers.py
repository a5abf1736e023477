"""Matcher processes as they run in earnest: started, filled over the wire, killed, started again."""

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.common.processes import ROOT, cpu_seconds
from benchmarks.matcher import data, pages
from benchmarks.matcher.worker import PAGE_CHUNKS
from kvblend.v1 import matcher_pb2_grpc
from services.common.channels import open_channel
from tests.store_edges.redis_server import RedisServer

_START_SECONDS = 180.0
_CALL_SECONDS = 60.0
_BETWEEN_LOOKS = 0.01


@contextmanager
def folder() -> Iterator[Path]:
    """A short path: names of unix sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvb-bench-") as made:
        yield Path(made)


@contextmanager
def redis(where: Path, *options: str) -> Iterator[str]:
    """A real Redis or Valkey with an append-only file; its URL over a unix socket."""
    server = RedisServer(where)
    server.start("--appendonly", "yes", *options)
    try:
        yield server.unix_url
    finally:
        server.kill()


def _free_port() -> int:
    """Not one that a client's connection may be given."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


class Matcher:
    """A process `command`, listening on a unix socket and a loopback port."""

    def __init__(self, where: Path, name: str, command: Sequence[str]) -> None:
        self.unix = f"unix:{where}/{name}.sock"
        self.tcp = f"127.0.0.1:{_free_port()}"
        self._command = [sys.executable, "-m", *command, "--listen", f"{self.unix},{self.tcp}"]
        self._errors = where / f"{name}.log"
        self.start()

    def start(self) -> None:
        with self._errors.open("w") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
            )
        self.channel = open_channel(self.unix)
        self.stub: Any = matcher_pb2_grpc.MatcherServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def wait_until_ready(self) -> None:
        """Until the health service says so, as a probe would see it."""
        health = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service="readiness")
        give_up_at = time.monotonic() + _START_SECONDS
        while True:
            try:
                if health.Check(request, timeout=1).status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError as error:
                if self._process.poll() is not None or time.monotonic() > give_up_at:
                    raise RuntimeError(f"no matcher: {self._errors.read_text()[-2000:]}") from error
            time.sleep(_BETWEEN_LOOKS)

    @property
    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def kill(self) -> None:
        self.channel.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def matcher(where: Path, name: str, log: str) -> Iterator[Matcher]:
    """The matcher service over a log, ready."""
    with started(where, name, ["services.matcher", "--log", log, "--log-level", "error"]) as process:
        yield process


@contextmanager
def started(where: Path, name: str, command: Sequence[str]) -> Iterator[Matcher]:
    process = Matcher(where, name, command)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.kill()


def publish_library(process: Matcher, store: str, chunks: int) -> int:
    """The library's first chunks through the service; the last sequence, which is applied when this returns."""
    for first in range(0, chunks, PAGE_CHUNKS):
        stop = min(first + PAGE_CHUNKS, chunks)
        process.stub.Publish(pages.page(store, 1 + first, list(data.library(first, stop))), timeout=_CALL_SECONDS)
    process.stub.Match(pages.ask(store, data.query(1024, 0, chunks, 0).tokens, chunks), timeout=_START_SECONDS)
    return chunks
