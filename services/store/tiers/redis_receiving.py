"""The hot path out of Redis: parts of objects come into the arena, without a copy between.

They are asked for in slices, ahead of time and over several connections, so that the server always has something to
do. What has arrived is hashed while it is still in the processor's cache and the kernel is receiving what follows.
"""

import select
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash
from redis._parsers.base import BaseParser
from redis.exceptions import AskError, MovedError, ResponseError

from services.common.redis_connection import BoundedConnection, LinkError
from services.common.redis_socket import BoundedSocket
from services.store.tiers.redis_format import cut
from services.store.tiers.redis_pump import Lane, advance, pump

# Slices on their way at once on one connection: enough that neither side waits for the other.
_ASKED_AHEAD = 2
_LINE_BYTES = 512
_NOTHING = b"$0\r\n\r"
_END = b"\r\n"


class MissingPart(Exception):
    """Redis has no such key, or nothing in it."""


class WrongLength(Exception):
    """A part does not have the length that it must have. The connection is not usable any more."""


@dataclass(eq=False)
class _Slice:
    """What is asked for at once: some of a part's bytes."""

    whole: "Incoming"
    part: int
    command: bytes
    place: memoryview
    filled: int = 0


class Incoming:
    """One object on its way. It has landed when every byte is there; `digest` is then of all of them in order.

    `failures`: by part, what came instead: MissingPart, WrongLength, or a refusal (ResponseError).
    """

    # Redis copies what it answers once more: pieces that stay in its processor's cache are answered sooner.
    SLICE_BYTES = 512 << 10

    def __init__(self, names: Sequence[bytes], place: memoryview) -> None:
        self.names = names
        self.places = cut(place, len(names))
        self.failures: dict[int, Exception] = {}
        self.digest = xxhash.xxh3_64()
        self.slices = [piece for part in range(len(names)) for piece in self._slices_of(part)]
        # The slice that is hashed next, and how much of it is.
        self._hashing = 0
        self._hashed = 0

    @property
    def landed(self) -> bool:
        return self._hashing == len(self.slices)

    @property
    def is_of_use(self) -> bool:
        """Nothing is missing yet, but perhaps what another server has."""
        return all(
            isinstance(failure, AskError) and not isinstance(failure, MovedError) for failure in self.failures.values()
        )

    def arrived(self, piece: _Slice, count: int) -> None:
        """Hashes what has come in without a gap."""
        piece.filled += count
        while self._hashing < len(self.slices):
            current = self.slices[self._hashing]
            self.digest.update(current.place[self._hashed : current.filled])
            self._hashed = current.filled
            if current.filled < len(current.place):
                return
            self._hashing += 1
            self._hashed = 0

    def _slices_of(self, part: int) -> Iterator[_Slice]:
        name, place = self.names[part], self.places[part]
        for first in range(0, len(place), self.SLICE_BYTES):
            piece = place[first : first + self.SLICE_BYTES]
            end = first + len(piece)
            # To the very end of the value, so that one that is too long is noticed.
            last = b"-1" if end == len(place) else b"%d" % (end - 1)
            words = (b"GETRANGE", name, b"%d" % first, last)
            command = b"*4\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
            yield _Slice(self, part, command, piece)


def receive(objects: Sequence[Incoming], connections: Sequence[BoundedConnection], deadline: float) -> None:
    """What becomes of each object it says itself. Raises LinkError by `deadline` at the latest.

    One that has neither landed nor failed was asked for behind a part of the wrong length: nobody knows yet.
    """
    todo = (piece for whole in objects for piece in whole.slices if whole.is_of_use)
    lanes: Mapping[BoundedConnection, Lane] = {connection: _lane(connection, todo) for connection in connections}
    pump(lanes, deadline)


def _lane(connection: BoundedConnection, todo: Iterator[_Slice]) -> Lane:
    asked: deque[_Slice] = deque()
    try:
        with connection.raw() as socket:
            socket.never_wait()
            # What has been read of the next reply.
            begun = b""
            while True:
                while len(asked) < _ASKED_AHEAD and (piece := next(todo, None)) is not None:
                    asked.append(piece)
                    yield from _ask(socket, piece.command)
                if not asked:
                    return
                begun = yield from _receive_slice(socket, asked[0], begun, len(asked) > 1)
                asked.popleft()
    except WrongLength as error:
        asked[0].whole.failures[asked[0].part] = error


def _ask(socket: BoundedSocket, command: bytes) -> Lane:
    while command := command[socket.send_now([command]) :]:
        yield select.POLLOUT


def _receive_slice(socket: BoundedSocket, piece: _Slice, begun: bytes, more: bool) -> Generator[int, None, bytes]:
    """The reply whose first bytes are `begun`; returns those of the next, if there are `more`."""
    whole, place = piece.whole, piece.place
    expected = b"$%d\r\n" % len(place)
    # No reply is shorter than the one for a key that is not there, so nothing of the next is read.
    start = begun or (yield from _read(socket, len(_NOTHING)))
    if start == _NOTHING:
        yield from _read(socket, 1)
        whole.failures[piece.part] = MissingPart()
        return b""
    if start.startswith(b"-"):
        whole.failures[piece.part] = yield from _refusal(socket, start)
        return b""
    # Of a slice of less than ten bytes the first has been read with its length.
    length, early = expected[len(start) :], start[len(expected) :]
    if start != expected[: len(start)] + early:
        raise WrongLength
    place[: len(early)] = early
    whole.arrived(piece, len(early))
    rest, end = bytearray(len(length)), bytearray(len(_END) + (len(_NOTHING) if more else 0))
    buffers = [view for view in (memoryview(rest), place[len(early) :], memoryview(end)) if len(view)]
    came = len(early) - len(rest)
    while buffers:
        count = socket.receive_now(buffers)
        advance(buffers, count)
        came += count
        if came >= len(early) and rest != length:
            raise WrongLength
        if count:
            whole.arrived(piece, max(0, min(came, len(place)) - piece.filled))
        if buffers:
            yield 0 if count and socket.is_buffered else select.POLLIN
    if not end.startswith(_END):
        raise WrongLength
    return bytes(end[len(_END) :])


def _read(socket: BoundedSocket, size: int) -> Generator[int, None, bytes]:
    data = bytearray(size)
    left = [memoryview(data)]
    while True:
        count = socket.receive_now(left)
        advance(left, count)
        if not left:
            return bytes(data)
        yield 0 if count and socket.is_buffered else select.POLLIN


def _refusal(socket: BoundedSocket, line: bytes) -> Generator[int, None, ResponseError]:
    """The error whose first bytes are in `line` already."""
    while not line.endswith(_END):
        if len(line) >= _LINE_BYTES:
            raise WrongLength
        line += yield from _read(socket, 1)
    error = BaseParser.parse_error(line[1 : -len(_END)].decode("utf-8", "replace"))
    if not isinstance(error, ResponseError):
        raise LinkError(str(error))
    return error
