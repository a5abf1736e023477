"""What the matcher keeps in a run_dir, after all services have been started anew with an empty arena."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from redis_server import RedisServer
from tiny_llama import BOS, VOCABULARY, tiny_model

from cli.local import LocalServices
from cli.probe import Peer
from kvblend import KvblendClient
from kvblend.blend import Source
from kvblend.engines.answer import Answer
from kvblend.engines.transformers import TransformersEngine
from kvblend.v1 import matcher_pb2
from services.common.tokens import encode_u32

PREFIX = np.array([BOS, 5, 6, 7], dtype=np.uint32)
DOCUMENT = np.random.default_rng(3).integers(2, VOCABULARY, 64).astype(np.uint32)
PROMPT = np.concatenate(
    [PREFIX, np.random.default_rng(4).integers(2, VOCABULARY, 9).astype(np.uint32), DOCUMENT, PREFIX]
)


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


class Running:
    """Services in a folder, with one engine."""

    def __init__(self, services: LocalServices) -> None:
        self.services = services
        self._client = KvblendClient(services.agent_target, "engine")
        self.engine = TransformersEngine(tiny_model(), self._client, max_tokens=256)
        self._matcher = Peer("matcher", services.matcher_target)

    def close(self) -> None:
        for part in (self.engine, self._client, self._matcher):
            part.close()

    def ask(self) -> Answer:
        return self.engine.answer(PROMPT, 4, recompute=1.0)

    def reused(self) -> int:
        answer = self.ask()
        return answer.count(Source.SEGMENT) + answer.count(Source.RECOMPUTED)

    def _stats(self) -> matcher_pb2.GetMatcherStatsResponse:
        stats: matcher_pb2.GetMatcherStatsResponse = self._matcher.stub.GetMatcherStats(
            matcher_pb2.GetMatcherStatsRequest(), timeout=20, wait_for_ready=True
        )
        return stats

    def matcher_chunks(self) -> int:
        return sum(space.chunks for space in self._stats().spaces)

    def in_second_tier(self) -> int:
        """Tokens of the prompt that L2 could serve, as far as the matcher was told."""
        (space,) = self._stats().spaces
        request = matcher_pb2.ScoreRequest(space_id=space.space_id, tokens=encode_u32(PROMPT), chunk_tokens=16)
        stores = self._matcher.stub.Score(request, timeout=5).stores
        return sum(score.anywhere_tokens for score in stores if score.l2_id)


@contextmanager
def running(run_dir: Path, redis_url: str | None = None) -> Iterator[Running]:
    with LocalServices(run_dir, arena_bytes=32 << 20, chunk_tokens=16, redis_url=redis_url) as services:
        found = Running(services)
        try:
            yield found
        finally:
            found.close()


@pytest.fixture
def redis(shm_dir: Path) -> Iterator[RedisServer]:
    server = RedisServer(shm_dir)
    server.start()
    yield server
    server.kill()


def test_a_killed_matcher_comes_back_with_its_table(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        assert first.engine.precompute(DOCUMENT, "d", context=PREFIX)
        assert eventually(lambda: first.reused() == len(DOCUMENT))
        chunks = first.matcher_chunks()
        assert chunks > 0
        first.services.kill("store", restart=False)
        first.services.kill("matcher")
        first.services.wait_ready()
        # Nobody was there to tell it again.
        assert first.matcher_chunks() == chunks


def test_a_new_arena_takes_nothing_from_what_the_old_one_had(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        assert first.engine.precompute(DOCUMENT, "d", context=PREFIX)
        assert eventually(lambda: first.reused() == len(DOCUMENT))
    with running(tmp_path) as second:
        assert second.reused() == 0
        assert eventually(lambda: second.matcher_chunks() == 0)
        assert second.engine.precompute(DOCUMENT, "d", context=PREFIX)
        assert eventually(lambda: second.reused() == len(DOCUMENT))


def test_documents_in_the_second_tier_are_found_again_without_being_told_anew(
    tmp_path: Path, redis: RedisServer
) -> None:
    with running(tmp_path, redis.unix_url) as first:
        assert first.engine.precompute(DOCUMENT, "d", context=PREFIX)
        assert eventually(lambda: first.reused() == len(DOCUMENT))
        assert eventually(lambda: first.in_second_tier() == len(DOCUMENT))
    with running(tmp_path, redis.unix_url) as second:
        assert eventually(lambda: second.reused() == len(DOCUMENT))
        answer = second.ask()
        full = second.engine.full_prefill(PROMPT, 4)
        assert answer.tokens.tolist() == full.tokens.tolist()
