"""The servers of an L2: one, the master that Sentinels name, or the masters of a cluster; followed as they change."""

import binascii
import threading
import time
from collections.abc import Sequence
from typing import Any

from redis.exceptions import AskError, MovedError, TryAgainError

from services.common.logs import get_logger
from services.common.redis_connection import Argument, LinkError
from services.common.redis_route import SLOTS, Route, SlotRange
from services.store.objects import ObjectKey
from services.store.tiers.redis_node import NodeLimits, RedisNode, name_of

# One that asks who holds what waits this long for an answer, and so long before it asks again.
_ASK_SECONDS = 1.0
_PAUSE_SECONDS = 0.25

_log = get_logger("l2")


class RedisServers:
    """Thread-safe. Who holds what is asked on a thread of its own: callers only ever wait for its first answer.

    `problem`: why it is not known; empty if it is. `changes` counts the different answers.
    """

    def __init__(self, route: Route, limits: NodeLimits) -> None:
        self.problem = ""
        self.changes = 0
        self.clustered = route.clustered
        self._route = route
        self._limits = limits
        self._lock = threading.Lock()
        self._nodes: dict[str, RedisNode] = {}
        self._slots: list[RedisNode | None] = []
        self._asked = threading.Event()
        self._suspected = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="l2-servers", daemon=True)
        self._thread.start()

    def node_of(self, key: ObjectKey, deadline: float) -> RedisNode | None:
        """None if nobody is known to have its slot."""
        slots = self._slots
        if not slots:
            self._asked.wait(max(0.0, deadline - time.monotonic()))
            slots = self._slots
        if not slots:
            return None
        # The object's name is what stands between the braces of its keys.
        return slots[binascii.crc_hqx(key.text().encode(), 0) % SLOTS if self.clustered else 0]

    def masters(self, deadline: float) -> list[RedisNode]:
        """Every server that holds keys, as far as is known."""
        self._asked.wait(max(0.0, deadline - time.monotonic()))
        return list(dict.fromkeys(node for node in self._slots if node is not None))

    def suspect(self) -> None:
        """Something was not where it should be: look again, soon."""
        self._suspected.set()

    def moved(self, error: MovedError, asked: RedisNode) -> None:
        """A server said where a slot is now."""
        node = self._node_at(error, asked)
        with self._lock:
            slots = [*self._slots]
            slots[error.slot_id] = node
            self._slots = slots
            self.changes += 1
        self.suspect()

    def ask(self, error: AskError, asked: RedisNode, command: Sequence[Argument], deadline: float) -> Any:
        """The answer of the server that takes the slot over; a refusal, or none, is a ResponseError."""
        node = self._node_at(error, asked)
        try:
            return node.use("ask", deadline, lambda connection: connection.exchange([("ASKING",), command])[1])
        except LinkError as failure:
            return TryAgainError(str(failure))

    def close(self) -> None:
        self._closed.set()
        self._suspected.set()
        self._asked.set()
        with self._lock:
            nodes, self._nodes, self._slots = self._nodes, {}, []
        for node in nodes.values():
            node.close()

    def _node_at(self, error: AskError, asked: RedisNode) -> RedisNode:
        # A node that does not know its own address leaves it out.
        options = {**asked.options, "host": error.host or asked.options["host"], "port": error.port}
        with self._lock:
            return self._known(options, self._nodes)

    def _known(self, options: dict[str, Any], nodes: dict[str, RedisNode]) -> RedisNode:
        name = name_of(options)
        if name not in nodes:
            nodes[name] = RedisNode(options, self._limits, self._route.accept)
        return nodes[name]

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                self._adopt(self._route.layout(time.monotonic() + _ASK_SECONDS))
                self.problem = ""
            except LinkError as error:
                self.problem = str(error)
            except Exception as error:
                # An answer that nobody expects must not end the asking.
                self.problem = f"{type(error).__name__}: {error}"
                _log.error("L2's servers could not be made out", exc_info=error)
            self._asked.set()
            self._suspected.wait(self._limits.half_open_seconds)
            self._closed.wait(_PAUSE_SECONDS)
            self._suspected.clear()
            # Whoever answered last may be the one who is wrong.
            self._route.distrust()

    def _adopt(self, layout: Sequence[SlotRange]) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            slots: list[RedisNode | None] = [None] * SLOTS
            for part in layout:
                slots[part.first : part.last + 1] = [self._known(part.primary, self._nodes)] * (
                    part.last - part.first + 1
                )
            if slots == self._slots:
                return
            if self._slots:
                _log.info("L2's servers have changed", servers=sorted({name_of(part.primary) for part in layout}))
            self.changes += 1
            self._slots = slots
            current = set(slots)
            gone = [name for name, node in self._nodes.items() if node not in current]
            closing = [self._nodes.pop(name) for name in gone]
        for node in closing:
            node.close()
