"""The hot path out of Redis: parts of objects come into the arena, without a copy between.

They are asked for in slices, ahead of time, so that the server always has something to do, and are read in the order in
which they were asked for. What has arrived is hashed while it is still in the processor's cache and the server sends
what follows.
"""

import os
import select
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from redis._parsers.base import BaseParser
from redis.exceptions import AskError, MovedError, ResponseError

from services.common.checksums import Checksum
from services.common.redis_connection import BoundedConnection, LinkError
from services.common.redis_socket import BoundedSocket, advance
from services.store.tiers.redis_format import cut

# Slices on their way at once on one connection: enough that neither side waits for the other.
_ASKED_AHEAD = 2
# Looked again so often, about 0.1 ms: what is near comes sooner than a thread is put to sleep and woken.
_LOOKS = 200
_LINE_BYTES = 512
_NOTHING = b"$0\r\n"
_END = b"\r\n"
_COMMAND = b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n"


class MissingPart(Exception):
    """Redis has no such key, or nothing in it."""


class WrongLength(Exception):
    """A part does not have the length that it must have. The connection is not usable any more."""


@dataclass(eq=False, slots=True)
class _Slice:
    """What is asked for at once: some of a part's bytes."""

    whole: "Incoming"
    part: int
    command: bytes
    place: memoryview


class Incoming:
    """One object on its way. It has landed when every byte is there; `checksum` is then of all of them.

    `failures`: by part, what came instead: MissingPart, WrongLength, or a refusal (ResponseError). `is_of_use`: nothing
    is missing yet, but perhaps what another server has.
    """

    # Redis copies what it answers once more: pieces that stay in its processor's cache are answered sooner.
    SLICE_BYTES = 512 << 10

    def __init__(self, names: Sequence[bytes], place: memoryview) -> None:
        self.names = names
        self.places = cut(place, len(names))
        self.failures: dict[int, Exception] = {}
        self.is_of_use = True
        self.checksum = Checksum()
        self._left = len(place)

    @property
    def landed(self) -> bool:
        return not self._left

    def failed(self, part: int, failure: Exception) -> None:
        self.failures[part] = failure
        self.is_of_use &= isinstance(failure, AskError) and not isinstance(failure, MovedError)

    def arrived(self, data: memoryview) -> None:
        """The next bytes in order, as long as nothing is missing."""
        self.checksum.update(data)
        self._left -= len(data)

    def slices(self) -> Iterator[_Slice]:
        for part, (name, place) in enumerate(zip(self.names, self.places, strict=True)):
            for first in range(0, len(place), self.SLICE_BYTES):
                piece = place[first : first + self.SLICE_BYTES]
                end = first + len(piece)
                # To the very end of the value, so that one that is too long is noticed.
                last = b"-1" if end == len(place) else b"%d" % (end - 1)
                start = b"%d" % first
                yield _Slice(self, part, _COMMAND % (len(name), name, len(start), start, len(last), last), piece)


class _Lane:
    """One connection, and what has been asked on it."""

    def __init__(self, connection: BoundedConnection, socket: BoundedSocket, deadline: float) -> None:
        self.connection = connection
        self.asked = 0
        # What has been read and is yet to be looked at.
        self._back = b""
        self._socket = socket
        self._deadline = deadline
        self._poller = select.poll()
        self._poller.register(socket, select.POLLIN)
        socket.never_wait()

    def ask(self, piece: _Slice) -> None:
        self.asked += 1
        left = piece.command
        while left := left[self._socket.send_now([left]) :]:
            self._sleep(select.POLLOUT)

    def receive(self, piece: _Slice) -> None:
        """What was asked for first. Raises WrongLength: from then on nothing can be made out any more."""
        self._check()
        whole, place = piece.whole, piece.place
        expected = b"$%d\r\n" % len(place)
        head, end = bytearray(len(expected)), bytearray(len(_END))
        parts = (memoryview(head), place, memoryview(end))
        buffers, came, filled = list(parts), 0, 0
        # As if it were there: then nothing has to be read apart, and its place is of no use if it is not.
        while buffers:
            came += self._receive_some(buffers)
            if not filled and head[:came] != expected[:came]:
                self._back = b"".join(parts)[:came] + self._back
                whole.failed(piece.part, self._failure())
                break
            if came > len(head) and filled < len(place):
                whole.arrived(place[filled : came - len(head)])
                filled = min(came - len(head), len(place))
        else:
            if end != _END:
                raise WrongLength
        self.asked -= 1

    def _failure(self) -> MissingPart | ResponseError:
        """The reply that is no part."""
        line = b""
        while not line.endswith(_END):
            if len(line) >= _LINE_BYTES:
                raise WrongLength
            line += self._read(1)
        if line == _NOTHING:
            self._read(len(_END))
            return MissingPart()
        if not line.startswith(b"-"):
            raise WrongLength
        error = BaseParser.parse_error(line[1 : -len(_END)].decode("utf-8", "replace"))
        if not isinstance(error, ResponseError):
            raise LinkError(str(error))
        return error

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        left = [memoryview(data)]
        while left:
            self._receive_some(left)
        return bytes(data)

    def _receive_some(self, buffers: list[memoryview]) -> int:
        """How many bytes came, at least one; buffers that are full are taken out."""
        if self._back:
            count = min(len(buffers[0]), len(self._back))
            buffers[0][:count], self._back = self._back[:count], self._back[count:]
        else:
            while not (count := self._socket.receive_now(buffers)):
                self._wait()
        advance(buffers, count)
        return count

    def _wait(self) -> None:
        poll = self._poller.poll
        for _ in range(_LOOKS):
            if poll(0):
                break
            # To the server, if it waits for this very processor.
            os.sched_yield()
        else:
            self._sleep(select.POLLIN)
        self._check()

    def _check(self) -> None:
        """Raises LinkError if the time is over."""
        if time.monotonic() >= self._deadline:
            raise LinkError("no answer in time", late=True)

    def _sleep(self, events: int) -> None:
        self._check()
        self._poller.register(self._socket, events)
        self._poller.poll((self._deadline - time.monotonic()) * 1000)
        self._poller.register(self._socket, select.POLLIN)


def receive(objects: Iterable[Incoming], connections: Sequence[BoundedConnection], deadline: float) -> None:
    """What becomes of each object it says itself. Raises LinkError by `deadline` (monotonic seconds) at the latest.

    One that has neither landed nor failed was asked for behind a part of the wrong length, or not at all: nobody knows.
    """
    todo = (piece for whole in objects for piece in whole.slices() if whole.is_of_use)
    asked: deque[tuple[_Lane, _Slice]] = deque()
    with ExitStack() as stack:
        lanes = [_Lane(connection, stack.enter_context(connection.raw()), deadline) for connection in connections]
        while lanes:
            for piece in islice(todo, max(0, _ASKED_AHEAD * len(lanes) - len(asked))):
                lane = min(lanes, key=attrgetter("asked"))
                lane.ask(piece)
                asked.append((lane, piece))
            if not asked:
                return
            lane, piece = asked.popleft()
            if lane not in lanes:
                continue
            try:
                lane.receive(piece)
            except WrongLength as error:
                piece.whole.failed(piece.part, error)
                lane.connection.spoil()
                lanes.remove(lane)
