"""An engine that computes nothing: it holds a session with a real store, stores and asks for prompts, and copies."""

import mmap
import queue
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2, store_pb2_grpc
from services.common.arena_format import SessionFile, slab_path
from services.common.channels import open_channel
from services.common.checksums import checksum_of
from services.common.columns import hashes, u32s, u64s
from services.common.identity import HASH_BYTES

CHUNK_TOKENS = 256
_LAYERS, _HEADS, _HEAD_SIZE = 24, 2, 64
# K and V in 16 bits.
TOKEN_BYTES = _LAYERS * 2 * _HEADS * _HEAD_SIZE * 2
_CALL_SECONDS = 60.0

Tokens = npt.NDArray[np.uint32]


def model_space() -> pb.ModelSpace:
    """12 KiB of KV a token: a model of half a billion parameters with grouped queries."""
    rope = pb.Rope(style=pb.ROPE_STYLE_NEOX, rotary_size=_HEAD_SIZE, inv_freq=np.linspace(1, 0.1, 32).tobytes())
    group = pb.LayerGroup(
        attention=pb.ATTENTION_KIND_FULL, layers=_LAYERS, kv_heads=_HEADS, head_size=_HEAD_SIZE, rope=rope
    )
    return pb.ModelSpace(
        weights_fingerprint=bytes(32),
        kv_dtype=pb.DTYPE_BFLOAT16,
        groups=[group],
        tensor_parallel=1,
        chunk_tokens=CHUNK_TOKENS,
        display_name="modelled",
    )


@dataclass(frozen=True)
class Found:
    """Seconds are wall time: the lookup with its last message, then copying everything out of the arena."""

    lookup_seconds: float
    copy_seconds: float
    summary: store_pb2.LookupSummary

    def ttft(self, tokens: int, tokens_per_second: float) -> float:
        """With computing the rest, which is modelled."""
        return self.lookup_seconds + self.copy_seconds + (tokens - self.summary.prefix_tokens) / tokens_per_second


class ModelledEngine:
    """One session of an agent. Its arena is in `directory`."""

    def __init__(self, target: str, directory: Path) -> None:
        self._directory = directory
        self._session = secrets.token_bytes(16)
        self._file = SessionFile(directory, self._session)
        self._channel = open_channel(target)
        self.stub: Any = store_pb2_grpc.StoreServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._beats: queue.Queue[None] = queue.Queue()
        self._stream = self.stub.Session(self._hello())
        next(self._stream)
        self._slabs: dict[int, mmap.mmap] = {}
        self._buffer = np.zeros(0, np.uint8)
        self._requests = 0
        registered = self.stub.RegisterModelSpace(
            store_pb2.RegisterModelSpaceRequest(model_space=model_space()), timeout=_CALL_SECONDS
        )
        self._space = pb.Space(model_space_id=registered.model_space_id)

    def _hello(self) -> Iterator[store_pb2.SessionRequest]:
        yield store_pb2.SessionRequest(session_id=self._session, agent="bench")
        self._beats.get()

    def close(self) -> None:
        self._beats.put(None)
        self._stream.cancel()
        self._channel.close()
        self._file.close()

    def _view(self, place: store_pb2.ObjectPlace) -> npt.NDArray[np.uint8]:
        if place.slab not in self._slabs:
            with slab_path(self._directory, place.slab).open("r+b") as file:
                self._slabs[place.slab] = mmap.mmap(file.fileno(), 0)
        return np.frombuffer(self._slabs[place.slab], np.uint8, place.payload_bytes, place.offset)

    def store(self, tokens: Tokens) -> None:
        """KV of a prompt: each object repeats its chunk's hash."""
        reserved = self.stub.Reserve(
            store_pb2.ReserveRequest(
                session_id=self._session,
                space=self._space,
                kind=store_pb2.STORE_KIND_PROMPT,
                tokens=tokens.tobytes(),
                exact_tokens=len(tokens),
            ),
            timeout=_CALL_SECONDS,
        )
        written = []
        for chunk in reserved.chunks:
            for place in chunk.places:
                view = self._view(place)
                view[:] = np.frombuffer(chunk.chain_hash * (len(view) // len(chunk.chain_hash)), np.uint8)
                ref = store_pb2.ObjectRef(header=place.header, generation=place.generation)
                checksum = checksum_of(view.data)
                written.append(store_pb2.WrittenObject(object=ref, checksum=checksum))
        self.stub.Commit(
            store_pb2.CommitRequest(session_id=self._session, reservation_id=reserved.reservation_id, written=written),
            timeout=_CALL_SECONDS,
        )

    def find(self, tokens: Tokens, tokens_per_second: int, deadline: float) -> Found:
        """Looks up, copies what is there, ends the request. Raises RuntimeError if a byte is not what was stored."""
        self._requests += 1
        key = pb.RequestKey(request_id=f"r{self._requests}", attempt=1)
        start = time.perf_counter()
        parts = list(
            self.stub.Lookup(
                store_pb2.LookupRequest(
                    session_id=self._session,
                    request=key,
                    space=self._space,
                    tokens=tokens.tobytes(),
                    prefill_tokens_per_second=tokens_per_second,
                ),
                timeout=deadline,
            )
        )
        looked = time.perf_counter()
        objects = [item for part in parts for item in _objects_in(part.objects)]
        if objects:
            self._copy(key, objects)
        copied = time.perf_counter()
        self.stub.EndRequests(
            store_pb2.EndRequestsRequest(session_id=self._session, request_ids=[key.request_id]), timeout=_CALL_SECONDS
        )
        return Found(looked - start, copied - looked, parts[-1].summary)

    def _copy(self, key: pb.RequestKey, objects: list["_Leased"]) -> None:
        refs = [store_pb2.ObjectRef(header=item.place.header, generation=item.place.generation) for item in objects]
        begun = self.stub.BeginCopy(
            store_pb2.BeginCopyRequest(session_id=self._session, request=key, objects=refs), timeout=_CALL_SECONDS
        )
        size = sum(item.place.payload_bytes for item in objects)
        if size > len(self._buffer):
            self._buffer = np.zeros(size, np.uint8)
        end = 0
        for item, reason in zip(objects, begun.reasons, strict=True):
            view = self._view(item.place)
            start, end = end, end + len(view)
            self._buffer[start:end] = view
            if reason or self._buffer[start : start + HASH_BYTES].tobytes() != item.chain_hash:
                raise RuntimeError(f"an object was not what its key says (reason {reason})")
        self.stub.EndCopy(
            store_pb2.EndCopyRequest(session_id=self._session, request=key, objects=refs), timeout=_CALL_SECONDS
        )

    def stats(self) -> store_pb2.GetStoreStatsResponse:
        answer: store_pb2.GetStoreStatsResponse = self.stub.GetStoreStats(
            store_pb2.GetStoreStatsRequest(), timeout=_CALL_SECONDS
        )
        return answer


class _Leased(NamedTuple):
    place: store_pb2.ObjectPlace
    chain_hash: bytes


def _objects_in(columns: store_pb2.ObjectColumns) -> list[_Leased]:
    names = hashes(columns.chain_hashes)
    numbers = (u32s(columns.headers), u64s(columns.generations), u32s(columns.slabs))
    places = (u64s(columns.offsets), u64s(columns.payload_bytes))
    rows = np.stack((*numbers, *places), axis=1).tolist()
    return [
        _Leased(
            store_pb2.ObjectPlace(header=header, generation=generation, slab=slab, offset=offset, payload_bytes=size),
            name,
        )
        for name, (header, generation, slab, offset, size) in zip(names, rows, strict=True)
    ]
