"""Two nodes, each with its store, agent and engine, behind one Redis and one matcher.

What one computed the other reuses, as a prefix and anywhere, also when the first node is gone.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from redis_server import RedisServer, redis_server
from tiny_llama import BOS, VOCABULARY, tiny_model

from cli.local import LocalServices
from kvblend import KvblendClient
from kvblend.blend import Source
from kvblend.engines.answer import Answer
from kvblend.engines.transformers import TransformersEngine
from kvblend.v1 import store_pb2, store_pb2_grpc

PREFIX = np.array([BOS, 5, 6, 7], dtype=np.uint32)
DOCUMENT_TOKENS = 70
CHUNK = 16


def text(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCABULARY, length).astype(np.uint32)


def prompt_of(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([PREFIX, *parts, text(99, 9)])


def node(redis: RedisServer, name: str, matcher: str = "") -> LocalServices:
    return LocalServices(arena_bytes=32 << 20, chunk_tokens=CHUNK, redis_url=redis.unix_url, name=name, matcher=matcher)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def nodes(redis: RedisServer) -> Iterator[tuple[LocalServices, LocalServices]]:
    """The first has the matcher of both."""
    with node(redis, "one") as first, node(redis, "two", first.matcher_target) as second:
        yield first, second


@contextmanager
def engine_on(services: LocalServices) -> Iterator[TransformersEngine]:
    with ExitStack() as stack:
        client = KvblendClient(services.agent_target, "engine")
        stack.callback(client.close)
        engine = TransformersEngine(tiny_model(), client, max_tokens=512, name="tiny")
        stack.callback(engine.close)
        yield engine


def eventually(condition: Callable[[], bool], seconds: float = 40.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


def segment_tokens(answer: Answer) -> int:
    return answer.count(Source.SEGMENT) + answer.count(Source.RECOMPUTED)


def same_as_full(engine: TransformersEngine, prompt: np.ndarray, answer: Answer) -> bool:
    return answer.tokens.tolist() == engine.full_prefill(prompt, 8).tokens.tolist()


def gone(services: LocalServices) -> None:
    """The node's store and agent, at once and for good; its arena with them."""
    for service in ("store", "agent"):
        services.kill(service, restart=False)


def in_redis(services: LocalServices, chunks: int) -> bool:
    """So many chunks were written there, and the matchers' log knows."""
    with grpc.insecure_channel(services.store_target) as channel:
        stub = store_pb2_grpc.StoreServiceStub(channel)  # type: ignore[no-untyped-call]
        stats = stub.GetStoreStats(store_pb2.GetStoreStatsRequest(), timeout=10)
        return not stats.l2.queued_writes and not stats.outbox_events and stats.l2.written_chunks >= chunks


@pytest.mark.parametrize("first_is", ["alive", "gone"])
def test_two_nodes_share_prefixes_and_documents(nodes: tuple[LocalServices, LocalServices], first_is: str) -> None:
    first, second = nodes
    seed = 100 if first_is == "alive" else 200
    documents = [text(seed + number, DOCUMENT_TOKENS) for number in range(3)]
    prompt = prompt_of(text(seed + 9, 60))
    with engine_on(first) as engine:
        for number, document in enumerate(documents):
            assert engine.precompute(document, f"d{number}", context=PREFIX)
        assert engine.store_prompt(prompt)
        longer = np.concatenate([prompt, text(seed + 10, 20)])
        expected = engine.full_prefill(longer, 8).tokens.tolist()
        chunks = 3 * -(-DOCUMENT_TOKENS // CHUNK) + len(prompt) // CHUNK
        assert eventually(lambda: in_redis(first, chunks))
    if first_is == "gone":
        gone(first)
    with engine_on(second) as engine:
        answer = engine.answer(longer, 8)
        assert answer.lookup is not None
        # L2 finds whole chunks by their hashes; the prompt's last is not whole.
        assert answer.count(Source.PREFIX) == len(prompt) // CHUNK * CHUNK
        assert answer.lookup.l2_chunks > 0
        assert answer.tokens.tolist() == expected
        shuffled = prompt_of(documents[2], documents[0], documents[1])
        assert eventually(lambda: segment_tokens(engine.answer(shuffled, 8)) == 3 * DOCUMENT_TOKENS)
        assert same_as_full(engine, shuffled, engine.answer(shuffled, 8, recompute=1.0))


def test_case_58_what_only_l2_holds_is_found_after_matcher_and_store_were_restarted(redis: RedisServer) -> None:
    """Its claims stand in the log: a store that starts anew voids its own, not those of L2."""
    document = text(300, DOCUMENT_TOKENS)
    with node(redis, "one") as first:
        with engine_on(first) as engine:
            assert engine.precompute(document, "d", context=PREFIX)
            assert eventually(lambda: in_redis(first, -(-DOCUMENT_TOKENS // CHUNK)))
        first.kill("store", restart=False)
        for path in Path(first.plan.arena_dir).glob("*"):
            if path.is_file():
                path.unlink()
        first.kill("matcher", restart=False)
        first.start("matcher")
        first.start("store")
        first.wait_ready()
        with engine_on(first) as engine:
            prompt = prompt_of(text(301, 20), document)
            assert eventually(lambda: segment_tokens(engine.answer(prompt, 8)) == DOCUMENT_TOKENS)
            assert same_as_full(engine, prompt, engine.answer(prompt, 8, recompute=1.0))
