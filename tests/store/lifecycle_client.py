"""An agent-like process that does what it reads on standard input, one JSON object a line, and answers likewise.

It holds its sessions' files, maps the arena and copies in two halves, so that it can be stopped or killed in between.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from process_kit import Agent
from store_kit import CHUNK, Leased, checksum, model_space, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2, store_pb2_grpc
from services.common.arena_format import BlockState, session_path
from services.common.channels import open_channel
from services.common.errors import reason_of

_SECONDS = 10.0


class Write:
    """A reservation, and what must be written where."""

    def __init__(self, agent: Agent, reserved: store_pb2.ReserveResponse) -> None:
        self.agent = agent
        self.number = reserved.reservation_id
        self.objects = [
            (chunk.domain, chunk.chain_hash, place, agent.own_bytes(chunk.domain, chunk.chain_hash, place))
            for chunk in reserved.chunks
            for place in chunk.places
        ]

    def names(self) -> list[list[Any]]:
        return [[domain, chain_hash.hex(), place.group] for domain, chain_hash, place, _ in self.objects]

    def copy(self, half: int) -> None:
        for _, _, place, data in self.objects:
            middle = len(data) // 2
            part = slice(middle) if half == 0 else slice(middle, None)
            self.agent.view(place)[part] = data[part]

    def commit(self) -> list[int]:
        written = [
            store_pb2.WrittenObject(
                object=store_pb2.ObjectRef(header=place.header, generation=place.generation), checksum=checksum(data)
            )
            for _, _, place, data in self.objects
        ]
        answer = self.agent.call("Commit", _SECONDS, reservation_id=self.number, written=written)
        return list(answer.reasons)


class Answer:
    """A lookup's objects, and the copies that run of them and of those of earlier attempts."""

    def __init__(self, agent: Agent, key: pb.RequestKey, objects: list[Leased]) -> None:
        self.agent = agent
        self.key = key
        self.objects = objects
        self.running: list[tuple[pb.RequestKey, Leased, bytes]] = []

    def begin(self) -> list[int]:
        answer = self.agent.call("BeginCopy", _SECONDS, request=self.key, objects=_refs(self.objects))
        for item, reason in zip(self.objects, answer.reasons, strict=True):
            if not reason:
                view = self.agent.view(item.place)
                self.running.append((self.key, item, bytes(view[: len(view) // 2])))
        return list(answer.reasons)

    def finish(self, keep: bool) -> list[str]:
        """What became of each copy: good, wrong, or stale if the block was taken away."""
        running, self.running = self.running, []
        found = [self._compare(item, first) for _, item, first in running]
        for attempt in {key.attempt for key, _, _ in running}:
            key = pb.RequestKey(request_id=self.key.request_id, attempt=attempt)
            refs = _refs([item for key, item, _ in running if key.attempt == attempt])
            self.agent.call("EndCopy", _SECONDS, request=key, objects=refs, keep=keep)
        return found

    def peek(self) -> list[str]:
        """As `finish`, without a lease."""
        return [self._compare(item, b"") for item in self.objects if self._is_current(item)]

    def _is_current(self, item: Leased) -> bool:
        catalog, place = self.agent.catalog, item.place
        same = catalog.epoch == self.agent.hello.arena.epoch and catalog.generation(place.header) == place.generation
        return same and catalog.state(place.header) in (BlockState.COMMITTED, BlockState.CONDEMNED)

    def _compare(self, item: Leased, first: bytes) -> str:
        copied = first + bytes(self.agent.view(item.place)[len(first) :])
        if not self._is_current(item):
            return "old epoch" if self.agent.catalog.epoch != self.agent.hello.arena.epoch else "stale"
        return "good" if copied == self.agent.own_bytes(item.domain, item.chain_hash, item.place) else "wrong"


def _refs(objects: list[Leased]) -> list[store_pb2.ObjectRef]:
    return [store_pb2.ObjectRef(header=item.place.header, generation=item.place.generation) for item in objects]


class Client:
    """Methods are commands; what they return is the answer."""

    def __init__(self, arena: Path, target: str, tenant: str) -> None:
        self._store: Any = SimpleNamespace(arena=arena, target=target)
        self._tenant = tenant
        self._agents: list[Agent] = []
        self._writes: dict[int, Write] = {}
        self._answers: dict[str, Answer] = {}
        self._filled: list[tuple[int, int]] = []
        self._attempts = 0

    def _next_attempt(self, request: str) -> pb.RequestKey:
        """An attempt has one answer, however often it is asked for."""
        self._attempts += 1
        return pb.RequestKey(request_id=self._id(request), attempt=self._attempts)

    @staticmethod
    def _id(request: str) -> str:
        """Ids are each client's own: equal ones would be ranks of one request, which read one answer."""
        return f"{os.getpid()} {request}"

    def open(self) -> int:
        """A session with the store as it is now. The one before is lost, its copies may still run."""
        with open_channel(self._store.target) as channel:
            stub: Any = store_pb2_grpc.StoreServiceStub(channel)  # type: ignore[no-untyped-call]
            stub.PingStore(store_pb2.PingStoreRequest(), timeout=_SECONDS, wait_for_ready=True)
        self._agents.append(Agent(self._store, model=model_space(groups=2, layers=12), tenant=self._tenant))
        return int(self._agents[-1].hello.arena.epoch)

    def disconnect(self) -> None:
        self._agents[-1].hang_up()

    def drain(self) -> None:
        """Lets all copies of earlier sessions stop and says so."""
        *old, now = self._agents
        self._writes = {number: write for number, write in self._writes.items() if write.agent is now}
        self._answers = {request: answer for request, answer in self._answers.items() if answer.agent is now}
        for agent in old:
            try:
                now.stub.ReportDrained(store_pb2.ReportDrainedRequest(session_id=agent.session_id), timeout=_SECONDS)
            except grpc.RpcError as error:
                if reason_of(error) != "UNKNOWN_SESSION":
                    raise
            session_path(self._store.arena, agent.session_id).unlink(missing_ok=True)
            agent.close()
        self._agents = [now]

    def quiet(self) -> None:
        """Ends everything of every session."""
        for number in list(self._writes):
            self.abort(number)
        for request, answer in self._answers.items():
            answer.finish(keep=False)
            answer.agent.call("EndRequests", _SECONDS, request_ids=[self._id(request)])
        self._answers.clear()
        self.drain()

    def reserve(self, number: int, tokens: list[int]) -> dict[str, Any]:
        agent = self._agents[-1]
        reserved = agent.reserve(tokens)
        write = self._writes[number] = Write(agent, reserved)
        chunks = [[chunk.domain, chunk.chain_hash.hex(), chunk.outcome] for chunk in reserved.chunks]
        return {"names": write.names(), "chunks": chunks}

    def copy(self, number: int, half: int) -> None:
        if number in self._writes:
            self._writes[number].copy(half)

    def commit(self, number: int) -> list[int]:
        """Reasons; none for what has been drained."""
        write = self._writes.pop(number, None)
        if write is None or not write.objects:
            return []
        write.copy(0)
        write.copy(1)
        return write.commit()

    def abort(self, number: int) -> None:
        write = self._writes.pop(number, None)
        if write is not None:
            write.agent.call("Abort", _SECONDS, reservation_id=write.number)

    def lookup(self, request: str, tokens: list[int]) -> dict[str, Any]:
        agent = self._agents[-1]
        key = self._next_attempt(request)
        objects, summary = agent.lookup([*tokens, 1], key, _SECONDS)
        before = self._answers.get(request)
        answer = self._answers[request] = Answer(agent, key, objects)
        if before is not None and before.agent is agent:
            answer.running = before.running
        return {
            "names": [[item.domain, item.chain_hash.hex(), item.place.group] for item in objects],
            "prefix": summary.prefix_tokens,
            "reasons": [item.reason for item in summary.shortfalls],
        }

    def begin(self, request: str) -> list[int]:
        return self._answers[request].begin() if request in self._answers else []

    def finish(self, request: str, keep: bool) -> list[str]:
        return self._answers[request].finish(keep) if request in self._answers else []

    def peek(self, request: str) -> list[str]:
        return self._answers[request].peek() if request in self._answers else []

    def release(self, request: str) -> None:
        if request in self._answers:
            answer = self._answers[request]
            answer.agent.call("ReleaseLeases", _SECONDS, request=answer.key, objects=_refs(answer.objects))

    def end_request(self, request: str) -> None:
        self._agents[-1].call("EndRequests", _SECONDS, request_ids=[self._id(request)])

    def fill(self, seed: int, chunks: int) -> list[str]:
        """Stores new text and reads it back."""
        agent, tokens = self._agents[-1], text(seed, chunks * CHUNK)
        write = Write(agent, agent.reserve(tokens))
        write.copy(0)
        write.copy(1)
        if write.objects:
            write.commit()
        self._filled = [*self._filled[-2:], (seed, chunks)]
        return self._read(seed, chunks)

    def review(self) -> list[str]:
        """What the texts of the last fills read like now."""
        return [outcome for filled in self._filled for outcome in self._read(*filled)]

    def _read(self, seed: int, chunks: int) -> list[str]:
        self.lookup("fill", text(seed, chunks * CHUNK))
        found = self.peek("fill")
        self.end_request("fill")
        return found


def main() -> None:
    client = Client(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    for line in sys.stdin:
        name, arguments = json.loads(line)
        command: Callable[..., Any] = getattr(client, name)
        try:
            answer = {"value": command(*arguments)}
        except grpc.RpcError as error:
            answer = {"error": reason_of(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
