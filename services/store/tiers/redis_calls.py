"""Calls to the servers that have what is asked for: one of them, or several side by side."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from redis.exceptions import MovedError, ResponseError

from services.common.redis_connection import LinkError
from services.store.objects import ObjectKey
from services.store.tiers.redis_node import RedisNode
from services.store.tiers.redis_servers import RedisServers

# Servers asked at once, beside the one that the caller's thread asks; each question ends by its deadline.
_AT_ONCE = 16
# An answer that another server is to be asked is followed once: the second time nobody knows.
_ATTEMPTS = 2

_T = TypeVar("_T")


class RedisCalls:
    """Whoever fails is looked for again (`RedisServers.suspect`) and leaves its part out. Thread-safe."""

    def __init__(self, servers: RedisServers) -> None:
        self._servers = servers
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="l2-redis")

    def on_one(self, key: ObjectKey, deadline: float, work: Callable[[RedisNode], bool]) -> bool:
        """What `work` says on the server that has the key; false if that does not answer, or refuses."""
        for _ in range(_ATTEMPTS):
            node = self._servers.node_of(key, deadline)
            if node is None or time.monotonic() >= deadline:
                return False
            try:
                return work(node)
            except MovedError as error:
                self._servers.moved(error, node)
            except (LinkError, ResponseError):
                self._servers.suspect()
                return False
        return False

    def on_all(
        self,
        keys: Sequence[ObjectKey],
        deadline: float,
        work: Callable[[RedisNode, Sequence[ObjectKey]], Sequence[_T | MovedError]],
    ) -> dict[ObjectKey, _T]:
        """What `work` says about each key on the server that has it, without those that got no answer."""
        answers: dict[ObjectKey, _T] = {}
        todo: Sequence[ObjectKey] = keys
        for _ in range(_ATTEMPTS):
            groups: dict[RedisNode, list[ObjectKey]] = {}
            for key in todo:
                node = self._servers.node_of(key, deadline)
                if node is not None:
                    groups.setdefault(node, []).append(key)
            todo = []
            outcomes = self.side_by_side(list(groups), deadline, lambda node, groups=groups: work(node, groups[node]))  # type: ignore[misc]
            for node, found in outcomes.items():
                for key, outcome in zip(groups[node], found, strict=True):
                    if isinstance(outcome, MovedError):
                        self._servers.moved(outcome, node)
                        todo.append(key)
                    else:
                        answers[key] = outcome
            if not todo:
                break
        return answers

    def side_by_side(
        self, nodes: Sequence[RedisNode], deadline: float, work: Callable[[RedisNode], _T]
    ) -> dict[RedisNode, _T]:
        """What `work` says on each server, by `deadline`: one that hangs delays no other."""
        if not nodes or time.monotonic() >= deadline:
            return {}
        own, *others = nodes
        try:
            running: dict[RedisNode, Future[_T]] = {node: self._threads.submit(work, node) for node in others}
        except RuntimeError:
            # Closed in the meantime.
            return {}
        answers: dict[RedisNode, _T] = {}
        for node in nodes:
            try:
                left = max(0.0, deadline - time.monotonic())
                answers[node] = work(own) if node is own else running[node].result(left)
            except (LinkError, ResponseError, FutureTimeoutError, CancelledError):
                self._servers.suspect()
        return answers

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
