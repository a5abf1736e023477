"""Matchers that do exactly what matcher.proto says of Publish: a log in a list and its fold in dicts, served over real
gRPC, with faults on demand."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.errors import KvblendError, abort
from services.store.objects import ChunkInfo, ChunkKey
from services.store.publishing.changes import STORE_OWNER, Added, Change, Cleared, Removed

L2 = "redis"
SPACE = b"s" * 16
OTHER_SPACE = b"t" * 16

# What may happen to a page. "late": its caller gets no answer, and it is carried out after the next ones.
# "failover": the log has lost its latest records when the page comes; "lost all": every record.
FAULTS = ["ok", "lost reply", "refused", "late", "failover", "lost all"]

# (chunk, owner)
Name = tuple[ChunkKey, str]
Entries = dict[Name, Added]


def changes_of(batch: matcher_pb2.ChangeBatch) -> list[Change]:
    """What the batch says, chunk by chunk."""
    kind = batch.WhichOneof("change")
    change = getattr(batch, kind)
    owner = change.owner.l2_id if change.owner.kind == matcher_pb2.OWNER_KIND_L2 else STORE_OWNER
    if kind == "cleared":
        return [Cleared(owner, change.space_id, change.tenant, change.document)]
    hashes = _cut(change.chain_hashes, 32)
    keys = [ChunkKey(change.space_id, change.domain, chain_hash) for chain_hash in hashes]
    if kind == "removed":
        return [Removed(key, owner, change.seen_position) for key in keys]
    lengths, positions = (list(memoryview(column).cast("I")) for column in (change.lengths, change.stored_positions))
    previous = _cut(change.previous_hashes, 32)
    assert len(keys) == len(previous) == len(lengths) == len(positions)
    assert len(change.tokens) == 4 * sum(lengths)
    first = 0
    added: list[Change] = []
    for key, before, length, position in zip(keys, previous, lengths, positions, strict=True):
        tokens = change.tokens[4 * first : 4 * (first + length)]
        first += length
        info = _info(change, before, tokens, position)
        added.append(Added(key, owner, info))
    return added


def _info(change: matcher_pb2.ChunksAdded, previous_hash: bytes, tokens: bytes, position: int) -> ChunkInfo:
    return ChunkInfo(
        model_space_id=b"",
        tenant=change.tenant,
        previous_hash=previous_hash,
        tokens=tokens,
        chunk_tokens=change.chunk_tokens,
        stored_position=position,
        context_class=change.context_class,
        document=change.document,
        groups=1,
        ranks=1,
        matchable=change.matchable,
    )


def _cut(column: bytes, size: int) -> list[bytes]:
    assert len(column) % size == 0
    return [column[at : at + size] for at in range(0, len(column), size)]


def count_of(page: matcher_pb2.PublishRequest) -> int:
    """Changes in the page."""
    return sum(
        1
        if batch.WhichOneof("change") == "cleared"
        else len(getattr(batch, batch.WhichOneof("change")).chain_hashes) // 32
        for batch in page.batches
    )


class ModelLog:
    """One log for any number of replicas. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.records: list[matcher_pb2.PublishRequest] = []

    def streams(self) -> dict[str, tuple[int, int]]:
        """Of each store its latest epoch, and the last sequence of it."""
        found = {}
        for record in self.records:
            found[record.store] = record.epoch, record.first_sequence + count_of(record) - 1
        return found

    def publish(self, page: matcher_pb2.PublishRequest) -> matcher_pb2.PublishResponse:
        with self.lock:
            epoch, durable = self.streams().get(page.store, (0, 0))
            if page.epoch < epoch:
                raise KvblendError("STALE_EPOCH", f"the log has epoch {epoch} of {page.store}")
            if page.epoch > epoch:
                durable = 0
            follows = page.first_sequence > durable if page.reset else page.first_sequence == durable + 1
            if page.batches and follows:
                self.records.append(page)
                durable = self.streams()[page.store][1]
            return matcher_pb2.PublishResponse(durable_sequence=durable, log_position=len(self.records))

    def lose(self, records: int) -> None:
        with self.lock:
            del self.records[max(0, len(self.records) - records) :]

    def owned(self, store: str) -> Entries:
        """What the store owns after all records."""
        with self.lock:
            entries: Entries = {}
            epoch = 0
            for record in self.records:
                if record.store != store:
                    continue
                if record.epoch > epoch or record.reset:
                    entries = {}
                epoch = record.epoch
                for batch in record.batches:
                    for change in changes_of(batch):
                        if change.owner == STORE_OWNER:
                            _apply(entries, change)
            return entries

    def in_l2(self) -> Entries:
        """What L2 has after all records, whichever store said so."""
        with self.lock:
            entries: Entries = {}
            claimed_at: dict[Name, int] = {}
            for position, record in enumerate(self.records, 1):
                for batch in record.batches:
                    for change in changes_of(batch):
                        if change.owner == STORE_OWNER:
                            continue
                        if isinstance(change, Added):
                            claimed_at[change.key, change.owner] = position
                        late = isinstance(change, Removed) and change.seen_position
                        if not late or claimed_at.get((change.key, change.owner), 0) <= late:
                            _apply(entries, change)
            return entries


