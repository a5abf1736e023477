"""Transformers engines that start their agent themselves: one of them does, the others find it."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_llama import BOS, VOCABULARY, tiny_model

from cli.local import LocalServices
from kvblend.blend import Source
from kvblend.client import KvblendClient
from kvblend.engines.transformers import TransformersEngine

PREFIX = np.array([BOS, 9, 8, 7], dtype=np.uint32)
DOCUMENT = np.random.default_rng(1).integers(2, VOCABULARY, 96, dtype=np.uint32)
PROMPT = np.concatenate([PREFIX, [5, 6, 7], DOCUMENT, [11, 12]]).astype(np.uint32)


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.1)


def reused(engine: TransformersEngine) -> int:
    """Tokens; the answer is the same in any case."""
    answer = engine.answer(PROMPT, recompute=1.0, question_tokens=2)
    torch.testing.assert_close(
        answer.logits, engine.full_prefill(PROMPT, question_tokens=2).logits, rtol=1e-3, atol=1e-3
    )
    return len(PROMPT) - answer.count(Source.NEW)


def test_an_engine_brings_its_agent_along(shm_dir: Path) -> None:
    def engine() -> TransformersEngine:
        return TransformersEngine.embedded(
            tiny_model(), shm_dir, services.store_target, max_tokens=256, chunk_tokens=16
        )

    with LocalServices(arena_bytes=64 << 20) as services, closing(engine()) as first:
        assert first.agent is not None
        # The agent is not up yet, and nobody waits for it.
        reused(first)
        until(lambda: bool(first.precompute(DOCUMENT, "guide", context=PREFIX)))
        with closing(engine()) as second:
            assert second.agent is not None
            until(lambda: reused(second) > 48)
            assert second.agent.pid is None, "the first one's serves both"
            pid = first.agent.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            until(lambda: first.agent is not None and first.agent.pid not in (None, pid))
            until(lambda: reused(second) > 48)
        target = first.agent.target
    assert not KvblendClient(target, "visitor").ping()


def test_a_model_that_is_refused_leaves_no_agent(shm_dir: Path) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        TransformersEngine.embedded(tiny_model(), shm_dir, "unix:/nowhere", max_tokens=0)
    assert not list(shm_dir.glob("*.sock"))
