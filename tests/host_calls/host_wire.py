"""Either end of the host's socket by hand: a caller, and a service that follows a script."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import grpc
from host_service import NAME, SECONDS, Service

from kvblend.host_calls.frames import SUFFIX, Frames
from kvblend.v1 import host_calls_pb2 as pb

Script = Callable[[socket.socket, bytes, bytes], None]


def call_frame(method: str, body: bytes, timeout: float = SECONDS) -> bytes:
    head = pb.HostCall(method=f"/{NAME}/{method}", timeout_us=int(timeout * 1e6)).SerializeToString()
    return len(head).to_bytes(4, "little") + len(body).to_bytes(4, "little") + head + body


class RawCaller:
    """A connection that was greeted."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(SECONDS)
        self.socket.connect(f"{path}{SUFFIX}")
        self._frames = Frames(self.socket)
        assert self._frames.receive(time.monotonic() + SECONDS) == (b"", b"")

    def send(self, method: str, body: bytes, timeout: float = SECONDS) -> None:
        self.socket.sendall(call_frame(method, body, timeout))

    def receive(self) -> tuple[pb.HostAnswer, bytes]:
        """Raises EOFError, OSError."""
        head, body = self._frames.receive(time.monotonic() + SECONDS)
        return pb.HostAnswer.FromString(head), body

    def ends(self) -> bool:
        """Whether the service ends the connection without another byte."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.socket.close()


def nothing_before(connection: socket.socket) -> None:
    Frames(connection).send(b"", b"")


class ScriptedService:
    """Serves one connection after another. `received` are whole requests; `script` answers them."""

    def __init__(self, path: Path, script: Script, greet: Callable[[socket.socket], None] = nothing_before) -> None:
        self.received: list[bytes] = []
        self.connections = 0
        self._script, self._greet = script, greet
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{path}{SUFFIX}")
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                with closing(connection), suppress(EOFError, OSError, ValueError):
                    self._greet(connection)
                    frames = Frames(connection)
                    while True:
                        head, body = frames.receive()
                        self.received.append(body)
                        self._script(connection, head, body)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(SECONDS)


@contextmanager
def old_service(path: Path) -> Iterator[Service]:
    """gRPC alone."""
    service = Service()
    with futures.ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        service.added_to(server)
        server.add_insecure_port(f"unix:{path}")
        server.start()
        try:
            yield service
        finally:
            server.stop(None).wait(SECONDS)
