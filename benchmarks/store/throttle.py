"""A proxy between a store and its Redis, as fast and as far as told: `python -m benchmarks.store.throttle IN OUT`.

IN and OUT are unix sockets. Answers JSON lines: {"do": "set", "bytes_per_second": ..., "latency": seconds} changes
both directions of every connection at once, also in the middle of a transfer. Bytes a second null: unlimited, 0:
nothing passes at all. The connections share the speed, as they would a wire.
"""

import json
import queue
import socket
import sys
import threading
import time

_BLOCK = 256 << 10
# At low speed blocks are so small that they take no longer than this.
_BLOCK_SECONDS = 0.005
_WAITING_BLOCKS = 64


class Wire:
    """One direction, shared by all connections."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bytes_per_second: float | None = None
        self._free_at = 0.0
        self.latency = 0.0

    def set(self, bytes_per_second: float | None, latency: float) -> None:
        with self._changed:
            self._bytes_per_second = bytes_per_second
            self._free_at = 0.0
            self.latency = latency
            self._changed.notify_all()

    @property
    def block(self) -> int:
        rate = self._bytes_per_second
        return _BLOCK if rate is None else max(256, min(_BLOCK, int(rate * _BLOCK_SECONDS)))

    def take(self, size: int) -> None:
        """Returns when so many bytes have passed."""
        with self._changed:
            while self._bytes_per_second == 0:
                self._changed.wait()
            rate = self._bytes_per_second
            if rate is None:
                return
            self._free_at = max(self._free_at, time.monotonic()) + size / rate
            until = self._free_at
            while self._bytes_per_second == rate and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)


def _pump(source: socket.socket, target: socket.socket, wire: Wire) -> None:
    """Two threads: what was read waits for its time before it is sent on."""
    line: queue.Queue[tuple[float, bytes]] = queue.Queue(_WAITING_BLOCKS)

    def send() -> None:
        while True:
            due, data = line.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                for first in range(0, len(data), block := wire.block):
                    part = data[first : first + block]
                    wire.take(len(part))
                    target.sendall(part)
            except OSError:
                source.close()
                return

    threading.Thread(target=send, daemon=True).start()
    data = b"x"
    while data:
        try:
            data = source.recv(wire.block)
        except OSError:
            data = b""
        line.put((time.monotonic() + wire.latency, data))


def _serve(listener: socket.socket, upstream: str, wires: tuple[Wire, Wire]) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(upstream)
        except OSError:
            client.close()
            continue
        threading.Thread(target=_pump, args=(client, server, wires[0]), daemon=True).start()
        threading.Thread(target=_pump, args=(server, client, wires[1]), daemon=True).start()


def main() -> None:
    path, upstream = sys.argv[1:]
    wires = Wire(), Wire()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    threading.Thread(target=_serve, args=(listener, upstream, wires), daemon=True).start()
    print(json.dumps({"ready": True}), flush=True)
    for text in sys.stdin:
        order = json.loads(text)
        for wire in wires:
            wire.set(order["bytes_per_second"], order["latency"] / 2)
        print(json.dumps({"set": True}), flush=True)


if __name__ == "__main__":
    main()
