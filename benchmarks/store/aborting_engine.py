"""An engine whose requests are aborted at random: `-m benchmarks.store.aborting_engine TARGET NAME SEED REQUESTS`.

Each request is a store, or a lookup and perhaps a retrieve. Calls are cancelled, requests are ended before, while and
after they run. Prints the number of a request when it is over; may be killed at any moment.
"""

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import numpy as np

from kvblend.client import KvblendClient, token_bytes
from kvblend.host_calls import host_channel
from kvblend.layouts import KvShape, buffer_bytes, build_layout
from kvblend.memory import SharedBuffer
from kvblend.v1 import agent_pb2, agent_pb2_grpc, store_pb2
from kvblend.v1 import common_pb2 as pb

CHUNK_TOKENS = 16
_SHAPE = KvShape(layers=2, heads=2, head_size=8, blocks=64, block_tokens=4, dtype=pb.DTYPE_FLOAT32)
_THREADS = 6
_TEXTS = 48
_MAX_DELAY_SECONDS = 0.006
_CALL_SECONDS = 10.0
_START_SECONDS = 60.0


def _model_space() -> pb.ModelSpace:
    group = pb.LayerGroup(
        attention=pb.ATTENTION_KIND_FULL,
        layers=_SHAPE.layers,
        kv_heads=_SHAPE.heads,
        head_size=_SHAPE.head_size,
        rope=pb.Rope(style=pb.ROPE_STYLE_NONE),
    )
    return pb.ModelSpace(
        weights_fingerprint=b"w" * 32, kv_dtype=_SHAPE.dtype, groups=[group], chunk_tokens=CHUNK_TOKENS
    )


class Engine:
    """Its requests run in threads. Slots are shared by all of them: what they hold does not matter here."""

    def __init__(self, target: str, name: str, seed: int) -> None:
        self._client = KvblendClient(target, name)
        # As the client's own: what is given up and what ends it go the same way.
        self._channel = host_channel(target, grpc.insecure_channel(target))
        self._stub: Any = agent_pb2_grpc.AgentServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._buffers = [SharedBuffer(size) for size in buffer_bytes("paged_nhd", _SHAPE)]
        self._name = name
        self._seed = seed
        self._printing = threading.Lock()
        handles, layout = [buffer.handle() for buffer in self._buffers], build_layout("paged_nhd", _SHAPE)
        limit = time.monotonic() + _START_SECONDS
        while not self._client.register_kv_cache(_model_space(), handles, layout, timeout=_CALL_SECONDS):
            if time.monotonic() > limit:
                raise RuntimeError("the agent does not get ready")
            time.sleep(0.05)

    def close(self) -> None:
        self._channel.close()
        self._client.close()
        for buffer in self._buffers:
            buffer.close()

    def run(self, requests: int) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._request, range(requests)))

    def _request(self, number: int) -> None:
        chance = random.Random(self._seed << 32 | number)
        key = pb.RequestKey(request_id=f"{number}")
        if chance.random() < 0.03:
            # Ended before it begins.
            self._end(key)
        scenario = self._store if chance.random() < 0.5 else self._look_up
        try:
            scenario(chance, key)
        except grpc.RpcError:
            # Cancelled, or the agent was killed: the client registers again with its next call.
            self._client.release_lookup(key.request_id, timeout=_CALL_SECONDS)
        self._end(key)
        with self._printing:
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()

    def _store(self, chance: random.Random, key: pb.RequestKey) -> None:
        request = agent_pb2.StoreKvRequest(
            instance_id=self._name,
            request=key,
            kind=store_pb2.STORE_KIND_PROMPT,
            tokens=_text(chance),
            slots=_slots(),
        )
        self._abort_at_random(chance, key, self._stub.StoreKv.future(request, timeout=_CALL_SECONDS))

    def _look_up(self, chance: random.Random, key: pb.RequestKey) -> None:
        request = agent_pb2.AgentServiceLookupRequest(
            instance_id=self._name, request=key, tokens=_text(chance), no_wait=chance.random() < 0.3
        )
        if not self._abort_at_random(chance, key, self._stub.Lookup.future(request, timeout=_CALL_SECONDS)):
            return
        retrieve = agent_pb2.RetrieveRequest(
            instance_id=self._name, request=key, slots=_slots(), keep_leases=chance.random() < 0.3
        )
        self._abort_at_random(chance, key, self._stub.Retrieve.future(retrieve, timeout=_CALL_SECONDS))

    def _abort_at_random(self, chance: random.Random, key: pb.RequestKey, call: Any) -> bool:
        """Whether the call was let through. Raises grpc.RpcError."""
        fate = chance.random()
        if fate < 0.5:
            call.result()
            return True
        time.sleep(chance.random() * _MAX_DELAY_SECONDS)
        if fate < 0.75:
            call.cancel()
        else:
            self._end(key)
            call.exception()
        return False

    def _end(self, key: pb.RequestKey) -> None:
        self._client.end_session(key.request_id, timeout=_CALL_SECONDS)


def _text(chance: random.Random) -> bytes:
    """Of 2 to 8 chunks; every second one is known to others."""
    seed = chance.randrange(_TEXTS) if chance.random() < 0.5 else chance.randrange(1 << 30)
    generator = np.random.default_rng(seed)
    return token_bytes(generator.integers(0, 50_000, CHUNK_TOKENS * int(generator.integers(2, 9)) + 3))


def _slots() -> agent_pb2.SlotMap:
    return agent_pb2.SlotMap(block_ids=token_bytes(range(_SHAPE.blocks)))


def main() -> None:
    target, name, seed, requests = sys.argv[1:]
    with closing(Engine(target, name, int(seed))) as engine:
        engine.run(int(requests))


if __name__ == "__main__":
    main()