def _apply(entries: Entries, change: Change) -> None:
    if isinstance(change, Added):
        entries[change.key, change.owner] = change
    elif isinstance(change, Removed):
        entries.pop((change.key, change.owner), None)
    else:
        for name in [name for name, added in entries.items() if _is_covered(change, added)]:
            del entries[name]


def _is_covered(cleared: Cleared, added: Added) -> bool:
    if added.owner != cleared.owner:
        return False
    if cleared.space_id:
        return added.key.space_id == cleared.space_id
    if cleared.document:
        return (added.info.tenant, added.info.document) == (cleared.tenant, cleared.document)
    return not cleared.tenant or added.info.tenant == cleared.tenant


class ModelMatcher(matcher_pb2_grpc.MatcherServiceServicer):
    """One replica. `faults` are used up, one a page; then every page is carried out."""

    def __init__(self, log: ModelLog | None = None, faults: list[str] | None = None) -> None:
        self.log = log or ModelLog()
        self._faults = deque(faults or [])
        self._late: list[matcher_pb2.PublishRequest] = []
        self.hang = threading.Event()
        self.released = threading.Event()
        self.refusal: KvblendError | None = None
        self.pages: list[matcher_pb2.PublishRequest] = []

    @property
    def resets(self) -> int:
        return sum(page.reset for page in self.pages)

    def Publish(self, request: matcher_pb2.PublishRequest, context: Any) -> matcher_pb2.PublishResponse:
        if self.hang.is_set():
            self.released.wait(60)
        try:
            return self._publish(request)
        except KvblendError as error:
            abort(context, error)

    def _publish(self, request: matcher_pb2.PublishRequest) -> matcher_pb2.PublishResponse:
        with self.log.lock:
            self.pages.append(request)
            fault = self._faults.popleft() if self._faults else "ok"
            if self.refusal is not None:
                raise self.refusal
            if fault == "late":
                self._late.append(request)
            if fault in ("refused", "late"):
                raise KvblendError("LOG_UNAVAILABLE", fault)
            if fault in ("failover", "lost all"):
                self.log.lose(2 if fault == "failover" else len(self.log.records))
            response = self.log.publish(request)
            if fault == "ok" and self._late:
                self.log.publish(self._late.pop(0))
            if fault == "lost reply":
                raise KvblendError("LOG_UNAVAILABLE", fault)
            return response

    def PingMatcher(self, request: Any, context: Any) -> matcher_pb2.PingMatcherResponse:
        return matcher_pb2.PingMatcherResponse(liveness=pb.Liveness(service="matcher"))

    def has_faults(self) -> bool:
        with self.log.lock:
            return bool(self._late or self._faults)


@contextmanager
def serving(model: ModelMatcher, path: Path) -> Iterator[str]:
    """Serves on a unix socket; yields the address."""
    address = f"unix:{path}"
    server = grpc.server(futures.ThreadPoolExecutor(8))
    matcher_pb2_grpc.add_MatcherServiceServicer_to_server(model, server)
    servant = health.HealthServicer()
    servant.set("readiness", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servant, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield address
    finally:
        model.released.set()
        server.stop(None).wait(10)


class Catalog:
    """What a store holds, behind its own lock, telling its outbox of every change while it has that lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.held: Entries = {}
        self.ever_added: set[Name] = set()
        # What was cleared and has not been added since.
        self.cleared: set[Name] = set()
        self.append: Callable[[Change], int] = lambda _: 0

    def add(self, number: int, owner: str = STORE_OWNER, version: int = 0) -> int:
        change = chunk_added(number, owner, version)
        with self.lock:
            self.held[change.key, owner] = change
            self.ever_added.add((change.key, owner))
            self.cleared.discard((change.key, owner))
            return self.append(change)

    def remove(self, number: int, owner: str = STORE_OWNER) -> int:
        change = chunk_removed(number, owner)
        with self.lock:
            self.held.pop((change.key, owner), None)
            return self.append(change)

    def clear(self, document: str) -> int:
        """In L2 only."""
        change = Cleared(L2, tenant="t", document=document)
        with self.lock:
            self.cleared |= {name for name, added in self.held.items() if _is_covered(change, added)}
            self.held = {name: added for name, added in self.held.items() if name not in self.cleared}
            return self.append(change)

    def snapshot(self) -> list[Added]:
        with self.lock:
            return list(self.held.values())

    def of(self, owner: str) -> Entries:
        with self.lock:
            return {name: added for name, added in self.held.items() if name[1] == owner}


def chunk_added(number: int, owner: str = STORE_OWNER, version: int = 0) -> Added:
    """A chunk of a document of which every third one is."""
    info = ChunkInfo(
        model_space_id=b"",
        tenant="t",
        previous_hash=bytes(32),
        tokens=bytes([number % 256, 0, 0, 0]) * (16 - number % 2),
        chunk_tokens=16,
        stored_position=version,
        context_class=pb.CONTEXT_CLASS_ALONE,
        document=f"d{number % 3}",
        groups=1,
        ranks=1,
        matchable=number % 5 > 0,
    )
    return Added(key_of(number), owner, info)


def chunk_removed(number: int, owner: str = STORE_OWNER, seen: int = 0) -> Removed:
    return Removed(key_of(number), owner, seen)


def key_of(number: int) -> ChunkKey:
    return ChunkKey(OTHER_SPACE if number % 7 == 6 else SPACE, pb.DOMAIN_SEGMENT, number.to_bytes(32, "big"))
