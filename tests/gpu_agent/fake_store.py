"""A store for tests of the agent alone: real sockets, a real arena, answers as the test says."""

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvblend.layouts import DTYPE_BYTES
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from kvblend.v1 import store_pb2_grpc
from services.common.arena_format import (
    FILE_HEADER,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    PAGE,
    catalog_path,
    session_path,
    slab_path,
)
from services.common.errors import KvblendError, abort
from services.common.identity import model_space_id

HEADERS = 256
SLABS = 2
SLAB_BYTES = 1 << 20
SERVER_OPTIONS = [("grpc.so_reuseport", 0)]


@dataclass
class LeasedObject:
    """One of the objects that ObjectColumns has as columns."""

    place: store.ObjectPlace
    chain_hash: bytes
    domain: int
    tokens: int
    stored_position: int
    checksum: int
    verify: bool = False


class FakeStore(store_pb2_grpc.StoreServiceServicer):
    """Grants what fits, remembers what was committed, leases what `answer` names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.target = f"unix:{directory}/store.sock"
        self.calls: list[tuple[str, Any]] = []
        self.spaces: dict[bytes, common.ModelSpace] = {}
        # Committed objects in the order of their commit.
        self.objects: list[LeasedObject] = []
        self.summary = store.LookupSummary()
        self.errors: dict[str, list[str]] = {}
        # Called with the request before a method answers.
        self.before: dict[str, Any] = {}
        self.begin_reasons: list[int] = []
        self.drained: list[bytes] = []
        self.sessions: set[bytes] = set()
        self._reserved: dict[int, dict[tuple[int, int], tuple[store.ChunkGrant, store.ObjectPlace]]] = {}
        self._next_header = 0
        self._next_byte = 0
        self._lock = threading.Lock()
        (directory / "sessions").mkdir()
        self._make_arena()
        self._server: grpc.Server | None = None

    def _make_arena(self) -> None:
        with catalog_path(self.directory).open("wb") as file:
            file.truncate(PAGE + HEADERS * HEADER.itemsize)
        for slab in range(SLABS):
            with slab_path(self.directory, slab).open("wb") as file:
                file.truncate(SLAB_BYTES)
        data = np.memmap(catalog_path(self.directory), np.uint8, "r+")
        self._page = data[: FILE_HEADER.itemsize].view(FILE_HEADER)
        self._page[0] = (MAGIC, FORMAT_VERSION, HEADERS, 1, SLAB_BYTES, SLABS, 0)
        self.headers = data[PAGE:].view(HEADER)

    @property
    def epoch(self) -> int:
        return int(self._page["epoch"][0])

    def info(self) -> store.ArenaInfo:
        return store.ArenaInfo(
            directory=str(self.directory),
            epoch=self.epoch,
            slabs=SLABS,
            slab_bytes=SLAB_BYTES,
            headers=HEADERS,
            format_version=FORMAT_VERSION,
            store="fake",
        )

    def start(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(16), options=SERVER_OPTIONS)
        store_pb2_grpc.add_StoreServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.target)
        self._server.start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.stop(0).wait(5)

    def restart(self) -> None:
        """As after a crash: another epoch, and nothing known but the bytes."""
        self.stop()
        self._page["epoch"][0] += 1
        self.spaces.clear()
        self.sessions.clear()
        self.start()

    def named(self, name: str) -> list[Any]:
        with self._lock:
            return [request for called, request in self.calls if called == name]

    def payload(self, item: LeasedObject) -> np.ndarray:
        """The object's bytes in the arena, writable."""
        slab = np.memmap(slab_path(self.directory, item.place.slab), np.uint8, "r+")
        return slab[item.place.offset : item.place.offset + item.place.payload_bytes]

    def _enter(self, name: str, request: Any, context: grpc.ServicerContext) -> None:
        with self._lock:
            self.calls.append((name, request))
            errors = self.errors.get(name, [])
            reason = errors.pop(0) if errors else None
        if name in self.before:
            self.before[name](request)
        if reason is not None:
            abort(context, KvblendError(reason, "as the test wants it"))
        session = getattr(request, "session_id", b"")
        if session and session not in self.sessions and name not in ("ReportDrained", "EndCopy"):
            abort(context, KvblendError("UNKNOWN_SESSION", "no such session"))

    def Session(self, request_iterator: Iterator[store.SessionRequest], context: Any) -> Iterator[Any]:
        hello = next(request_iterator)
        with session_path(self.directory, hello.session_id).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.sessions.add(hello.session_id)
        self._enter("Session", hello, context)
        yield store.SessionResponse(boot_id=b"b" * 16, arena=self.info())
        for _ in request_iterator:
            yield store.SessionResponse(boot_id=b"b" * 16)

    def RegisterModelSpace(self, request: Any, context: Any) -> Any:
        self._enter("RegisterModelSpace", request, context)
        space = request.model_space
        space.chunk_tokens = space.chunk_tokens or 16
        identity = model_space_id(space)
        self.spaces[identity] = space
        return store.RegisterModelSpaceResponse(
            model_space_id=identity, chunk_tokens=space.chunk_tokens, hash_version=1, object_format_version=1
        )

    def Reserve(self, request: Any, context: Any) -> Any:
        self._enter("Reserve", request, context)
        space = self.spaces.get(request.space.model_space_id)
        if space is None:
            abort(context, KvblendError("UNKNOWN_MODEL_SPACE", "not registered"))
        group = space.groups[0]
        width = DTYPE_BYTES[space.kv_dtype]
        token_bytes = group.layers * 2 * group.kv_heads * group.head_size * width
        domain = common.DOMAIN_SEGMENT if request.kind == store.STORE_KIND_DOCUMENT else common.DOMAIN_EXACT
        response = store.ReserveResponse(reservation_id=len(self._reserved) + 1, ttl_ms=1000, epoch=self.epoch)
        places = self._reserved[response.reservation_id] = {}
        for first in range(0, len(request.tokens) // 4, space.chunk_tokens):
            tokens = min(space.chunk_tokens, len(request.tokens) // 4 - first)
            grant = response.chunks.add(
                first_token=first,
                tokens=tokens,
                chain_hash=hashlib.blake2b(request.tokens[: 4 * (first + tokens)], digest_size=32).digest(),
                domain=domain,
                outcome=store.CHUNK_OUTCOME_GRANTED,
            )
            place = grant.places.add()
            place.CopyFrom(self._take(token_bytes * tokens))
            places[place.header, place.generation] = grant, place
        return response

    def _take(self, nbytes: int) -> store.ObjectPlace:
        with self._lock:
            header, offset = self._next_header, self._next_byte
            self._next_header += 1
            self._next_byte += -(-nbytes // 64) * 64
        return store.ObjectPlace(
            header=header,
            generation=int(self.headers["generation"][header]),
            slab=offset // SLAB_BYTES,
            offset=offset % SLAB_BYTES,
            payload_bytes=nbytes,
        )

    def Commit(self, request: Any, context: Any) -> Any:
        self._enter("Commit", request, context)
        reserved = self._reserved[request.reservation_id]
        response = store.CommitResponse(position=common.StreamPosition(store="fake", epoch=self.epoch, sequence=7))
        for written in request.written:
            grant, place = reserved[written.object.header, written.object.generation]
            self.objects.append(
                LeasedObject(
                    place=place,
                    chain_hash=grant.chain_hash,
                    domain=grant.domain,
                    tokens=grant.tokens,
                    stored_position=grant.first_token,
                    checksum=written.checksum,
                )
            )
            response.reasons.append(common.REASON_UNSPECIFIED)
        return response

    def Lookup(self, request: Any, context: Any) -> Iterator[Any]:
        self._enter("Lookup", request, context)
        half = len(self.objects) // 2
        yield store.LookupResponse(objects=columns_of(self.objects[:half]))
        yield store.LookupResponse(objects=columns_of(self.objects[half:]), summary=self.summary)

    def BeginCopy(self, request: Any, context: Any) -> Any:
        self._enter("BeginCopy", request, context)
        reasons = self.begin_reasons or [common.REASON_UNSPECIFIED] * len(request.objects)
        return store.BeginCopyResponse(reasons=reasons, epoch=self.epoch)

    def EndCopy(self, request: Any, context: Any) -> Any:
        self._enter("EndCopy", request, context)
        return store.EndCopyResponse()

    def ReleaseLeases(self, request: Any, context: Any) -> Any:
        self._enter("ReleaseLeases", request, context)
        return store.ReleaseLeasesResponse(released=len(request.objects))

    def EndRequests(self, request: Any, context: Any) -> Any:
        self._enter("EndRequests", request, context)
        return store.EndRequestsResponse()

    def Abort(self, request: Any, context: Any) -> Any:
        self._enter("Abort", request, context)
        return store.AbortResponse()

    def ReportDrained(self, request: Any, context: Any) -> Any:
        self._enter("ReportDrained", request, context)
        self.drained.append(request.session_id)
        return store.ReportDrainedResponse()

    def Clear(self, request: Any, context: Any) -> Any:
        self._enter("Clear", request, context)
        return store.ClearResponse(removed_chunks=3)

    def Score(self, request: Any, context: Any) -> Any:
        self._enter("Score", request, context)
        return store.StoreServiceScoreResponse(stores=[store.TokenScore(store="fake", prefix_tokens=16)])

    def PingStore(self, request: Any, context: Any) -> Any:
        self._enter("PingStore", request, context)
        return store.PingStoreResponse(liveness=common.Liveness(service="store"), arena=self.info())

    # What a lookup answers.

    def serve_prefix(self, count: int) -> None:
        """The first `count` committed objects are the prefix."""
        used = self.objects[:count]
        self.summary = store.LookupSummary(
            prefix_tokens=sum(item.tokens for item in used),
            prefix_hashes=b"".join(item.chain_hash for item in used),
            prefix_lengths=np.array([item.tokens for item in used], "<u4").tobytes(),
        )

    def serve_segment(self, query: int, first: int, length: int) -> None:
        """Tokens [first, first + length) of the committed text, at `query` of the prompt."""
        chunk = self.objects[0].tokens
        hashes, lengths, position = [], [], first
        while position < first + length:
            item = self.objects[position // chunk]
            end = min(item.stored_position + item.tokens, first + length)
            hashes.append(item.chain_hash)
            lengths.append(end - position)
            position = end
        segments = self.summary.segments
        segments.query_positions += u32(query)
        segments.stored_positions += u32(first)
        segments.lengths += u32(length)
        segments.domains += bytes([self.objects[0].domain])
        segments.context_classes += bytes([common.CONTEXT_CLASS_ALONE])
        segments.skip_tokens += u32(first % chunk)
        segments.document_indexes += u32(0)
        segments.documents[:] = [""]
        segments.chunk_counts += u32(len(lengths))
        segments.chain_hashes += b"".join(hashes)
        segments.chunk_lengths += u32(*lengths)


def u32(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def u64(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def columns_of(objects: list[LeasedObject]) -> store.ObjectColumns:
    places = [item.place for item in objects]
    return store.ObjectColumns(
        headers=u32(*(place.header for place in places)),
        generations=u64(*(place.generation for place in places)),
        slabs=u32(*(place.slab for place in places)),
        offsets=u64(*(place.offset for place in places)),
        payload_bytes=u64(*(place.payload_bytes for place in places)),
        groups=u32(*(place.group for place in places)),
        chain_hashes=b"".join(item.chain_hash for item in objects),
        domains=bytes(item.domain for item in objects),
        tokens=u32(*(item.tokens for item in objects)),
        stored_positions=u32(*(item.stored_position for item in objects)),
        checksums=u64(*(item.checksum for item in objects)),
        verify=bytes(item.verify for item in objects),
    )


def session_files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory / "sessions"))
