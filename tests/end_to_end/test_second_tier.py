"""A real Redis or Valkey behind two stores in turn: what the first one kept serves the second."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from redis_server import RedisServer
from tiny_llama import tiny_model

from cli.local import LocalServices
from kvblend import KvblendClient
from kvblend.blend import Source
from kvblend.engines.answer import Answer
from kvblend.engines.transformers import TransformersEngine

PROMPT = np.random.default_rng(7).integers(2, 200, 96).astype(np.uint32)
LONGER = np.concatenate([PROMPT, PROMPT[:9]])


@pytest.fixture
def redis(shm_dir: Path) -> Iterator[RedisServer]:
    server = RedisServer(shm_dir)
    server.start()
    yield server
    server.kill()


def answer_with(target: str, *, store: bool) -> tuple[Answer, Answer]:
    """LONGER through a fresh engine, and by full prefill; `store` keeps PROMPT first."""
    client = KvblendClient(target, "engine")
    engine = TransformersEngine(tiny_model(), client, max_tokens=256)
    try:
        if store:
            assert engine.store_prompt(PROMPT)
        return engine.answer(LONGER, 8), engine.full_prefill(LONGER, 8)
    finally:
        engine.close()
        client.close()


def test_case_58_text_outlives_its_store_in_the_second_tier(redis: RedisServer) -> None:
    with LocalServices(arena_bytes=32 << 20, chunk_tokens=16, redis_url=redis.unix_url) as first:
        stored, _ = answer_with(first.agent_target, store=True)
        assert stored.count(Source.PREFIX) == len(PROMPT)
    # The arena is gone with its store; only Redis is left, and another store asks it.
    with LocalServices(arena_bytes=32 << 20, chunk_tokens=16, redis_url=redis.tcp_url) as second:
        answer, full = answer_with(second.agent_target, store=False)
    assert answer.lookup is not None
    assert answer.lookup.l2_chunks > 0
    assert answer.count(Source.PREFIX) == len(PROMPT)
    assert answer.tokens.tolist() == full.tokens.tolist()


def test_case_69_a_second_tier_that_is_away_costs_no_answer(redis: RedisServer) -> None:
    redis.kill()
    with LocalServices(arena_bytes=32 << 20, chunk_tokens=16, redis_url=redis.unix_url) as services:
        answer, full = answer_with(services.agent_target, store=True)
    assert answer.count(Source.PREFIX) == len(PROMPT)
    assert answer.tokens.tolist() == full.tokens.tolist()
