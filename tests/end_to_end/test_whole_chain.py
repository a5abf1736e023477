"""Engine, agent, store and matcher together, as processes, with a tiny random model that has BOS."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tiny_llama import BOS, VOCABULARY, tiny_model

from cli.local import LocalServices
from kvblend import KvblendClient
from kvblend.blend import Source
from kvblend.engines.answer import Answer
from kvblend.engines.transformers import TransformersEngine
from kvblend.v1 import common_pb2 as pb

PREFIX = np.array([BOS, 5, 6, 7], dtype=np.uint32)
SERVICES = ("matcher", "store", "agent")


def text(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCABULARY, length).astype(np.uint32)


def prompt_of(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([PREFIX, *parts, text(99, 9)])


@pytest.fixture(scope="module")
def services() -> Iterator[LocalServices]:
    with LocalServices(arena_bytes=64 << 20, chunk_tokens=16) as running:
        yield running


class Engines:
    """Engines on the shared services; closed at the end of a test, whose texts are then forgotten."""

    def __init__(self, services: LocalServices) -> None:
        self._services = services
        self._open: list[tuple[TransformersEngine, KvblendClient]] = []

    def __call__(self, **options: object) -> TransformersEngine:
        client = KvblendClient(self._services.agent_target, f"engine-{len(self._open)}")
        engine = TransformersEngine(tiny_model(), client, max_tokens=512, name="tiny", **options)
        self._open.append((engine, client))
        return engine

    def clear(self) -> pb.ClearScope:
        scope = pb.ClearScope(everything=True)
        self._open[0][1].clear(scope, force=True)
        return scope

    def close(self) -> None:
        for engine, client in self._open:
            engine.close()
            client.close()


@pytest.fixture
def engines(services: LocalServices) -> Iterator[Engines]:
    services.wait_ready()
    made = Engines(services)
    yield made
    made.clear()
    made.close()


def reused(answer: Answer) -> int:
    return answer.count(Source.PREFIX) + answer.count(Source.SEGMENT) + answer.count(Source.RECOMPUTED)


def same_as_full(engine: TransformersEngine, prompt: np.ndarray, answer: Answer) -> bool:
    full = engine.full_prefill(prompt, 8, question_tokens=4)
    return full.tokens.tolist() == answer.tokens.tolist() and bool(
        torch.allclose(full.logits, answer.logits, atol=2e-3)
    )


def ask(engine: TransformersEngine, prompt: np.ndarray, **options: object) -> Answer:
    return engine.answer(prompt, 8, question_tokens=4, **options)


def eventually(condition: Callable[[], bool], seconds: float = 40.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


def test_documents_in_a_new_order_are_reused_and_with_all_recomputed_exact(engines: Engines) -> None:
    engine = engines()
    documents = [text(n, 70) for n in range(3)]
    for number, document in enumerate(documents):
        assert engine.precompute(document, f"d{number}", context=PREFIX)
    prompt = prompt_of(documents[2], documents[0], documents[1])
    answer = ask(engine, prompt)
    assert answer.count(Source.SEGMENT) + answer.count(Source.RECOMPUTED) == 210
    assert answer.count(Source.RECOMPUTED) == 31
    assert same_as_full(engine, prompt, ask(engine, prompt, recompute=1.0))
    assert sum(answer.count(source) for source in Source) == len(prompt)


def test_a_stored_prompt_is_an_exact_prefix_of_the_next_turn(engines: Engines) -> None:
    engine = engines()
    prompt = prompt_of(text(1, 60))
    assert engine.store_prompt(prompt)
    longer = np.concatenate([prompt, text(2, 20)])
    answer = ask(engine, longer)
    assert answer.count(Source.PREFIX) == len(prompt)
    assert answer.count(Source.SEGMENT) == 0
    assert same_as_full(engine, longer, answer)


def test_case_70_what_was_stored_is_found_by_the_very_next_lookup(engines: Engines) -> None:
    engine = engines()
    missed = 0
    for number in range(40):
        document = text(1000 + number, 48)
        engine.precompute(document, f"d{number}", context=PREFIX)
        missed += reused(ask(engine, prompt_of(text(2000, 8), document))) < 48
    assert missed == 0


def other_tenant(document: np.ndarray, store: Callable[..., object], engines: Engines) -> Answer:
    engine = engines()
    store(engine, tenant="a")
    return ask(engine, prompt_of(document), tenant="b")


def other_salt(document: np.ndarray, store: Callable[..., object], engines: Engines) -> Answer:
    engine = engines()
    store(engine, cache_salt=b"a")
    return ask(engine, prompt_of(document), cache_salt=b"b")


def other_epoch(document: np.ndarray, store: Callable[..., object], engines: Engines) -> Answer:
    store(engines(weights_epoch=1))
    return ask(engines(weights_epoch=2), prompt_of(document))


def other_numerics(document: np.ndarray, store: Callable[..., object], engines: Engines) -> Answer:
    store(engines(numerics="a"))
    return ask(engines(numerics="b"), prompt_of(document))


@pytest.mark.parametrize("kind", ["document", "prompt"])
@pytest.mark.parametrize("differs", [other_tenant, other_salt, other_epoch, other_numerics])
def test_case_43_spaces_never_answer_each_other(engines: Engines, differs: Callable[..., Answer], kind: str) -> None:
    document = text(3, 64)

    def store(engine: TransformersEngine, **options: object) -> None:
        if kind == "document":
            assert engine.precompute(document, "d", context=PREFIX, **options)
        else:
            assert engine.store_prompt(prompt_of(document), **options)
        # The text is there, for whoever it belongs to.
        assert reused(ask(engine, prompt_of(document), **options)) >= 64

    assert reused(differs(document, store, engines)) == 0


def test_case_44_an_adapter_has_its_own_space(services: LocalServices, engines: Engines) -> None:
    engine = engines()
    prompt = prompt_of(text(4, 64))
    assert engine.store_prompt(prompt)
    client = KvblendClient(services.agent_target, "engine-0")
    try:
        plain = client.lookup(prompt, "plain")
        adapted = client.lookup(prompt, "adapted", adapter_digest=b"\x01" * 32)
        assert (plain.prefix_tokens > 0, adapted.covered_tokens) == (True, 0)
    finally:
        client.end_session("plain")
        client.end_session("adapted")
        client.close()


@pytest.mark.parametrize("context", [np.zeros(0, dtype=np.uint32), np.array([BOS, 9, 9], dtype=np.uint32)])
def test_a_document_behind_another_context_is_no_exact_prefix(engines: Engines, context: np.ndarray) -> None:
    """Alone, or behind another beginning: its KV is not what this prompt would give, so it is only a segment."""
    engine = engines()
    document = np.concatenate([PREFIX, text(5, 60)]) if not len(context) else text(5, 60)
    assert engine.precompute(document, "d", context=context)
    prompt = document if not len(context) else prompt_of(document)
    answer = ask(engine, np.concatenate([prompt, text(6, 10)]))
    assert answer.lookup is not None
    assert answer.lookup.prefix_tokens == 0
    assert answer.lookup.covered_tokens >= 60


@pytest.mark.parametrize("service", SERVICES)
def test_case_72_a_killed_service_loses_no_answer_and_comes_back_without_the_engine(
    services: LocalServices, engines: Engines, service: str
) -> None:
    engine = engines()
    documents = [text(10 + n, 64) for n in range(3)]
    for number, document in enumerate(documents):
        assert engine.precompute(document, f"d{number}", context=PREFIX)
    prompt = prompt_of(*documents)
    assert reused(ask(engine, prompt)) == 192
    services.kill(service, restart=False)
    while_down = ask(engine, prompt)
    assert while_down.lookup is not None
    if service == "matcher":
        assert while_down.count(Source.SEGMENT) + while_down.count(Source.RECOMPUTED) == 0
        assert "MATCHER_UNAVAILABLE" in {s.reason for s in while_down.lookup.shortfalls}
    else:
        assert reused(while_down) == 0
    assert same_as_full(engine, prompt, while_down)
    services.start(service)
    services.wait_ready()
    assert eventually(lambda: reused(ask(engine, prompt)) == 192)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_killed_between_any_two_prompts_changes_no_answer(
    services: LocalServices, engines: Engines, service: str
) -> None:
    """With everything recomputed, an answer that differs from full prefill could only come from wrong KV."""
    engine = engines()
    documents = [text(20 + n, 64) for n in range(3)]
    for number, document in enumerate(documents):
        engine.precompute(document, f"d{number}", context=PREFIX)
    for turn in range(6):
        prompt = prompt_of(*np.roll(documents, turn, axis=0))
        if turn in (1, 3):
            services.kill(service)
        assert same_as_full(engine, prompt, ask(engine, prompt, recompute=1.0))
    services.wait_ready()


def test_case_1_3_ending_a_request_gives_its_leases_back_at_any_time(services: LocalServices, engines: Engines) -> None:
    engine = engines()
    prompt = prompt_of(text(30, 64))
    engine.store_prompt(prompt)
    client = KvblendClient(services.agent_target, "engine-0")
    try:
        assert client.end_session("r")
        assert client.lookup(prompt, "r").prefix_tokens > 0
        assert eventually(lambda: client.ping().oldest_lease_ms > 0)
        assert client.end_session("r")
        assert client.end_session("r")
        assert not client.retrieve("r").written
        # Within 100 ms of the end.
        assert eventually(lambda: client.clear(pb.ClearScope(everything=True)).kept_leased_chunks == 0)
    finally:
        client.close()


def test_case_40_what_is_cleared_is_nowhere_any_more(engines: Engines) -> None:
    engine = engines()
    document = text(40, 64)
    engine.precompute(document, "d", context=PREFIX)
    assert reused(ask(engine, prompt_of(document))) == 64
    engines.clear()
    assert reused(ask(engine, prompt_of(document))) == 0


def test_one_document_can_be_deleted_by_name(services: LocalServices, engines: Engines) -> None:
    engine = engines()
    kept, deleted = text(50, 64), text(51, 64)
    engine.precompute(kept, "kept", context=PREFIX)
    engine.precompute(deleted, "deleted", context=PREFIX)
    client = KvblendClient(services.agent_target, "other")
    try:
        scope = pb.ClearScope(document=pb.DocumentScope(tenant="default", document="deleted"))
        assert client.clear(scope).removed_chunks == 4
    finally:
        client.close()
    assert reused(ask(engine, prompt_of(kept, deleted))) == 64
