"""What an agent does with a store, without a GPU: one session, and bytes that stand for KV."""

import mmap
import queue
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2, store_pb2_grpc
from services.common.arena_format import SessionFile, slab_path
from services.common.channels import open_channel
from services.common.checksums import checksum_of

_CALL_SECONDS = 60.0


class StoreAgent:
    """A session with the store at `target`, whose arena it maps. `call` raises grpc.RpcError."""

    def __init__(self, target: str, arena: Path) -> None:
        self.session_id = secrets.token_bytes(16)
        self._arena = arena
        self._file = SessionFile(arena, self.session_id)
        self._slabs: dict[int, mmap.mmap] = {}
        self._channel = open_channel(target)
        self._stub: Any = store_pb2_grpc.StoreServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._ended: queue.Queue[None] = queue.Queue()
        self._stream = self._stub.Session(self._hello())
        next(self._stream)

    def _hello(self) -> Iterator[store_pb2.SessionRequest]:
        yield store_pb2.SessionRequest(session_id=self.session_id, agent="bench")
        self._ended.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.put(None)
        self._stream.cancel()
        self._channel.close()
        self._file.close()

    def call(self, method: str, **fields: object) -> Any:
        request = getattr(store_pb2, f"{method}Request")(**fields)
        if "session_id" in request.DESCRIPTOR.fields_by_name:
            request.session_id = self.session_id
        return getattr(self._stub, method)(request, timeout=_CALL_SECONDS)

    def lookup(self, request_id: str, **fields: object) -> store_pb2.LookupSummary:
        """The last message's summary; what was found is leased."""
        request = pb.RequestKey(request_id=request_id, attempt=1)
        summary = store_pb2.LookupSummary()
        for response in self.call("Lookup", request=request, **fields):
            summary = response.summary
        return summary

    def end(self, request_id: str) -> None:
        self.call("EndRequests", request_ids=[request_id])

    def store(self, request_id: str, **fields: object) -> tuple[int, pb.StreamPosition]:
        """Reserves, writes what is granted, commits: (bytes of KV written, where the matchers learn of it)."""
        request = pb.RequestKey(request_id=request_id, attempt=1)
        reserved = self.call("Reserve", request=request, **fields)
        places = [place for chunk in reserved.chunks for place in chunk.places]
        if not places:
            return 0, pb.StreamPosition()
        committed = self.call(
            "Commit", reservation_id=reserved.reservation_id, written=[self._write(place) for place in places]
        )
        return sum(place.payload_bytes for place in places), committed.position

    def _write(self, place: store_pb2.ObjectPlace) -> store_pb2.WrittenObject:
        data = place.generation.to_bytes(8, "little") * (place.payload_bytes // 8)
        start = place.offset
        self._slab(place.slab)[start : start + len(data)] = data
        ref = store_pb2.ObjectRef(header=place.header, generation=place.generation)
        return store_pb2.WrittenObject(object=ref, checksum=checksum_of(data))

    def _slab(self, slab: int) -> mmap.mmap:
        if slab not in self._slabs:
            with slab_path(self._arena, slab).open("r+b") as file:
                self._slabs[slab] = mmap.mmap(file.fileno(), 0)
        return self._slabs[slab]
