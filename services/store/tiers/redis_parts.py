"""The hot path: parts of an object go from the arena to Redis, and from Redis into the arena, without a copy between.

Parts are asked for ahead, so that the server always has something to do, and may come over several connections at once.
What has arrived is hashed while it is still in the processor's cache and the kernel is receiving what follows.
"""

import select
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from redis._parsers.base import BaseParser
from redis.exceptions import AskError, ResponseError

from services.common.checksums import Checksum
from services.common.redis_connection import Argument, BoundedConnection, LinkError
from services.common.redis_socket import BoundedSocket

# Parts, and slices of them, on their way at once on one connection: enough that neither side waits for the other.
_SENT_AHEAD = 4
_ASKED_AHEAD = 2
_PIECE_BYTES = 256 << 10
_LINE_BYTES = 512
_NOTHING = b"$0\r\n\r"
_END = b"\r\n"


class MissingPart(Exception):
    """Redis has no such key, or nothing in it."""


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


class _Slice(NamedTuple):
    """What is asked for at once: some of a part's bytes."""

    part: int
    command: bytes
    place: memoryview


def _slices(names: Sequence[bytes], places: Sequence[memoryview]) -> list[_Slice]:
    found = []
    for part, (name, place) in enumerate(zip(names, places, strict=True)):
        for first in range(0, len(place), PartReader.SLICE_BYTES):
            piece = place[first : first + PartReader.SLICE_BYTES]
            end = first + len(piece)
            # To the very end of the value, so that one that is too long is noticed.
            last = b"-1" if end == len(place) else b"%d" % (end - 1)
            words = (b"GETRANGE", name, b"%d" % first, last)
            command = b"*4\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
            found.append(_Slice(part, command, piece))
    return found


class PartReader:
    """Receives parts into their places. `checksum` is of all bytes in order, if `outcomes` has no failure.

    Args:
        places: where each part goes; their lengths are the parts' lengths.
    """

    # Redis copies what it answers once more: pieces that stay in its processor's cache are answered sooner.
    SLICE_BYTES = 512 << 10

    def __init__(self, names: Sequence[bytes], places: Sequence[memoryview]) -> None:
        # By part: None once it is there; MissingPart or a refusal (ResponseError).
        self.outcomes: list[Exception | None] = [None] * len(names)
        self.checksum = Checksum()
        self._slices = _slices(names, places)
        self._next = iter(range(len(self._slices)))
        self._filled = [0] * len(self._slices)
        # The slice that is hashed next, and how much of it is.
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
        """Yields whether anything came; ends when nothing is left to ask for."""
        asked: deque[int] = deque()
        line = memoryview(bytearray(_LINE_BYTES))
        while True:
            while len(asked) < _ASKED_AHEAD and (index := next(self._next, None)) is not None:
                socket.sendall(self._slices[index].command)
                asked.append(index)
            if not asked:
                return
            index = asked.popleft()
            yield from self._receive_slice(socket, index, line)

    def _receive_slice(self, socket: BoundedSocket, index: int, line: memoryview) -> Iterator[bool]:
        place = self._slices[index].place
        expected = b"$%d\r\n" % len(place)
        # No reply is shorter than the one for a key that is not there, so nothing of the next is read.
        yield from _fill(socket, line[: len(_NOTHING)])
        if line[: len(_NOTHING)] == _NOTHING:
            yield from _fill(socket, line[:1])
            self._fail(index, MissingPart())
            return
        if line[0] == ord("-"):
            self._fail(index, (yield from _refusal(socket, line)))
            return
        yield from _fill(socket, line[len(_NOTHING) : len(expected)])
        if line[: len(expected)] != expected:
            raise WrongLength
        # Of a slice of less than ten bytes the first has been read with its length.
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
        self.outcomes[self._slices[index].part] = outcome
        if not isinstance(outcome, AskError):
            # The object is of no use any more.
            self._next = iter(())

    def _arrived(self, index: int, count: int) -> None:
        """Hashes what has come in without a gap."""
        self._filled[index] += count
        while self._hashing < len(self._slices):
            place, filled = self._slices[self._hashing].place, self._filled[self._hashing]
            self.checksum.update(place[self._hashed : filled])
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
