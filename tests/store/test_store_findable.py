"""Nothing that is stored is ever unfindable, nothing that is gone stays findable: the arena against a real matcher.

Two ranks store, forget and evict while store and matcher are killed at every step of publishing. In the end every
chunk in the arena is compared with what the matcher finds, both ways.
"""

import mmap
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from broken_store import PUBLISHING_FAULTS
from process_kit import Agent, StoreProcess
from store_kit import CHUNK, model_space, text
from test_store_neighbours import MatcherProcess
from zygote import Zygote

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc, object_pb2, store_pb2
from services.common.arena_format import (
    HEADER,
    PAGE,
    BlockState,
    catalog_path,
    check_file_header,
    meta_offset,
    slab_path,
)
from services.common.channels import open_channel
from services.common.tokens import encode_u32

RANKS = 2
CLASSES = [pb.CONTEXT_CLASS_ALONE, pb.CONTEXT_CLASS_SHARED_PREFIX, pb.CONTEXT_CLASS_IN_PROMPT]
POINTS = ["outbox.append", "publish.send", "publish.acknowledge", "evict.chunk", "commit.visible", "commit.answer"]

# (domain, chain hash)
Name = tuple[int, bytes]


def objects_in(arena: Path) -> Iterator[tuple[Name, int]]:
    """(chunk, rank) of every committed object, straight from the files."""
    with catalog_path(arena).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as catalog:
        count = int(check_file_header(catalog)["headers"])
        headers = np.frombuffer(catalog[PAGE : PAGE + count * HEADER.itemsize], HEADER)
    for header in headers[headers["state"] == BlockState.COMMITTED]:
        start = int(header["offset"]) + meta_offset(int(header["payload_bytes"]))
        data = slab_path(arena, int(header["slab"])).read_bytes()[start : start + int(header["meta_bytes"])]
        meta = object_pb2.ObjectMeta.FromString(data)
        yield (meta.domain, meta.chain_hash), meta.rank.tensor


