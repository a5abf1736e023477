"""A running agent, an engine's memory, and calls to the agent over a socket."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from engine_memory import EngineMemory, make_rope, model_space, rotate_slowly
from fake_store import FakeStore

from kvblend.layouts import KvShape
from kvblend.memory import SHM_DIR
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import agent_pb2_grpc
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.errors import REASON_KEY
from services.gpu_agent.server import build_server
from services.gpu_agent.settings import AgentSettings

CHUNK = 16
SHAPE = KvShape(layers=2, heads=2, head_size=8, blocks=24, block_tokens=4, dtype=common.DTYPE_FLOAT32)
ROPE = make_rope(common.ROPE_STYLE_NEOX, SHAPE.head_size)
INSTANCE = "engine-1"


class CallFailed(Exception):
    """A call's reason, as the error table names it."""


class Rig:
    """Calls to the agent at `target`, as an engine with memory of `shape`. `fake` is its store, if that is one."""

    def __init__(
        self,
        target: str,
        fake: FakeStore | None = None,
        shape: KvShape = SHAPE,
        seed: int = 0,
        shm_dir: Path = SHM_DIR,
    ) -> None:
        if fake is not None:
            self.fake = fake
        self.target = target
        self.channel = grpc.insecure_channel(target, options=[("grpc.max_reconnect_backoff_ms", 200)])
        self.stub: Any = agent_pb2_grpc.AgentServiceStub(self.channel)
        self.engine = EngineMemory("paged_nhd", shape, seed, shm_dir)
        self.space = model_space(shape, make_rope(common.ROPE_STYLE_NEOX, shape.head_size), CHUNK)
        self.metadata: tuple[tuple[str, str], ...] = ()
        self._closing = ExitStack()

    def call(self, method: str, request: Any, timeout: float = 10.0) -> Any:
        try:
            return getattr(self.stub, method)(request, timeout=timeout, metadata=self.metadata)
        except grpc.RpcError as error:
            reasons = [value for key, value in error.trailing_metadata() or () if key == REASON_KEY]
            raise CallFailed(f"{(reasons or [error.code().name])[0]}: {error.details()}") from error

    def registration(self, **changes: Any) -> pb.RegisterKvCacheRequest:
        fields = {
            "instance_id": INSTANCE,
            "model_space": self.space,
            "handles": self.engine.handles,
            "layout": self.engine.layout,
        }
        return pb.RegisterKvCacheRequest(**(fields | changes))

    def register(self, **changes: Any) -> pb.RegisterKvCacheResponse:
        return self.call("RegisterKvCache", self.registration(**changes))

    def hold_session(self) -> None:
        """Until the channel is closed, as an engine does: a registration without a session soon ends."""
        closed = threading.Event()
        self._closing.callback(closed.set)

        def requests() -> Iterator[pb.EngineSessionRequest]:
            yield pb.EngineSessionRequest(instance_id=INSTANCE)
            closed.wait()

        # A call that nobody holds is cancelled.
        self._session = self.stub.EngineSession(requests(), metadata=self.metadata)
        next(self._session)

    def prove_rope(self) -> None:
        rope = self.space.groups[0].rope
        proof = rope_proof(self.engine, rope)
        self.call("RegisterRope", pb.RegisterRopeRequest(instance_id=INSTANCE, ropes=[rope], proofs=[proof]))

    def store(self, text: list[int], slots: pb.SlotMap, **changes: Any) -> pb.StoreKvResponse:
        fields = {
            "instance_id": INSTANCE,
            "request": common.RequestKey(request_id="store"),
            "kind": store.STORE_KIND_PROMPT,
            "tokens": encode(text),
            "slots": slots,
        }
        return self.call("StoreKv", pb.StoreKvRequest(**(fields | changes)))

    def lookup(self, text: list[int], request_id: str = "r", timeout: float = 5.0, **changes: Any) -> pb.LookupAnswer:
        attempt = changes.pop("attempt", 0)
        fields = {
            "instance_id": INSTANCE,
            "request": common.RequestKey(request_id=request_id, attempt=attempt),
            "tokens": encode(text),
            "want_segments": True,
        }
        return self.call("Lookup", pb.AgentServiceLookupRequest(**(fields | changes)), timeout).answer

    def retrieve(self, slots: pb.SlotMap, request_id: str = "r", timeout: float = 5.0, **changes: Any) -> Any:
        attempt = changes.pop("attempt", 0)
        fields = {
            "instance_id": INSTANCE,
            "request": common.RequestKey(request_id=request_id, attempt=attempt),
            "slots": slots,
        }
        return self.call("Retrieve", pb.RetrieveRequest(**(fields | changes)), timeout)

    def end(self, request_id: str = "r") -> None:
        self.call("EndSession", pb.EndSessionRequest(instance_id=INSTANCE, request_id=request_id))

    def ping(self) -> pb.PingAgentResponse:
        return self.call("PingAgent", pb.PingAgentRequest(instance_id=INSTANCE))

    def wait_for(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.02)

    def wait_ready(self) -> None:
        self.wait_for(self._ready)

    def _ready(self) -> bool:
        try:
            return bool(self.ping().liveness.dependencies[0].ready)
        except CallFailed:
            return False

    def close(self) -> None:
        self._closing.close()
        self.channel.close()
        self.engine.close()


