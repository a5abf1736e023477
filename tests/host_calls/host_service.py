"""A service whose methods do what tests of calls need, and channels to it; `python host_service.py PATH` runs it."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import grpc
from pydantic import Field

from kvblend.host_calls import host_channel
from services.common.channels import CLIENT_OPTIONS
from services.common.config import ServiceSettings
from services.common.errors import KvblendError
from services.common.server import GrpcServer

NAME = "kvblend.test.Calls"
SECONDS = 20.0
BIN = b"\x00\xff\x80"


class Settings(ServiceSettings):
    service: ClassVar[str] = "matcher"
    listen: str = Field("127.0.0.1:50051", description="Address.")


def eventually(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)


class Service:
    """Messages are bytes. `begun` counts what handlers were given, `called_back` what callbacks ran for."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.called_back: Counter[str] = Counter()
        self.late: list[str] = []
        self.closed: Counter[str] = Counter()
        self.active: dict[str, bool] = {}
        self.release = threading.Event()

    def echo(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.begun[request.decode(errors="replace")[:40]] += 1
        return request

    def fail(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if request == b"bug":
            raise ZeroDivisionError
        raise KvblendError(request.decode(), "because of ☂")

    def abort(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata((("key", "välue".encode().hex()), ("some-bin", BIN)))
        context.abort(grpc.StatusCode.OK if request == b"OK" else grpc.StatusCode.ABORTED, "so it is")

    def set_code(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_code(grpc.StatusCode.NOT_FOUND)
        context.set_details("nothing")
        return request

    def wait(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Until `release`, whatever the caller does. Callbacks count its end."""
        name = request.decode()
        self.begun[name] += 1
        if not context.add_callback(lambda: self.called_back.update([name])):
            self.late.append(name)
        self.release.wait(SECONDS)
        self.active[name] = bool(context.is_active())
        return request

    def wait_silently(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.begun[request.decode()] += 1
        self.release.wait(SECONDS)
        return request

    def while_active(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        name = request.decode()
        self.begun[name] += 1
        eventually(lambda: not context.is_active())
        self.closed[name] += 1
        return request

    def metadata(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return repr(sorted((k, v) for k, v in context.invocation_metadata() if k.startswith("x-"))).encode()

    def remaining(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return str(context.time_remaining()).encode()

    def large(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return bytes(int(request))

    def count(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(lambda: self.called_back.update(["count"]))
        for number in range(int(request)):
            yield b"" if number % 3 == 2 else str(number).encode()

    def fail_midway(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"first"
        raise KvblendError(request.decode(), "midway")

    def endless(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        name = request.decode()
        self.begun[name] += 1
        context.add_callback(lambda: self.called_back.update([name]))
        try:
            while context.is_active():
                yield bytes(1000)
                time.sleep(0.001)
        finally:
            self.closed[name] += 1

    def pause(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """One answer, and then none while the caller waits."""
        try:
            yield b"first"
            eventually(lambda: not context.is_active())
        finally:
            self.closed[request.decode()] += 1

    def added_to(self, server: GrpcServer) -> None:
        unary = ("echo", "fail", "abort", "set_code", "wait", "wait_silently", "while_active", "metadata", "remaining")
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(getattr(self, name), bytes, bytes) for name in (*unary, "large")
        }
        for name in ("count", "fail_midway", "endless", "pause"):
            handlers[name] = grpc.unary_stream_rpc_method_handler(getattr(self, name), bytes, bytes)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
        server.add_registered_method_handlers(NAME, handlers)


@contextmanager
def serving(path: Path, **settings: Any) -> Iterator[tuple[Service, GrpcServer]]:
    service = Service()
    server = GrpcServer(Settings(listen=f"unix:{path}", **settings), [NAME])
    service.added_to(server)
    server.start()
    try:
        yield service, server
    finally:
        service.release.set()
        server.stop(5)


def unary(channel: grpc.Channel, method: str) -> Any:
    return channel.unary_unary(f"/{NAME}/{method}")


def stream(channel: grpc.Channel, method: str) -> Any:
    return channel.unary_stream(f"/{NAME}/{method}")


def grpc_alone(path: Path) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{path}", options=CLIENT_OPTIONS)


def host_alone(path: Path, **more: Any) -> grpc.Channel:
    """Whatever would go over gRPC fails."""
    nowhere = grpc.insecure_channel(f"unix:{path}.nowhere", options=CLIENT_OPTIONS)
    return host_channel(f"unix:{path}", nowhere, **more)


def main(path: str) -> None:
    with serving(Path(path)):
        print("ready", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
