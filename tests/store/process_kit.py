"""A real store process, and an agent-like test process that maps its arena and copies."""

import hashlib
import importlib
import mmap
import os
import queue
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
from store_kit import Leased, checksum, known_bytes, model_space, objects_in

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2, store_pb2_grpc
from services.common.arena_format import SessionFile, open_catalog, slab_path
from services.common.channels import open_channel
from services.common.failpoints import VARIABLE
from services.common.tokens import encode_u32

# The server for tests of what lies beside the store.
sys.path.append(str(Path(__file__).parent.parent / "store_edges"))
redis_server = importlib.import_module("redis_server").redis_server

CALL_SECONDS = 20.0
_MIB = 1 << 20


class StoreProcess:
    """`python -m services.store` on a unix socket; `kill` is kill -9, `start` starts it again."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        arena_bytes: int = 4 * _MIB,
        slab_bytes: int = _MIB,
        spawn: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        """`spawn` starts the process, as Popen does."""
        self.arena = directory / "arena"
        self.target = f"unix:{directory}/store.sock"
        self._command = [sys.executable, "-m", "services.store", "--name", "t", "--listen", self.target]
        self._command += ["--arena-dir", str(self.arena), "--arena-bytes", str(arena_bytes)]
        self._command += ["--slab-bytes", str(slab_bytes), "--chunk-tokens", "16", "--log-level", "warning"]
        self._command += ["--drain-seconds", "0", "--grace-seconds", "0.2", *flags]
        self._log = directory / "store.log"
        self._spawn = spawn
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def launch(self, *more: str, failpoints: str = "") -> None:
        """Starts it with these failpoints armed; it may never get ready."""
        assert self.process is None, "it runs already"
        with self._log.open("ab") as log:
            self.process = self._spawn(
                [*self._command, *more], stdout=log, stderr=log, env=os.environ | {VARIABLE: failpoints}
            )

    def start(self, *more: str, failpoints: str = "") -> Self:
        self.launch(*more, failpoints=failpoints)
        assert self.becomes_ready(), self._log.read_text()
        return self

    def becomes_ready(self) -> bool:
        """False: it died instead."""
        assert self.process is not None
        with open_channel(self.target) as channel:
            stub: Any = store_pb2_grpc.StoreServiceStub(channel)  # type: ignore[no-untyped-call]
            limit = time.monotonic() + 60
            while True:
                try:
                    stub.PingStore(store_pb2.PingStoreRequest(), timeout=1)
                    return True
                except grpc.RpcError:
                    if self.process.poll() is not None:
                        self.process = None
                        return False
                    assert time.monotonic() < limit, "the store did not start"
                    time.sleep(0.02)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """In order: it says so by its status."""
        assert self._end(signal.SIGTERM) == 0, self._log.read_text()

    def _end(self, number: int) -> int:
        status = 0
        if self.process is not None:
            self.process.send_signal(number)
            status = self.process.wait(30)
            self.process = None
        return status

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


class Agent:
    """One session with a store, and a map of its arena."""

    def __init__(
        self, store: StoreProcess, *, model: pb.ModelSpace | None = None, tenant: str = "", token: str = ""
    ) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.session_id = secrets.token_bytes(16)
        self._file = SessionFile(store.arena, self.session_id)
        self.catalog = open_catalog(store.arena)
        self._slabs: dict[int, mmap.mmap] = {}
        self._directory = store.arena
        self._channel = open_channel(store.target)
        self.stub: Any = store_pb2_grpc.StoreServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._beats: queue.Queue[store_pb2.SessionRequest | None] = queue.Queue()
        # The calls before went beside gRPC, whose channel may still wait to try a restarted store again.
        self._stream = self.stub.Session(self._requests(), wait_for_ready=True)
        self.hello: store_pb2.SessionResponse = next(self._stream)
        registered = self.call("RegisterModelSpace", model_space=model or model_space())
        self.space = pb.Space(model_space_id=registered.model_space_id, tenant=tenant)

    def _requests(self) -> Iterator[store_pb2.SessionRequest]:
        yield store_pb2.SessionRequest(session_id=self.session_id, agent="test")
        while (beat := self._beats.get()) is not None:
            yield beat

    def beat(self) -> store_pb2.SessionResponse:
        self._beats.put(store_pb2.SessionRequest())
        answer: store_pb2.SessionResponse = next(self._stream)
        return answer

    def hang_up(self) -> None:
        """Only the stream ends."""
        self._beats.put(None)
        self._stream.cancel()

    def close(self, *, keep_file: bool = False) -> None:
        self.hang_up()
        self._channel.close()
        if not keep_file:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, timeout: float = CALL_SECONDS, **fields: object) -> Any:
        # Score has another service's method of the same name, hence the longer name.
        kind = getattr(store_pb2, f"{method}Request", None) or getattr(store_pb2, f"StoreService{method}Request")
        request = kind(**fields)
        if "session_id" in request.DESCRIPTOR.fields_by_name:
            request.session_id = self.session_id
        return getattr(self.stub, method)(request, timeout=timeout, metadata=self._metadata)

    def view(self, place: store_pb2.ObjectPlace) -> memoryview:
        if place.slab not in self._slabs:
            with slab_path(self._directory, place.slab).open("r+b") as file:
                self._slabs[place.slab] = mmap.mmap(file.fileno(), 0)
        return memoryview(self._slabs[place.slab])[place.offset : place.offset + place.payload_bytes]

    def own_bytes(self, domain: int, chain_hash: bytes, place: store_pb2.ObjectPlace, rank: int = 0) -> bytes:
        """What this agent's space holds under that key: model space and tenant stand for the space."""
        name = hashlib.blake2b(self.space.model_space_id + self.space.tenant.encode(), digest_size=16).digest()
        return known_bytes(name, domain, chain_hash, place.group, rank, place.payload_bytes)

    def reserve(self, tokens: Sequence[int], document: str = "", **fields: object) -> store_pb2.ReserveResponse:
        kind = store_pb2.STORE_KIND_DOCUMENT if document else store_pb2.STORE_KIND_PROMPT
        options = {"document": store_pb2.DocumentOptions(document=document)} if document else {}
        fields = {"kind": kind, "exact_tokens": len(tokens), **options, **fields}
        answer: store_pb2.ReserveResponse = self.call(
            "Reserve",
            request=pb.RequestKey(request_id="store", attempt=1),
            space=self.space,
            tokens=encode_u32(tokens),
            **fields,
        )
        return answer

    def copy(self, reserved: store_pb2.ReserveResponse) -> list[store_pb2.WrittenObject]:
        written = []
        for chunk in reserved.chunks:
            for place in chunk.places:
                data = self.own_bytes(chunk.domain, chunk.chain_hash, place)
                self.view(place)[:] = data
                ref = store_pb2.ObjectRef(header=place.header, generation=place.generation)
                written.append(store_pb2.WrittenObject(object=ref, checksum=checksum(data)))
        return written

    def put(self, tokens: Sequence[int], document: str = "", **fields: object) -> store_pb2.CommitResponse | None:
        reserved = self.reserve(tokens, document, **fields)
        written = self.copy(reserved)
        if not reserved.reservation_id:
            return None
        answer: store_pb2.CommitResponse = self.call("Commit", reservation_id=reserved.reservation_id, written=written)
        assert not any(answer.reasons)
        return answer

    def lookup(
        self, tokens: Sequence[int], request: str | pb.RequestKey = "r", timeout: float = CALL_SECONDS, **fields: object
    ) -> tuple[list[Leased], store_pb2.LookupSummary]:
        key = pb.RequestKey(request_id=request, attempt=1) if isinstance(request, str) else request
        parts = list(
            self.call(
                "Lookup",
                timeout,
                request=key,
                space=self.space,
                tokens=encode_u32(tokens),
                **fields,
            )
        )
        return [item for part in parts for item in objects_in(part.objects)], parts[-1].summary

    def retrieve(self, objects: Sequence[Leased], request: str = "r") -> list[int]:
        """Copies as an agent does, and compares with what the keys must hold. Reasons, one an object."""
        refs = [store_pb2.ObjectRef(header=item.place.header, generation=item.place.generation) for item in objects]
        key = pb.RequestKey(request_id=request, attempt=1)
        begun: store_pb2.BeginCopyResponse = self.call("BeginCopy", request=key, objects=refs)
        for item, reason in zip(objects, begun.reasons, strict=True):
            if not reason:
                copied = bytes(self.view(item.place))
                assert self.catalog.generation(item.place.header) == item.place.generation
                assert self.catalog.epoch == self.hello.arena.epoch
                assert copied == self.own_bytes(item.domain, item.chain_hash, item.place), "wrong KV"
        self.call("EndCopy", request=key, objects=refs)
        return list(begun.reasons)

    def stats(self) -> store_pb2.GetStoreStatsResponse:
        answer: store_pb2.GetStoreStatsResponse = self.call("GetStoreStats")
        return answer
