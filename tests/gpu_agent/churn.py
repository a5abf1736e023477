"""Engines that come, store, retrieve and are killed in the middle of it, at random, while agent and store are stopped
and killed now and then. Every engine looks at every byte; in the end nothing may be left of any of them.
"""

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from churn_engine import CALL_SECONDS, SHAPE
from processes import Stack

from kvblend.client import KvblendClient
from kvblend.v1 import agent_pb2, agent_pb2_grpc
from kvblend.v1 import common_pb2 as common

PROGRAM = Path(__file__).with_name("churn_engine.py")
ENGINES = 4
TEXTS = 60
ANSWER_SECONDS = 60.0
SETTLE_SECONDS = 60.0
# Channels that are about to close.
SPARE_DESCRIPTORS = 3


class EngineProcess:
    """Asked for one thing at a time; it works at it until somebody looks at the answer, or kills it."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._fd = os.pidfd_open(pid)
        self._asked = ""
        # As its last answer has it.
        self.registered, self.unsure = True, False

    def ask(self, verb: str, **arguments: Any) -> None:
        assert not self._asked
        self._asked = verb
        self._channel.send(json.dumps([verb, arguments]).encode())

    def answer(self) -> tuple[str, dict[str, Any]] | None:
        """(verb, what it says); None if nothing was asked."""
        if not self._asked:
            return None
        verb, self._asked = self._asked, ""
        assert select.select([self._channel], [], [], ANSWER_SECONDS)[0], f"an engine does not end {verb}"
        message = self._channel.recv(1 << 16)
        assert message, f"an engine died of {verb}"
        return verb, json.loads(message)

    def works(self) -> bool:
        return bool(self._asked) and not select.select([self._channel], [], [], 0)[0]

    def kill(self) -> None:
        signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """By itself, as nobody speaks to it any more."""
        self._channel.close()
        assert select.select([self._fd], [], [], ANSWER_SECONDS)[0], "an engine does not end"
        os.close(self._fd)


class EngineMaker:
    """The process that forks engines for the agent of `stack`."""

    def __init__(self, stack: Stack, device: str, directory: Path) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(PROGRAM), str(theirs.fileno()), device, stack.target("agent"), str(directory)]
        with stack.log("engines").open("ab") as log:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=log, stderr=log)
        theirs.close()

    def engine(self) -> EngineProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(self._channel, [b"fork"], [theirs.fileno()])
        theirs.close()
        return EngineProcess(int(self._channel.recv(16)), ours)

    def close(self) -> None:
        self._channel.close()
        self._process.wait(30)


class Churn:
    """`free_bytes` of the device that engines' memory is on. Agent and store of `stack` run."""

    def __init__(
        self, stack: Stack, device: str, directory: Path, restart: Callable[[], None], free_bytes: Callable[[], int]
    ) -> None:
        self._stack = stack
        self._directory = directory
        self._restart_agent = restart
        self._free_bytes = free_bytes
        self._maker = EngineMaker(stack, device, directory)
        self._engines: list[EngineProcess] = []
        # (tokens, how many of context it was stored behind)
        self._texts: list[tuple[list[int], int]] = []
        self._number = 0
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._baseline: dict[str, int] = {}

    def run(self, cycles: int, seed: int) -> None:
        self._warm_up()
        self._settle()
        self._baseline = self._held()
        self._random = random.Random(seed)
        began = time.monotonic()
        verbs = [self._step, self._kill_at_work, self._leave, self._kill_agent, self._kill_store, self._stop]
        for cycle in range(1, cycles + 1):
            self._random.choices(verbs, (100, 12, 5, 1, 1, 2))[0]()
            if cycle % 100 == 0 or cycle == cycles:
                passed = f"{cycle} cycles in {time.monotonic() - began:.0f} s"
                print(f"{passed}: {dict(self.counts)}, failed: {dict(self.reasons)}", flush=True)

    def check_nothing_is_left(self) -> None:
        for engine in list(self._engines):
            self._remove(engine, kill=self._random.random() < 0.5)
        self._settle()
        held, baseline = self._held(), self._baseline
        print(f"held in the end: {held}; in the beginning: {baseline}")
        for name in ("agent descriptors", "store descriptors"):
            assert held.pop(name) <= baseline[name] + SPARE_DESCRIPTORS, name
        assert held == {name: value for name, value in baseline.items() if name in held}

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()
        self._maker.close()

    # What may happen

    def _step(self) -> None:
        """One thing by one engine; others may be at work meanwhile."""
        if (len(self._engines) < ENGINES and self._random.random() < 0.4) or not self._engines:
            self._engines.append(self._maker.engine())
            self._engines[-1].ask("register")
            self.counts["register"] += 1
            return
        engine = self._random.choice(self._engines)
        self._collect(engine)
        if engine.unsure:
            self._remove(engine, kill=True)
            self.counts["unsure"] += 1
        else:
            self._ask(engine)

    def _ask(self, engine: EngineProcess) -> None:
        verb = self._random.choices(("store", "retrieve", "lookup", "unregister", "register"), (30, 45, 4, 2, 2))[0]
        if not engine.registered:
            verb, arguments = "register", {}
        elif verb == "store" or not self._texts:
            verb, arguments = "store", self._text_to_store()
        elif verb in ("retrieve", "lookup"):
            arguments = {"tokens": self._prompt()}
        else:
            arguments = {}
        if verb in ("store", "retrieve"):
            arguments["blocks"] = self._random.sample(range(SHAPE.blocks), SHAPE.blocks)
        if arguments:
            self._number += 1
            arguments["name"] = f"r{self._number}"
        engine.ask(verb, **arguments)
        self.counts[verb] += 1

    def _text_to_store(self) -> dict[str, Any]:
        """A new one, or one that somebody has stored already; the oldest are never heard of again."""
        if self._texts and self._random.random() < 0.3:
            tokens, first = self._random.choice(self._texts)
        else:
            tokens = [self._random.randrange(50_000) for _ in range(self._random.randrange(10, 220))]
            first = self._random.choice((0, 1, 1, 5))
            self._texts = [*self._texts[1 - TEXTS :], (tokens, first)]
        return {"tokens": tokens, "first": first}

    def _prompt(self) -> list[int]:
        """Begins with a prompt that was stored; or has some of what was stored behind other text."""
        tokens, first = self._random.choice(self._texts)
        front = [self._random.randrange(60_000, 70_000) for _ in range(self._random.randrange(1, 60) if first else 0)]
        return [*front, *tokens, 70_001, 70_002]

    def _kill_at_work(self) -> None:
        if self._engines:
            engine = self._random.choice(self._engines)
            self._collect(engine)
            if not engine.unsure:
                self._ask(engine)
            time.sleep(self._random.uniform(0, 0.02))
            self.counts["killed at work"] += engine.works()
            self.counts["killed"] += 1
            self._remove(engine, kill=True)

    def _leave(self) -> None:
        if self._engines:
            self._remove(self._random.choice(self._engines), kill=self._random.random() < 0.3)
            self.counts["left"] += 1

    def _kill_agent(self) -> None:
        self._stack.kill("agent")
        self.counts["agent killed"] += 1
        self._restart_agent()
        self._stack.wait_agent()

    def _kill_store(self) -> None:
        self._stack.kill("store")
        self.counts["store killed"] += 1
        self._stack.start_store()
        self._stack.wait_agent()

    def _stop(self) -> None:
        """While engines are at work; now and then for longer than they wait."""
        self._step()
        time.sleep(self._random.uniform(0, 0.01))
        name = self._random.choice(("agent", "store"))
        seconds = CALL_SECONDS + 1 if self._random.random() < 0.1 else self._random.uniform(0.05, 1.0)
        self._stack.signal(name, signal.SIGSTOP)
        self.counts[f"{name} stopped"] += 1
        time.sleep(seconds)
        self._stack.signal(name, signal.SIGCONT)

    # What becomes of it

    def _collect(self, engine: EngineProcess) -> None:
        answered = engine.answer()
        if answered is None:
            return
        verb, said = answered
        assert not (wrong := said.pop("wrong", "")), (wrong, said)
        if reason := said.pop("failed"):
            self.reasons[f"{verb} {reason}"] += 1
        engine.unsure = said.pop("unsure", False)
        engine.registered = (
            verb != "unregister" and reason != "UNKNOWN_INSTANCE" and not (verb == "register" and reason)
        )
        for name, value in said.items():
            self.counts[f"{name} tokens" if verb == "retrieve" else name] += value

    def _remove(self, engine: EngineProcess, *, kill: bool) -> None:
        if kill:
            engine.kill()
        else:
            self._collect(engine)
            engine.end()
        self._engines.remove(engine)
        # What a killed engine has left in shared memory is its container's to remove.
        for file in self._directory.glob(f"kvblend-{engine.pid}-*"):
            file.unlink()

    def _warm_up(self) -> None:
        """Everything has been done once: an agent then has all that it takes."""
        self._random = random.Random(0)
        engine = self._maker.engine()
        self._engines.append(engine)
        engine.ask("register")
        self._collect(engine)
        assert not self.reasons, self.reasons
        for verb in ("store", "retrieve", "unregister"):
            tokens = [] if verb == "unregister" else list(range(40))
            options = {"name": "warm", "tokens": tokens, "blocks": list(range(SHAPE.blocks))} if tokens else {}
            engine.ask(verb, **options, **({"first": 0} if verb == "store" else {}))
            self._collect(engine)
        assert self.counts["prefix tokens"] == 39, (self.counts, self.reasons)
        self._remove(engine, kill=False)
        self.counts.clear()

    def _settle(self) -> None:
        """Until what the gone ones held is given back; then the arena is cleared."""
        give_up_at = time.monotonic() + SETTLE_SECONDS
        while (left := self._left()) and time.monotonic() < give_up_at:
            time.sleep(0.1)
        assert not left, left
        client = KvblendClient(self._stack.target("agent"), "warden")
        cleared = client.clear(common.ClearScope(everything=True))
        client.close()
        assert cleared, cleared
        assert not cleared.kept_leased_chunks

    def _left(self) -> dict[str, int]:
        """What ends by itself, if anything of it is there."""
        stats = self._stack.stats()
        names = ("held_leases", "busy_leases", "reserved_objects", "reserved_bytes", "quarantined_objects")
        found = {name: getattr(stats, name) for name in (*names, "quarantined_bytes")}
        with grpc.insecure_channel(self._stack.target("agent")) as channel:
            stub: Any = agent_pb2_grpc.AgentServiceStub(channel)
            agent = stub.GetAgentStats(agent_pb2.GetAgentStatsRequest(), timeout=5, wait_for_ready=True)
        found["instances"] = len(agent.instances)
        found["mapped by the agent"] = _mapped_files(self._stack.pid("agent"), self._directory)
        return {name: count for name, count in found.items() if count}

    def _held(self) -> dict[str, int]:
        """What must be as it was in the beginning."""
        time.sleep(1)
        arena = self._stack.stats().arena
        return {
            "arena free": arena.free_bytes,
            "arena other": arena.other_bytes,
            "sessions": len(list(self._stack.directory.glob("arena/sessions/*"))),
            "device free, in 64 MiB": round(self._free_bytes() / (64 << 20)),
            "agent descriptors": _descriptors(self._stack.pid("agent")),
            "store descriptors": _descriptors(self._stack.pid("store")),
        }


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _mapped_files(pid: int, directory: Path) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(f"{directory}/")
