"""A server's end of connections, scripted: what it takes and gives comes in pieces of chosen lengths."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

from services.common.redis_connection import BoundedConnection
from services.common.redis_socket import BoundedSocket

# What is answered to the words of a command.
Answer = Callable[[list[bytes]], bytes]


class ScriptedSocket:
    """Always readable and writable, poll thinks. With `buffered` as TLS is: one buffer at a time."""

    def __init__(self, answer: Answer, cuts: Sequence[int], end: socket.socket, *, buffered: bool) -> None:
        self.is_buffered = buffered
        self._answer = answer
        self._cuts = cuts
        # In each direction.
        self._turns = {"in": 0, "out": 0}
        self._end = end
        self._heard = bytearray()
        self._waiting = bytearray()

    def never_wait(self) -> None:
        pass

    def send_now(self, buffers: Sequence[bytes | memoryview]) -> int:
        data = b"".join(buffers[:1] if self.is_buffered else buffers)[: self._cut("in")]
        self._heard += data
        while (words := self._command()) is not None:
            self._waiting += self._answer(words)
        return len(data)

    def receive_now(self, buffers: Sequence[memoryview]) -> int:
        assert all(len(buffer) for buffer in buffers)
        left = data = bytes(self._waiting[: self._cut("out")])
        for buffer in buffers[:1] if self.is_buffered else buffers:
            buffer[: len(left)] = left[: len(buffer)] if len(left) >= len(buffer) else left
            left = left[len(buffer) :]
        count = len(data) - len(left)
        del self._waiting[:count]
        return count

    def is_quiet(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._end.fileno()

    def _cut(self, direction: str) -> int:
        self._turns[direction] += 1
        return self._cuts[self._turns[direction] % len(self._cuts)]

    def _command(self) -> list[bytes] | None:
        """The first whole command that has been heard, taken away."""
        rest = bytes(self._heard)
        words: list[bytes] = []
        head, found, rest = rest.partition(b"\r\n")
        for _ in range(int(head[1:]) if found else 0):
            length, found, rest = rest.partition(b"\r\n")
            if not found or len(rest) < int(length[1:]) + 2:
                return None
            words.append(rest[: int(length[1:])])
            rest = rest[int(length[1:]) + 2 :]
        if not found:
            return None
        self._heard = bytearray(rest)
        return words


@contextmanager
def scripted(
    answer: Answer, cuts: Sequence[int], lanes: int, *, buffered: bool = False
) -> Iterator[list[BoundedConnection]]:
    pairs = [socket.socketpair() for _ in range(lanes)]
    try:
        sockets = [ScriptedSocket(answer, cuts, near, buffered=buffered) for near, _ in pairs]
        for _, far in pairs:
            far.send(b"!")
        yield [_connection(cast(BoundedSocket, made)) for made in sockets]
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def _connection(made: BoundedSocket) -> BoundedConnection:
    return BoundedConnection(SimpleNamespace(bounded=made, pack_command=_packed))


def _packed(*words: object) -> list[bytes]:
    data = [word.encode() if isinstance(word, str) else bytes(word) for word in words]  # type: ignore[call-overload]
    return [b"*%d\r\n" % len(data), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in data)]