def rope_proof(engine: EngineMemory, rope: common.Rope) -> pb.RopeProof:
    """K of the engine's dtype at two positions."""
    key = engine.rounded(torch.randn(engine.shape.heads, engine.shape.head_size))
    moved = engine.rounded(rotate_slowly(key, rope, 1000))
    keys = (of.float().numpy().astype("<f4").tobytes() for of in (key, moved))
    return pb.RopeProof(position_b=1000, key_a=next(keys), key_b=next(keys))


def encode(values: list[int]) -> bytes:
    return np.array(values, "<u4").tobytes()


def blocks(*ids: int, first_slot: int = 0) -> pb.SlotMap:
    return pb.SlotMap(block_ids=encode(list(ids)), first_slot=first_slot)


def slots_of(table: pb.SlotMap, positions: range, block_tokens: int = SHAPE.block_tokens) -> list[int]:
    """Slots by the definition in the contract."""
    ids = np.frombuffer(table.block_ids, "<u4").tolist()
    places = [table.first_slot + position for position in positions]
    return [ids[place // block_tokens] * block_tokens + place % block_tokens for place in places]


def ranges(items: Any) -> list[tuple[int, int]]:
    return [(item.first, item.first + item.length) for item in items]


def failures(response: pb.RetrieveResponse) -> list[tuple[int, int, str]]:
    return [
        (item.range.first, item.range.first + item.range.length, common.Reason.Name(item.reason)[len("REASON_") :])
        for item in response.failed
    ]


def outcomes(response: pb.StoreKvResponse) -> list[tuple[str, str]]:
    return [
        (
            store.ChunkOutcome.Name(chunk.outcome).removeprefix("CHUNK_OUTCOME_"),
            common.Reason.Name(chunk.reason).removeprefix("REASON_"),
        )
        for chunk in response.chunks
    ]


@contextmanager
def running_agent(fake: FakeStore, *, register: bool = True, **settings: Any) -> Iterator[Rig]:
    listen = f"unix:{fake.directory}/agent.sock"
    defaults: dict[str, Any] = {
        "listen": listen,
        "store": fake.target,
        "heartbeat_seconds": 0.1,
        "engine_grace_seconds": 0.1,
        "copy_threads": 1,
    }
    with ExitStack() as stack:
        server = build_server(AgentSettings(**(defaults | settings)), stack)
        server.start()
        stack.callback(server.stop, 1.0)
        rig = Rig(listen, fake)
        stack.callback(rig.close)
        if register:
            rig.wait_ready()
            rig.register()
            rig.prove_rope()
        yield rig
