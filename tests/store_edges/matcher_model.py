"""A matcher that does exactly what matcher.proto says of Publish, with faults on demand; served over real gRPC."""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.store.change_log import Key, key_of

STORE = matcher_pb2.Owner(kind=matcher_pb2.OWNER_KIND_STORE)
L2 = matcher_pb2.Owner(kind=matcher_pb2.OWNER_KIND_L2, l2_id="redis")

# What may happen to a page. "late": its caller gets no answer, and it is carried out after the next ones.
FAULTS = ["ok", "lost reply", "refused", "late", "restart"]


class Table:
    """One replica's state: for each store the position in its stream, and all entries."""

    def __init__(self) -> None:
        self.boot_id = secrets.token_bytes(16)
        self.streams: dict[str, tuple[int, int]] = {}
        self.entries: dict[tuple[str, Key], tuple[int, matcher_pb2.ChunkAdded]] = {}

    def _drop_owned(self, store: str) -> None:
        owned = [name for name in self.entries if name[0] == store and name[1][3] == matcher_pb2.OWNER_KIND_STORE]
        for name in owned:
            del self.entries[name]

    def publish(self, request: matcher_pb2.PublishRequest) -> matcher_pb2.PublishResponse:
        epoch, applied = self.streams.get(request.store, (0, 0))
        if request.epoch < epoch:
            return matcher_pb2.PublishResponse(boot_id=self.boot_id, applied_sequence=applied, needs_reset=True)
        if request.epoch > epoch:
            self._drop_owned(request.store)
            epoch, applied = request.epoch, 0
        if request.reset:
            self._drop_owned(request.store)
            applied = request.first_sequence - 1
        needs_reset = request.first_sequence > applied + 1
        if not needs_reset:
            for sequence, event in enumerate(request.events, request.first_sequence):
                if sequence > applied:
                    self._apply(request.store, sequence, event)
                    applied = sequence
        self.streams[request.store] = epoch, applied
        return matcher_pb2.PublishResponse(boot_id=self.boot_id, applied_sequence=applied, needs_reset=needs_reset)

    def _apply(self, store: str, sequence: int, event: matcher_pb2.ChangeEvent) -> None:
        if event.WhichOneof("change") == "added":
            self.entries[store, key_of(event.added)] = sequence, event.added
            return
        name = store, key_of(event.removed)
        added_at, _ = self.entries.get(name, (0, None))
        if not event.removed.seen_sequence or added_at <= event.removed.seen_sequence:
            self.entries.pop(name, None)


class ModelMatcher(matcher_pb2_grpc.MatcherServiceServicer):
    """`faults` are used up, one a page; then every page is carried out."""

    def __init__(self, faults: list[str] | None = None) -> None:
        self._lock = threading.Lock()
        self._faults = deque(faults or [])
        self._late: list[matcher_pb2.PublishRequest] = []
        self._table = Table()
        self.hang = threading.Event()
        self.released = threading.Event()
        self.resets = 0
        self.largest_page = 0

    def Publish(self, request: matcher_pb2.PublishRequest, context: Any) -> matcher_pb2.PublishResponse:
        if self.hang.is_set():
            self.released.wait(60)
        with self._lock:
            fault = self._faults.popleft() if self._faults else "ok"
            self.largest_page = max(self.largest_page, len(request.events))
            if fault == "restart":
                self._table, self._late = Table(), []
            if fault == "late":
                self._late.append(request)
            if fault in ("refused", "late"):
                context.abort(grpc.StatusCode.UNAVAILABLE, fault)
            self.resets += request.reset
            response = self._table.publish(request)
            if fault == "ok" and self._late:
                self._table.publish(self._late.pop(0))
            if fault == "lost reply":
                context.abort(grpc.StatusCode.UNAVAILABLE, fault)
            return response

    def PingMatcher(self, request: Any, context: Any) -> matcher_pb2.PingMatcherResponse:
        del request, context
        return matcher_pb2.PingMatcherResponse(liveness=pb.Liveness(service="matcher", boot_id=self._table.boot_id))

    def restart(self) -> None:
        with self._lock:
            self._table, self._late = Table(), []

    def forget_stream(self, store: str) -> None:
        """The process lives on, but its position in the stream is lost."""
        with self._lock:
            self._table.streams.pop(store, None)

    def has_late_pages(self) -> bool:
        with self._lock:
            return bool(self._late or self._faults)

    def held(self, store: str, kind: matcher_pb2.OwnerKind) -> dict[Key, matcher_pb2.ChunkAdded]:
        with self._lock:
            return {
                key: added for (of, key), (_, added) in self._table.entries.items() if of == store and key[3] == kind
            }

    def applied(self, store: str) -> tuple[int, int]:
        """(epoch, sequence)."""
        with self._lock:
            return self._table.streams.get(store, (0, 0))


@contextmanager
def serving(model: ModelMatcher, path: Path) -> Iterator[str]:
    """Serves on a unix socket; yields the target."""
    target = f"unix:{path}"
    server = grpc.server(futures.ThreadPoolExecutor(8))
    matcher_pb2_grpc.add_MatcherServiceServicer_to_server(model, server)
    server.add_insecure_port(target)
    server.start()
    try:
        yield target
    finally:
        model.released.set()
        server.stop(None).wait(10)


class Catalog:
    """What a store holds, behind its own lock, telling its outbox of every change while it has that lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.held: dict[Key, matcher_pb2.ChunkAdded] = {}
        self.ever_added: set[Key] = set()
        self.added: Callable[[matcher_pb2.ChunkAdded], int] = lambda _: 0
        self.removed: Callable[[matcher_pb2.ChunkRemoved], int] = lambda _: 0

    def add(self, number: int, owner: matcher_pb2.Owner = STORE, version: int = 0) -> int:
        event = chunk_added(number, owner, version)
        with self.lock:
            self.held[key_of(event)] = event
            self.ever_added.add(key_of(event))
            return self.added(event)

    def remove(self, number: int, owner: matcher_pb2.Owner = STORE) -> int:
        event = chunk_removed(number, owner)
        with self.lock:
            self.held.pop(key_of(event), None)
            return self.removed(event)

    def snapshot(self) -> list[matcher_pb2.ChunkAdded]:
        with self.lock:
            return list(self.held.values())

    def of(self, kind: matcher_pb2.OwnerKind) -> dict[Key, matcher_pb2.ChunkAdded]:
        with self.lock:
            return {key: added for key, added in self.held.items() if key[3] == kind}


def chunk_added(number: int, owner: matcher_pb2.Owner = STORE, version: int = 0) -> matcher_pb2.ChunkAdded:
    return matcher_pb2.ChunkAdded(
        space_id=b"s" * 16,
        domain=pb.DOMAIN_EXACT,
        chain_hash=number.to_bytes(32, "big"),
        previous_hash=bytes(32),
        tokens=bytes(64),
        stored_position=version,
        context_class=pb.CONTEXT_CLASS_ALONE,
        owner=owner,
        chunk_tokens=16,
        matchable=True,
    )


def chunk_removed(number: int, owner: matcher_pb2.Owner = STORE, seen: int = 0) -> matcher_pb2.ChunkRemoved:
    return matcher_pb2.ChunkRemoved(
        space_id=b"s" * 16,
        domain=pb.DOMAIN_EXACT,
        chain_hash=number.to_bytes(32, "big"),
        owner=owner,
        seen_sequence=seen,
    )
