"""A store process and lifecycle clients (lifecycle_client.py): commands, signals, and answers that may come late."""

import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from process_kit import StoreProcess
from zygote import Forked, Zygote

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2, store_pb2_grpc
from services.common.arena_format import open_catalog
from services.common.channels import open_channel
from services.common.failpoints import VARIABLE

_SECONDS = 60.0

# What a command came to: (value, "") or (None, the error's reason).
Outcome = tuple[Any, str]
Handler = Callable[[Any, str], None]


class ClientProcess:
    """One lifecycle client. A stopped one reads its commands when it is continued."""

    def __init__(self, zygote: Zygote, store: StoreProcess, tenant: str) -> None:
        theirs, commands = os.pipe()
        self._answers, answers = os.pipe()
        self._process = zygote.fork(["client", str(store.arena), store.target, tenant], theirs, answers, 2)
        os.close(theirs)
        os.close(answers)
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._waiting: deque[Handler] = deque()
        self._unread = b""
        self.tenant = tenant
        self.stopped = False
        self.alive = True
        # The store's epoch that its session belongs to; 0: it needs a new one.
        self.epoch = 0

    def call(self, name: str, *arguments: Any) -> Outcome:
        """The outcome. The client must run, with nothing outstanding."""
        outcomes: list[Outcome] = []
        self.post(lambda *outcome: outcomes.append(outcome), name, *arguments)
        self.settle()
        return outcomes[-1]

    def post(self, handler: Handler, name: str, *arguments: Any) -> None:
        """Sends a command; `handler` gets the outcome when it is read."""
        self._commands.write(json.dumps([name, arguments]).encode() + b"\n")
        self._waiting.append(handler)

    def settle(self) -> None:
        """Reads all outcomes that are outstanding."""
        while self._waiting:
            answer = json.loads(self._line())
            self._waiting.popleft()(answer.get("value"), answer.get("error", ""))

    def _line(self) -> bytes:
        limit = time.monotonic() + _SECONDS
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, limit - time.monotonic()))
            assert readable, "the client does not answer"
            more = os.read(self._answers, 1 << 16)
            assert more, "the client has died"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self.stopped = False

    def kill(self) -> None:
        """Outcomes that are outstanding are never known."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)
        self._commands.close()
        os.close(self._answers)
        self._waiting.clear()
        self.alive = False


class World:
    """A store and its clients, one for each tenant given."""

    def __init__(self, tenants: Sequence[str], *flags: str, kind: str = "store") -> None:
        """`kind`: "store", or a fault of broken_store.py."""
        self._zygote = Zygote()
        self._kind = kind
        self._directory = Path(tempfile.mkdtemp(prefix="kvb-", dir="/dev/shm"))
        self._tenants = tenants
        self._clients: dict[int, ClientProcess] = {}
        self._channel = open_channel(f"unix:{self._directory}/store.sock")
        self._stub: Any = store_pb2_grpc.StoreServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.store = StoreProcess(self._directory, *flags, arena_bytes=1 << 20, slab_bytes=1 << 18, spawn=self._spawn)
        self.epoch = 0
        self.restarts = 0
        # Examples that failed.
        self.failures = 0
        self.restart()

    def _spawn(self, command: list[str], stdout: Any, stderr: Any, env: dict[str, str]) -> Forked:
        arguments = command[command.index("services.store") + 1 :]
        with open(os.devnull) as nothing:
            return self._zygote.fork([self._kind, *arguments], nothing, stdout, stderr, **{VARIABLE: env[VARIABLE]})

    def restart(self, failpoints: str = "") -> None:
        """Kill -9 and a new start; one that dies while it starts is started once more, without failpoints."""
        self.restarts += 1
        self.store.kill()
        self.store.launch(failpoints=failpoints)
        if not self.store.becomes_ready():
            self.store.start()
        with open_catalog(self.store.arena) as catalog:
            self.epoch = catalog.epoch
        self._stub.PingStore(store_pb2.PingStoreRequest(), timeout=20, wait_for_ready=True)

    def client(self, index: int) -> ClientProcess:
        client = self._clients.get(index)
        if client is None or not client.alive:
            client = self._clients[index] = ClientProcess(self._zygote, self.store, self._tenants[index])
        return client

    def clients(self) -> list[ClientProcess]:
        return [client for client in self._clients.values() if client.alive]

    def stats(self) -> store_pb2.GetStoreStatsResponse:
        answer: store_pb2.GetStoreStatsResponse = self._stub.GetStoreStats(store_pb2.GetStoreStatsRequest(), timeout=20)
        return answer

    def clear(self, scope: pb.ClearScope, force: bool) -> None:
        self._stub.Clear(store_pb2.ClearRequest(scope=scope, force=force), timeout=20)

    def close(self) -> None:
        self._channel.close()
        for client in self.clients():
            client.kill()
        self.store.kill()
        self._zygote.close()
        shutil.rmtree(self._directory)
