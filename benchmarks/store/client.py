"""A store process, and a client of it that maps its arena as an agent does."""

import mmap
import os
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.common.processes import ROOT
from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2, store_pb2_grpc
from services.common.arena_format import SessionFile, open_catalog, slab_path
from services.common.channels import open_channel
from services.common.checksums import Bytes
from services.common.populate import populate
from services.common.tokens import encode_u32

CHUNK_TOKENS = 256
# Bytes of a chunk's object, per layer: bf16, 8 KV heads of 128.
LAYER_BYTES = 1 << 20
_START_SECONDS = 120.0
CALL_SECONDS = 60.0


@contextmanager
def store_process(arena_bytes: int) -> Iterator[tuple[str, Path]]:
    """(its address, its arena's directory)"""
    folder = Path(tempfile.mkdtemp(prefix="kvb-bench-", dir="/dev/shm"))
    target = f"unix:{folder}/store.sock"
    command = [sys.executable, "-m", "services.store", "--listen", target, "--arena-dir", str(folder / "arena")]
    command += ["--arena-bytes", str(arena_bytes), "--log-level", "warning", "--drain-seconds", "0"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
        )
    try:
        _wait_until_up(target, process, folder / "log")
        yield target, folder / "arena"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_up(target: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    give_up_at = time.monotonic() + _START_SECONDS
    with open_channel(target) as channel:
        stub = _stub(channel)
        while True:
            try:
                stub.PingStore(store_pb2.PingStoreRequest(), timeout=1.0)
                return
            except grpc.RpcError as error:
                if process.poll() is not None or time.monotonic() > give_up_at:
                    raise RuntimeError(f"no store: {log.read_text()[-2000:]}") from error
                time.sleep(0.05)


def _stub(channel: grpc.Channel) -> Any:
    return store_pb2_grpc.StoreServiceStub(channel)  # type: ignore[no-untyped-call]


def model_of(layers: int) -> pb.ModelSpace:
    """Its chunk's object has `layers` MiB."""
    rope = pb.Rope(style=pb.ROPE_STYLE_NONE)
    group = pb.LayerGroup(attention=pb.ATTENTION_KIND_FULL, layers=layers, kv_heads=8, head_size=128, rope=rope)
    return pb.ModelSpace(
        weights_fingerprint=layers.to_bytes(32, "little"),
        kv_dtype=pb.DTYPE_BFLOAT16,
        groups=[group],
        tensor_parallel=1,
        chunk_tokens=CHUNK_TOKENS,
        display_name=f"bench {layers}",
    )


def fresh_tokens(chunks: int) -> bytes:
    """Never stored before."""
    return encode_u32(np.random.default_rng().integers(0, 1 << 31, chunks * CHUNK_TOKENS))


class BenchClient:
    """One session, one model. Every call waits for its answer."""

    def __init__(self, target: str, directory: Path, layers: int) -> None:
        self._channel = open_channel(target)
        self._stub = _stub(self._channel)
        self.session_id = secrets.token_bytes(16)
        self._file = SessionFile(directory, self.session_id)
        self._beats: queue.Queue[store_pb2.SessionRequest | None] = queue.Queue()
        self._stream = self._stub.Session(self._requests())
        next(self._stream)
        self._catalog = open_catalog(directory)
        self._slabs = [_mapped(directory, slab, self._catalog.slab_bytes) for slab in range(self._catalog.slabs)]
        request = store_pb2.RegisterModelSpaceRequest(model_space=model_of(layers))
        registered = self._stub.RegisterModelSpace(request, timeout=CALL_SECONDS)
        self._space = pb.Space(model_space_id=registered.model_space_id)
        self._number = 0

    def _requests(self) -> Iterator[store_pb2.SessionRequest]:
        yield store_pb2.SessionRequest(session_id=self.session_id, agent="bench")
        while (beat := self._beats.get()) is not None:
            yield beat

    def close(self) -> None:
        self._beats.put(None)
        self._stream.cancel()
        self._channel.close()
        self._slabs.clear()
        self._catalog.close()
        self._file.close()

    def block(self, place: store_pb2.ObjectPlace) -> Bytes:
        """The object's payload in the arena, [payload_bytes] uint8."""
        return self._slabs[place.slab][place.offset : place.offset + place.payload_bytes]

    def is_current(self, place: store_pb2.ObjectPlace) -> bool:
        """The block is still what it was."""
        return self._catalog.generation(place.header) == place.generation

    def reserve(self, tokens: bytes) -> store_pb2.ReserveResponse:
        request = store_pb2.ReserveRequest(
            session_id=self.session_id,
            request=pb.RequestKey(request_id="store", attempt=1),
            space=self._space,
            kind=store_pb2.STORE_KIND_PROMPT,
            tokens=tokens,
            exact_tokens=len(tokens) // 4,
        )
        answer: store_pb2.ReserveResponse = self._stub.Reserve(request, timeout=CALL_SECONDS)
        return answer

    def commit(self, reservation: int, places: Sequence[store_pb2.ObjectPlace], checksums: Sequence[int]) -> None:
        written = [
            store_pb2.WrittenObject(object=_ref(place), checksum=checksum)
            for place, checksum in zip(places, checksums, strict=True)
        ]
        request = store_pb2.CommitRequest(session_id=self.session_id, reservation_id=reservation, written=written)
        answer: store_pb2.CommitResponse = self._stub.Commit(request, timeout=CALL_SECONDS)
        if any(answer.reasons):
            raise RuntimeError("a commit was refused")

    def lookup(self, tokens: bytes) -> pb.RequestKey:
        """The request that holds the leases. Raises RuntimeError if not everything is there."""
        self._number += 1
        key = pb.RequestKey(request_id=f"read {self._number}", attempt=1)
        request = store_pb2.LookupRequest(
            # The last token is always computed.
            session_id=self.session_id, request=key, space=self._space, tokens=tokens + bytes(4)
        )  # fmt: skip
        answers = list(self._stub.Lookup(request, timeout=CALL_SECONDS))
        if answers[-1].summary.prefix_tokens != len(tokens) // 4:
            raise RuntimeError("not everything that was stored is found")
        return key

    def begin(self, key: pb.RequestKey, places: Sequence[store_pb2.ObjectPlace]) -> None:
        request = store_pb2.BeginCopyRequest(
            session_id=self.session_id, request=key, objects=[_ref(place) for place in places]
        )
        if any(self._stub.BeginCopy(request, timeout=CALL_SECONDS).reasons):
            raise RuntimeError("a copy was refused")

    def end(self, key: pb.RequestKey, places: Sequence[store_pb2.ObjectPlace]) -> None:
        request = store_pb2.EndCopyRequest(
            session_id=self.session_id, request=key, objects=[_ref(place) for place in places]
        )
        self._stub.EndCopy(request, timeout=CALL_SECONDS)


def _mapped(directory: Path, slab: int, size: int) -> Bytes:
    """As an agent has it after a while: all of its pages at hand."""
    with slab_path(directory, slab).open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    populate(memory)
    return memory


def _ref(place: store_pb2.ObjectPlace) -> store_pb2.ObjectRef:
    return store_pb2.ObjectRef(header=place.header, generation=place.generation)


def places_of(reserved: store_pb2.ReserveResponse) -> list[store_pb2.ObjectPlace]:
    return [place for chunk in reserved.chunks for place in chunk.places]
