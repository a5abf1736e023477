"""The hot path: parts of an object go from the arena to Redis, and from Redis into the arena, without a copy between.

Parts are asked for ahead, so that the server always has something to do, and may come over several connections at once.
What has arrived is hashed while it is still in the processor's cache and the kernel is receiving what follows.
"""

import select
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import xxhash
from redis._parsers.base import BaseParser
from redis.exceptions import AskError, ResponseError

from services.common.redis_connection import Argument, BoundedConnection, LinkError
from services.common.redis_socket import BoundedSocket

# Parts on their way at once, on one connection: enough that neither side waits for the other.
_SENT_AHEAD = 4
_ASKED_AHEAD = 2
_PIECE_BYTES = 256 << 10
_LINE_BYTES = 512
_NOTHING = b"$-1\r\n"
_END = b"\r\n"


class MissingPart(Exception):
    """Redis has no such key."""


class WrongLength(Exception):
    """A part does not have the length that it must have. The connection is not usable any more."""


def send_parts(connection: BoundedConnection, commands: Sequence[Sequence[Argument]]) -> list[Any]:
    """Replies in order; a refusal is a ResponseError among them, and what comes after it may not have been sent."""
    replies: list[Any] = []
    for sent, command in enumerate(commands, 1):
        connection.send_from_memory(*command)
        if sent - len(replies) >= _SENT_AHEAD:
            replies.append(connection.receive_any())
            if isinstance(replies[-1], ResponseError):
                break
    while connection.unanswered:
        replies.append(connection.receive_any())
    return replies


class PartReader:
    """Receives parts into their places. `digest` is of all bytes in order, if `outcomes` has no failure.

    Args:
        places: where each part goes; their lengths are the parts' lengths.
    """

    def __init__(self, names: Sequence[bytes], places: Sequence[memoryview]) -> None:
        self._names = names
        self._places = places
        # By part: None once it is there; MissingPart or a refusal (ResponseError).
        self.outcomes: list[Exception | None] = [None] * len(names)
        self.digest = xxhash.xxh3_64()
        self._next = iter(range(len(names)))
        self._filled = [0] * len(names)
        # The part that is hashed next, and how much of it is.
        self._hashing = 0
        self._hashed = 0

    def run(self, connections: Sequence[BoundedConnection], deadline: float) -> None:
        """Raises LinkError by `deadline` at the latest, WrongLength."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(connection.raw()) for connection in connections]
            running = {socket: self._receive(socket) for socket in sockets}
            poller = select.poll()
            for socket in sockets:
                poller.register(socket, select.POLLIN)
            while running:
                progressed = False
                for socket, receiving in list(running.items()):
                    moved = next(receiving, None)
                    if moved is None:
                        del running[socket]
                        poller.unregister(socket)
                    progressed |= moved is not False
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkError("no answer in time", late=True)
                if not progressed:
                    poller.poll(left * 1000)

    def _receive(self, socket: BoundedSocket) -> Generator[bool, None, None]:
        """Yields whether anything came; ends when no part is left to ask for."""
        asked: deque[int] = deque()
        line = memoryview(bytearray(_LINE_BYTES))
        while True:
            while len(asked) < _ASKED_AHEAD and (index := next(self._next, None)) is not None:
                name = self._names[index]
                socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
                asked.append(index)
            if not asked:
                return
            index = asked.popleft()
            yield from self._receive_part(socket, index, line)

    def _receive_part(self, socket: BoundedSocket, index: int, line: memoryview) -> Iterator[bool]:
        place = self._places[index]
        expected = b"$%d\r\n" % len(place)
        # No reply is shorter than this one, so nothing of the next is read.
        yield from _fill(socket, line[: len(_NOTHING)])
        if line[: len(_NOTHING)] == _NOTHING:
            self._fail(index, MissingPart())
            return
        if line[0] == ord("-"):
            self._fail(index, (yield from _refusal(socket, line)))
            return
        yield from _fill(socket, line[len(_NOTHING) : len(expected)])
        if line[: len(expected)] != expected:
            raise WrongLength
        # Of a part of less than ten bytes the first has been read with its length.
        early = max(0, len(_NOTHING) - len(expected))
        place[:early] = line[len(expected) : len(expected) + early]
        self._arrived(index, early)
        while (filled := self._filled[index]) < len(place):
            more = socket.receive_now(place[filled : filled + _PIECE_BYTES])
            self._arrived(index, more)
            yield more > 0
        yield from _fill(socket, line[: len(_END)])
        if line[: len(_END)] != _END:
            raise WrongLength

    def _fail(self, index: int, outcome: Exception) -> None:
        self.outcomes[index] = outcome
        if not isinstance(outcome, AskError):
            # The object is of no use any more.
            self._next = iter(())

    def _arrived(self, index: int, count: int) -> None:
        """Hashes what has come in without a gap."""
        self._filled[index] += count
        while self._hashing < len(self._places):
            place, filled = self._places[self._hashing], self._filled[self._hashing]
            self.digest.update(place[self._hashed : filled])
            self._hashed = filled
            if filled < len(place):
                return
            self._hashing += 1
            self._hashed = 0


def _fill(socket: BoundedSocket, view: memoryview) -> Iterator[bool]:
    while len(view):
        count = socket.receive_now(view)
        view = view[count:]
        if len(view):
            yield count > 0


def _refusal(socket: BoundedSocket, line: memoryview) -> Generator[bool, None, ResponseError]:
    """The error whose first bytes are in `line` already."""
    end = len(_NOTHING)
    while line[end - len(_END) : end] != _END:
        if end == len(line):
            raise WrongLength
        yield from _fill(socket, line[end : end + 1])
        end += 1
    error = BaseParser.parse_error(bytes(line[1 : end - len(_END)]).decode("utf-8", "replace"))
    if not isinstance(error, ResponseError):
        raise LinkError(str(error))
    return error
