"""Calls to the servers that have what is asked for: one of them, or several side by side."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
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

    def on_all(
        self,
        keys: Sequence[ObjectKey],
        deadline: float,
        work: Callable[[RedisNode, Sequence[int]], Sequence[_T | MovedError]],
    ) -> list[_T | None]:
        """What `work` says about each key on the server that has it; None where there was no answer.

        `work` is given the places of its keys, and answers in their order.
        """
        answers: list[_T | None] = [None] * len(keys)
        todo: Sequence[int] = range(len(keys))
        for _ in range(_ATTEMPTS):
            groups: dict[RedisNode, list[int]] = {}
            for place in todo:
                node = self._servers.node_of(keys[place], deadline)
                if node is not None:
                    groups.setdefault(node, []).append(place)
            todo = []
            outcomes = self.side_by_side(list(groups), deadline, lambda node, groups=groups: work(node, groups[node]))  # type: ignore[misc]
            for node, found in outcomes.items():
                for place, outcome in zip(groups[node], found, strict=True):
                    if isinstance(outcome, MovedError):
                        self._servers.moved(outcome, node)
                        todo.append(place)
                    else:
                        answers[place] = outcome
            if not todo:
                break
        return answers

    def side_by_side(
        self, nodes: Sequence[RedisNode], deadline: float, work: Callable[[RedisNode], _T]
    ) -> dict[RedisNode, _T]:
        """What `work` says on each server: one that hangs delays no other. It ends by `deadline` wherever it runs;
        afterwards nothing of it runs any more."""
        if not nodes or time.monotonic() >= deadline:
            return {}
        own, *others = nodes
        running: dict[RedisNode, Future[_T]] = {}
        # Closed in the meantime: whoever has not begun is left out.
        with suppress(RuntimeError):
            for node in others:
                running[node] = self._threads.submit(work, node)
        answers: dict[RedisNode, _T] = {}
        try:
            for node in (own, *running):
                try:
                    answers[node] = work(own) if node is own else self._result(running[node], deadline)
                except (LinkError, ResponseError, CancelledError):
                    self._servers.suspect()
        finally:
            if running:
                wait(running.values())
        return answers

    @staticmethod
    def _result(running: "Future[_T]", deadline: float) -> _T:
        try:
            return running.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            running.cancel()
            return running.result()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