class Scene:
    """A store and a matcher that may be killed, an agent for each rank, and all texts that were ever offered."""

    def __init__(self, directory: Path, chance: random.Random, spawn: Callable[..., Any]) -> None:
        self.chance = chance
        self.matcher = MatcherProcess(directory)
        self.store = StoreProcess(
            directory, "--matcher", self.matcher.target, "--reservation-ttl-seconds", "1", arena_bytes=1 << 20,
            slab_bytes=1 << 18,
            spawn=spawn,
        )  # fmt: skip
        self.texts: list[list[int]] = []
        self.agents: list[Agent] = []
        self.deaths = 0
        self.start()

    def start(self, failpoints: str = "") -> None:
        self.close_agents()
        self.store.kill()
        self.store.launch(failpoints=failpoints)
        if not self.store.becomes_ready():
            # It was struck before it served.
            self.store.start()
        self.agents = [Agent(self.store, model=model_space(parallel=RANKS)) for _ in range(RANKS)]

    def close_agents(self) -> None:
        for agent in self.agents:
            agent.close()
        self.agents = []

    def close(self) -> None:
        self.close_agents()
        self.store.kill()
        self.matcher.process.send_signal(signal.SIGCONT)
        self.matcher.kill()

    def orderly(self) -> None:
        self._step([self.put, self.put, self.put_one_rank, self.clear])

    def anything(self) -> None:
        disorder = [self.crash, self.crash, self.crash, self.kill_matcher, self.stop_matcher]
        self._step([self.put] * 12 + [self.put_one_rank, self.clear] + disorder)

    def _step(self, steps: list[Callable[[], None]]) -> None:
        try:
            self.chance.choice(steps)()
        except grpc.RpcError:
            # An armed point struck.
            assert self.store.process is not None
            self.store.process.wait(10)
            self.deaths += 1
            self.start()

    def put(self, ranks: int = RANKS) -> None:
        """Old text or new, as a document or a prompt."""
        if self.texts and self.chance.random() < 0.4:
            number = self.chance.randrange(len(self.texts))
        else:
            number = len(self.texts)
            self.texts.append(text(5000 + number, CHUNK * self.chance.randint(1, 24)))
        document = f"d{number % 5}" if number % 3 else ""
        for rank, agent in enumerate(self.agents[:ranks]):
            agent.put(self.texts[number], document, rank=pb.Rank(tensor=rank))

    def put_one_rank(self) -> None:
        self.put(1)

    def clear(self) -> None:
        scope = pb.DocumentScope(tenant="default", document=f"d{self.chance.randrange(5)}")
        self.agents[0].call("Clear", scope=pb.ClearScope(document=scope), force=True)

    def crash(self) -> None:
        self.deaths += 1
        self.start(f"{self.chance.choice(POINTS)}=kill@{self.chance.randint(1, 12)}")

    def kill_matcher(self) -> None:
        self.matcher.kill()
        self.matcher.restart()

    def stop_matcher(self) -> None:
        self.matcher.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(3):
                self.put()
        finally:
            self.matcher.process.send_signal(signal.SIGCONT)

    # What is there, and what is found.

    def held(self) -> tuple[set[Name], set[Name]]:
        """(chunks of which every rank is there, chunks of which some are)."""
        ranks: dict[Name, set[int]] = defaultdict(set)
        for name, rank in objects_in(self.store.arena):
            ranks[name].add(rank)
        whole = {name for name, found in ranks.items() if len(found) == RANKS}
        return whole, set(ranks) - whole

    def found(self) -> set[Name]:
        stats: store_pb2.GetStoreStatsResponse = self.agents[0].stats()
        names: set[Name] = set()
        with open_channel(self.matcher.target) as channel:
            stub: Any = matcher_pb2_grpc.MatcherServiceStub(channel)  # type: ignore[no-untyped-call]
            for tokens in self.texts:
                request = matcher_pb2.MatchRequest(
                    space_id=stats.spaces[0].space_id,
                    tokens=encode_u32([1, 2, 3, *tokens, 4, 5]),
                    context_classes=CLASSES,
                    store="t",
                    epoch=self.agents[0].hello.arena.epoch,
                    at_least=[stats.position],
                )
                answer: matcher_pb2.MatchResponse = stub.Match(request, timeout=20, wait_for_ready=True)
                names |= _names(answer.segments)
        return names

    def compare(self) -> tuple[set[Name], set[Name]]:
        """What is held, when it is the same as what is found."""
        limit = time.monotonic() + 60
        while True:
            self.wait_until_told()
            whole, partial = self.held()
            found = self.found()
            # The store makes room ahead of need in the background: what left between the two looks is in one of them.
            if self.held() == (whole, partial):
                break
            assert time.monotonic() < limit, "the store never comes to rest"
        assert whole - found == set(), "stored, and cannot be found"
        assert found - whole == set(), "found, and not there"
        return whole, partial

    def wait_until_told(self) -> None:
        """The log has everything: only then may the two be compared."""
        limit = time.monotonic() + 150  # The matcher may have to compile first.
        while True:
            with suppress(grpc.RpcError):
                ping = self.agents[0].call("PingStore")
                stats = self.agents[0].stats()
                publisher = next(item for item in ping.liveness.dependencies if item.name == "publisher")
                if publisher.ready and not stats.outbox_events:
                    return
            assert time.monotonic() < limit, "the log is never in step"
            if not self.store.runs:
                self.start()
            time.sleep(0.05)


def _names(columns: pb.SegmentColumns) -> set[Name]:
    counts = np.frombuffer(columns.chunk_counts, "<u4")
    domains = np.repeat(np.frombuffer(columns.domains, np.uint8), counts)
    hashes = [columns.chain_hashes[at : at + 32] for at in range(0, len(columns.chain_hashes), 32)]
    return set(zip(domains.tolist(), hashes, strict=True))


@contextmanager
def scene(directory: Path, seed: int, kind: str = "store") -> Iterator[Scene]:
    with ExitStack() as stack:
        zygote = Zygote()
        stack.callback(zygote.close)
        made = Scene(directory, random.Random(seed), zygote.spawner(kind))
        stack.callback(made.close)
        # Else a checkpoint would tell the matcher everything, whatever is published.
        made.wait_until_told()
        yield made


def test_what_is_held_is_found_and_nothing_else_whoever_is_killed(shm_dir: Path) -> None:
    with scene(shm_dir, seed=2) as made:
        for _ in range(60):
            made.anything()
        made.agents[0].put(text(4000, CHUNK), "half", rank=pb.Rank(tensor=0))
        made.texts.append(text(4000, CHUNK))
        whole, partial = made.compare()
        assert made.deaths
        assert len(whole) > 30, "something must be left"
        assert partial, "and something incomplete"
        assert sum(len(tokens) // CHUNK for tokens in made.texts) > len(whole | partial), "and something be gone"


@pytest.mark.parametrize("fault", PUBLISHING_FAULTS)
def test_a_store_that_misinforms_its_matchers_is_seen(shm_dir: Path, fault: str) -> None:
    with scene(shm_dir, seed=1, kind=fault) as made:
        for _ in range(40):
            made.orderly()
        with pytest.raises(AssertionError):
            made.compare()
