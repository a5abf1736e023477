"""The lifecycle of a chunk as a state machine over a real store process and real clients that map its arena.

Clients are stopped, continued and killed in the middle of copies and calls, the store is killed at every failpoint
and started again, leases and reservations run out. Every object has known bytes, so every read says whether it got
what its key must contain. In the end nothing may be left: no lease, no reserved or quarantined block, no used byte.

KVBLEND_LIFECYCLE_EXAMPLES makes it a long soak.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
import pytest
from broken_store import FAULTS
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from lifecycle_kit import ClientProcess, World
from store_kit import CHUNK, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.arena_format import BlockState, open_catalog

RESERVATION_SECONDS = 0.25
LEASE_SECONDS = 0.3
# By then the store has noticed: it looks every 0.2 s.
PAUSE_SECONDS = 0.5
FLAGS = ["--reservation-ttl-seconds", str(RESERVATION_SECONDS), "--lease-ttl-seconds", str(LEASE_SECONDS)]
FLAGS += ["--session-grace-seconds", "0.2", "--evict-above", "1"]
TENANTS = ["a", "a", "b"]
_HEAD = text(1, CHUNK)
TEXTS = [_HEAD + text(2, CHUNK), _HEAD + text(3, CHUNK + 5), text(5, 3 * CHUNK)]
# Where a store can die while it serves, and while it starts.
POINTS = [
    "reserve.chunk",
    "reserve.answer",
    "header.reserved",
    "header.freed",
    "meta.write",
    "commit.state",
    "commit.visible",
    "commit.answer",
    "quarantine.state",
    "evict.chunk",
    "copy.begin",
    "copy.end",
    "recovery.header",
    "recovery.object",
]
# What a client may be told when nothing is wrong but its own session or request.
REFUSALS = {"UNKNOWN_SESSION", "UNKNOWN_RESERVATION", "SUPERSEDED"}

# (tenant, domain, chain hash, group)
Name = tuple[str, int, str, int]

clients = st.integers(0, len(TENANTS) - 1)
texts = st.integers(0, len(TEXTS) - 1)
requests = st.sampled_from(["r1", "r2"])
writes = st.integers(0, 3)
# Names of the machine's methods, and their arguments. One rule takes from all: Hypothesis would switch rules off.
STEPS = st.one_of(
    st.tuples(st.just("reserve"), clients, texts),
    st.tuples(st.just("copy"), writes, st.integers(0, 1)),
    st.tuples(st.just("commit"), writes),
    st.tuples(st.just("commit"), writes),
    st.tuples(st.just("abort"), writes),
    st.tuples(st.just("fill"), clients, st.sampled_from([1, 4, 12, 20])),
    st.tuples(st.just("review"), clients),
    st.tuples(st.just("look_up"), clients, requests, texts),
    st.tuples(st.just("look_up"), clients, requests, texts),
    st.tuples(st.just("begin"), clients, requests),
    st.tuples(st.just("finish"), clients, requests, st.booleans()),
    st.tuples(st.just("peek"), clients, requests),
    st.tuples(st.just("give_back"), clients, requests, st.sampled_from(["release", "end_request"])),
    st.tuples(st.just("stop"), clients),
    st.tuples(st.just("go_on"), clients),
    st.tuples(st.just("go_on"), clients),
    st.tuples(st.just("kill"), clients),
    st.tuples(
        st.just("interrupt"),
        clients,
        texts,
        st.sampled_from(["reserve", "fill", "lookup", "begin", "finish"]),
        st.floats(0, 4),
        st.booleans(),
    ),
    st.tuples(st.just("reconnect"), clients),
    st.tuples(st.just("drain"), clients),
    st.tuples(st.just("crash"), st.sampled_from(POINTS), st.integers(1, 6)),
    st.tuples(st.just("clear"), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([0.05, PAUSE_SECONDS])),
    st.tuples(st.just("write_late"), clients, clients, texts, st.booleans()),
    st.tuples(st.just("read_slowly"), clients, clients, texts, st.booleans(), st.booleans()),
)


@dataclass(eq=False)
class Write:
    client: ClientProcess
    number: int
    names: list[Name]
    # The store's epoch, and the moments between which the reservation was made.
    epoch: int
    before: float
    after: float


class LifecycleMachine(RuleBasedStateMachine):
    world: ClassVar[World]
    # Numbers that are never used twice.
    used: ClassVar[int] = 1000

    def __init__(self) -> None:
        super().__init__()
        # Acknowledged, so it must be served; and what else may be.
        self.committed: set[Name] = set()
        self.possible: set[Name] = set()
        # Chain hashes of texts.
        self.chains: dict[tuple[str, int], list[str]] = {}
        self.writes: list[Write] = []
        self.evicted = self.world.stats().evicted_chunks

    @classmethod
    def fresh(cls) -> int:
        LifecycleMachine.used += 1
        return LifecycleMachine.used

    @rule(step=STEPS)
    def step(self, step: tuple[Any, ...]) -> None:
        name, *arguments = step
        if name in ("copy", "commit", "abort"):
            if not self.writes:
                return
            place = arguments[0] % len(self.writes)
            arguments[0] = self.writes[place] if name == "copy" else self.writes.pop(place)
        made = getattr(self, name)(*arguments)
        if isinstance(made, Write):
            self.writes.append(made)

    # Calls.

    def ready(self, index: int) -> ClientProcess | None:
        """A client with a session of the store as it is now; None while it is stopped."""
        client = self.world.client(index)
        if client.stopped:
            return None
        while client.epoch != self.world.epoch:
            epoch, error = client.call("open")
            client.epoch = epoch or 0
            self.look_after(error)
        return client

    def do(self, client: ClientProcess, name: str, *arguments: Any) -> Any:
        """What the client answers; None if it was refused or the store died."""
        value, error = client.call(name, *arguments)
        self.look_after(error)
        return value

    def went_on(self, client: ClientProcess, error: str) -> None:
        """A client that was stopped has news; the store that it talked to may be long dead."""
        self.look_after(error if client.epoch == self.world.epoch else "")

    def look_after(self, error: str) -> None:
        """Whatever has an error that is no refusal has it because the store died."""
        store = self.world.store
        if error and error not in REFUSALS:
            assert store.process is not None
            with suppress(subprocess.TimeoutExpired):
                store.process.wait(5)
            assert not store.runs, f"{error} from a store that lives"
        if not store.runs:
            self.died()
            self.world.restart()

    def died(self) -> None:
        """It may have evicted something that nobody has seen."""
        self.doubt()
        self.evicted = 0

    def doubt(self) -> None:
        self.possible |= self.committed
        self.committed.clear()

    def stats(self) -> store_pb2.GetStoreStatsResponse | None:
        """None: the store died of an armed point, and runs again."""
        try:
            return self.world.stats()
        except grpc.RpcError:
            self.look_after("killed")
            return None

    def watch_evictions(self) -> None:
        stats = self.stats()
        if stats is None:
            return
        assert not stats.checksum_failures, "committed bytes are not what was committed"
        if stats.evicted_chunks != self.evicted:
            self.evicted = stats.evicted_chunks
            self.doubt()

    # Writing.

    def reserve(self, index: int, which: int) -> Write:
        """What was granted; perhaps nothing."""
        client = self.ready(index)
        number, epoch, before = self.fresh(), self.world.epoch, time.monotonic()
        value = self.do(client, "reserve", number, TEXTS[which]) if client is not None else None
        self.watch_evictions()
        if client is None or value is None:
            return Write(self.world.client(index), 0, [], 0, 0.0, 0.0)
        self.chains[client.tenant, which] = [chain_hash for _, chain_hash, _ in value["chunks"]]
        for domain, chain_hash, outcome in value["chunks"]:
            if outcome == store_pb2.CHUNK_OUTCOME_PRESENT:
                assert (client.tenant, domain, chain_hash, 0) in self.possible | self.committed
        return Write(client, number, self.named(client, value["names"]), epoch, before, time.monotonic())

    @staticmethod
    def named(client: ClientProcess, names: list[list[Any]]) -> list[Name]:
        return [(client.tenant, *name) for name in names]

    def copy(self, write: Write, half: int) -> None:
        """Also of a write that has expired long ago. A stopped client copies when it goes on."""
        if write.number and write.client.alive:
            write.client.post(lambda *_: None, "copy", write.number, half)
            if not write.client.stopped:
                write.client.settle()

    def commit(self, write: Write) -> None:
        client = write.client
        if not write.number or not client.alive:
            return
        asked = time.monotonic()
        late = asked > write.after + RESERVATION_SECONDS or write.epoch != self.world.epoch
        self.possible.update(() if late else write.names)

        def answered(reasons: list[int] | None, error: str) -> None:
            self.went_on(client, error)
            if not reasons:
                return
            good = {name for name, reason in zip(write.names, reasons, strict=True) if not reason}
            assert not (late and good), "a late commit was accepted"
            known = self.possible & good
            self.possible -= known
            self.committed |= known
            early = time.monotonic() < write.before + RESERVATION_SECONDS and write.epoch == self.world.epoch
            if early and client.epoch == write.epoch:
                assert pb.REASON_RESERVATION_EXPIRED not in reasons, "expired before its time"

        client.post(answered, "commit", write.number)
        if not client.stopped:
            client.settle()

    def abort(self, write: Write) -> None:
        if write.number and write.client.alive and not write.client.stopped:
            self.do(write.client, "abort", write.number)

    def fill(self, index: int, chunks: int) -> None:
        """New text, which needs room; and it is read back."""
        client = self.ready(index)
        if client is not None:
            reads = self.do(client, "fill", self.fresh(), chunks)
            self.check_reads(reads or [])
            self.watch_evictions()

    def review(self, index: int) -> None:
        client = self.ready(index)
        if client is not None:
            self.check_reads(self.do(client, "review") or [])

    # Reading.

    def look_up(self, index: int, request: str, which: int) -> None:
        client = self.ready(index)
        found = self.do(client, "lookup", request, TEXTS[which]) if client is not None else None
        if client is None or found is None:
            return
        names = self.named(client, found["names"])
        assert self.committed | self.possible >= set(names), "served what nobody committed, or what was cleared"
        chain = self.chains.get((client.tenant, which), [])
        wanted = {(client.tenant, pb.DOMAIN_EXACT, item, group) for item in chain for group in (0, 1)}
        if found["prefix"] < len(TEXTS[which]) and pb.REASON_QUOTA not in found["reasons"]:
            # A call of a client that was killed may have been carried out meanwhile.
            self.watch_evictions()
            assert not wanted or not wanted <= self.committed, "lost what was acknowledged"

    def begin(self, index: int, request: str) -> None:
        client = self.ready(index)
        if client is not None:
            self.do(client, "begin", request)

    def finish(self, index: int, request: str, keep: bool) -> None:
        client = self.ready(index)
        if client is not None:
            self.check_reads(self.do(client, "finish", request, keep) or [])

    def peek(self, index: int, request: str) -> None:
        """Reads without a lease: it must notice whether the block is another's."""
        client = self.ready(index)
        if client is not None:
            reads = self.do(client, "peek", request) or []
            assert "wrong" not in reads, "wrong KV under the same generation"

    @staticmethod
    def check_reads(reads: list[str]) -> None:
        assert "wrong" not in reads, "wrong KV"
        assert "stale" not in reads, "a block was taken away while it was leased"

    def give_back(self, index: int, request: str, how: str) -> None:
        client = self.ready(index)
        if client is not None:
            self.do(client, how, request)

    # Faults.

    def stop(self, index: int) -> None:
        client = self.ready(index)
        if client is not None:
            client.stop()

    def go_on(self, index: int) -> None:
        client = self.world.client(index)
        if client.stopped:
            client.go_on()
            client.settle()
            self.watch_evictions()

    def kill(self, index: int) -> None:
        self.world.client(index).kill()

    def interrupt(self, index: int, which: int, command: str, milliseconds: float, killed: bool) -> None:
        """The client is stopped or killed somewhere in the middle of a call."""
        client = self.ready(index)
        if client is None:
            return
        arguments: dict[str, list[Any]] = {
            "reserve": [self.fresh(), TEXTS[which]],
            "fill": [self.fresh(), 8],
            "lookup": ["r1", TEXTS[which]],
            "begin": ["r1"],
            "finish": ["r1", False],
        }
        self.doubt()
        client.post(lambda _, error: self.went_on(client, error), command, *arguments[command])
        time.sleep(milliseconds / 1e3)
        if killed:
            client.kill()
        else:
            client.stop()
        self.watch_evictions()

    def reconnect(self, index: int) -> None:
        """Its stream breaks for longer than the grace; its copies go on."""
        client = self.ready(index)
        if client is not None:
            self.do(client, "disconnect")
            client.epoch = 0

    def drain(self, index: int) -> None:
        client = self.ready(index)
        if client is not None:
            self.do(client, "drain")

    def crash(self, point: str, passage: int) -> None:
        """The store is killed now, and once more when it passes this point."""
        self.world.restart(f"{point}=kill@{passage}")
        self.evicted = 0

    def clear(self, force: bool) -> None:
        try:
            self.world.clear(pb.ClearScope(everything=True), force)
        except grpc.RpcError:
            self.look_after("killed")
            self.doubt()
            return
        if not force:
            self.doubt()
        self.committed.clear()
        self.possible = set() if force else self.possible

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
        self.look_after("")

    # Whole stories, which single steps seldom make.

    def write_late(self, writer: int, other: int, which: int, stopped: bool) -> None:
        """Half a copy, a pause beyond every limit while others write, then the other half and a commit."""
        write = self.reserve(writer, which)
        if writer == other or not write.names:
            return
        self.copy(write, 0)
        if stopped:
            write.client.stop()
        self.wait(PAUSE_SECONDS)
        self.fill(other, 20)
        self.copy(write, 1)
        self.go_on(writer)
        self.review(other)
        self.commit(write)
        self.fill(other, 4)

    def read_slowly(self, reader: int, other: int, which: int, forced: bool, keep: bool) -> None:
        """Half a copy, then everything happens that could take the block away, then the other half."""
        self.commit(self.reserve(reader, which))
        self.look_up(reader, "r1", which)
        self.begin(reader, "r1")
        if forced:
            self.clear(True)
        self.fill(other, 20)
        self.fill(other, 20)
        self.finish(reader, "r1", keep)
        self.fill(other, 20)
        self.peek(reader, "r1")

    # The end.

    def teardown(self) -> None:
        failed = sys.exc_info()[0] is not None
        try:
            if not failed:
                self.end()
        except AssertionError:
            failed = True
            raise
        finally:
            self.world.failures += failed
            for client in self.world.clients():
                if client.stopped:
                    client.kill()

    def end(self) -> None:
        """Everybody ends in an orderly way or is dead: nothing may be left."""
        world = self.world
        for index in range(len(TENANTS)):
            self.go_on(index)
        world.client(2).kill()
        for index in range(2):
            client = self.ready(index)
            while client is not None and client.call("quiet")[1]:
                # An armed point struck.
                self.look_after("killed")
                client = self.ready(index)
        limit = time.monotonic() + 20
        while left := self.leftovers():
            assert time.monotonic() < limit, f"left behind: {left}"
            time.sleep(0.05)
        world.restart()
        world.clear(pb.ClearScope(everything=True), True)
        assert not world.stats().tiers[0].used_bytes
        with open_catalog(world.store.arena) as catalog:
            assert {catalog.state(header) for header in range(catalog.header_count)} == {BlockState.FREE}

    def leftovers(self) -> dict[str, int]:
        stats = self.stats()
        if stats is None:
            return {"unknown": 1}
        found = {
            "held": stats.held_leases,
            "busy": stats.busy_leases,
            "reserved": stats.reserved_bytes,
            "quarantined": stats.quarantined_bytes,
        }
        return {name: count for name, count in found.items() if count}


LIMITS = settings(
    max_examples=int(os.environ.get("KVBLEND_LIFECYCLE_EXAMPLES", "16")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="KVBLEND_LIFECYCLE_EXAMPLES" not in os.environ,
    database=None,
    phases=[Phase.generate],
    print_blob=False,
    report_multiple_bugs=False,
)


@contextmanager
def machine(kind: str = "store") -> Iterator[type[LifecycleMachine]]:
    """The machine over a store of its own."""
    world = World(TENANTS, *FLAGS, kind=kind)
    try:
        yield type("Machine", (LifecycleMachine,), {"world": world})
    finally:
        world.close()


def test_no_order_of_steps_and_faults_gives_wrong_bytes_or_leaves_anything() -> None:
    with machine() as kind:
        run_state_machine_as_test(kind, settings=LIMITS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_store_is_seen(fault: str) -> None:
    with machine(fault) as kind:
        # Processes have a pace of their own: the same steps need not fail again.
        with suppress(AssertionError, Flaky):
            run_state_machine_as_test(kind, settings=settings(LIMITS, max_examples=40))
        assert kind.world.failures
