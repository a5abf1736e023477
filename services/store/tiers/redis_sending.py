"""The hot path into Redis: parts of objects leave from where they lie in the arena, over several connections.

An object's header is sent once every part of it has been acknowledged, while parts of the next ones are on their way.
"""

import select
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import hiredis
from redis._parsers.base import BaseParser
from redis.exceptions import AskError, MovedError, ResponseError

from services.common.redis_connection import BoundedConnection, LinkError
from services.store.tiers.redis_commands import Command
from services.store.tiers.redis_pump import Lane, advance, pump

# On one connection at once: the next is there when the server has stored one.
_SENT_AHEAD = 2
_REPLY_BYTES = 64 << 10


class Outgoing:
    """One object on its way: commands that store its parts, and the one that stores its header.

    `refusals`: by part, what Redis said instead of storing it. `is_of_use`: nothing has been refused, but perhaps what
    another server takes. `header_reply`: what it said to the header, once sent: the one that was there before, None if
    there was none, or a refusal.
    """

    def __init__(self, names: list[bytes], parts: Sequence[Command], header: Command) -> None:
        """`names` of the parts."""
        self.names = names
        self.parts = parts
        self.header = header
        self.refusals: dict[int, ResponseError] = {}
        self.is_of_use = True
        self.unacknowledged = len(parts)
        self.header_replied = False
        self.header_reply: Any = None

    @property
    def refusal(self) -> ResponseError | None:
        """Of the whole object."""
        refusals = [*self.refusals.values(), self.header_reply]
        moved = next((refusal for refusal in refusals if isinstance(refusal, MovedError)), None)
        return moved or next((refusal for refusal in refusals if isinstance(refusal, ResponseError)), None)


# An object and which of its parts; None: its header.
_Sent: TypeAlias = tuple[Outgoing, int | None]


class _Queue:
    """What the lanes have still to send."""

    def __init__(self, objects: Iterable[Outgoing]) -> None:
        self._parts = ((whole, part) for whole in objects for part in range(len(whole.parts)) if whole.is_of_use)
        self._headers: deque[Outgoing] = deque()

    def take(self) -> _Sent | None:
        return (self._headers.popleft(), None) if self._headers else next(self._parts, None)

    def answered(self, sent: _Sent, reply: Any) -> None:
        """Whoever heard the last part's answer sends the header next: there is always room for it."""
        whole, part = sent
        if part is None:
            whole.header_replied, whole.header_reply = True, reply
            return
        whole.unacknowledged -= 1
        if isinstance(reply, ResponseError):
            whole.refusals[part] = reply
            whole.is_of_use &= isinstance(reply, AskError) and not isinstance(reply, MovedError)
        if not whole.unacknowledged and not whole.refusals:
            self._headers.append(whole)


def send(objects: Iterable[Outgoing], connections: Sequence[BoundedConnection], deadline: float) -> None:
    """What becomes of each object it says itself. Raises LinkError by `deadline` at the latest."""
    queue = _Queue(objects)
    lanes: Mapping[BoundedConnection, Lane] = {connection: _lane(connection, queue) for connection in connections}
    pump(lanes, deadline)


def _lane(connection: BoundedConnection, queue: _Queue) -> Lane:
    awaited: deque[_Sent] = deque()
    buffers: list[memoryview] = []
    replies = hiredis.Reader(replyError=BaseParser.parse_error)
    view = memoryview(bytearray(_REPLY_BYTES))
    with connection.raw() as socket:
        socket.never_wait()
        while True:
            while len(awaited) < _SENT_AHEAD and (sent := queue.take()) is not None:
                whole, part = sent
                buffers += map(memoryview, connection.packed(*(whole.header if part is None else whole.parts[part])))
                awaited.append(sent)
            if not awaited:
                return
            if buffers:
                advance(buffers, socket.send_now(buffers))
            came = socket.receive_now([view])
            replies.feed(bytes(view[:came]))
            _hear(replies, awaited, queue)
            if came:
                yield 0
            else:
                yield select.POLLIN | select.POLLOUT if buffers else select.POLLIN


def _hear(replies: hiredis.Reader, awaited: deque[_Sent], queue: _Queue) -> None:
    while (reply := replies.gets()) is not False:
        if not awaited:
            raise LinkError("an answer that nobody asked for")
        if isinstance(reply, Exception) and not isinstance(reply, ResponseError):
            raise LinkError(str(reply))
        queue.answered(awaited.popleft(), reply)
