"""The Transformers engine on a tiny model: what it answers with, without and against a working cache."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fake_client import FakeClient
from tiny_llama import BOS, VOCABULARY, tiny_model

from kvblend.blend import Source
from kvblend.engines.answer import Answer
from kvblend.engines.transformers import TransformersEngine

QUESTION = 6
PREFIX = np.array([BOS, 9, 8, 7, 6, 5, 4, 3], dtype=np.uint32)


def text(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCABULARY, length, dtype=np.uint32)


DOCUMENTS = [text(40, 1), text(33, 2), text(50, 3)]
ASKED = text(QUESTION, 4)
PROMPT = np.concatenate([PREFIX, *reversed(DOCUMENTS), ASKED])


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def engine(client: FakeClient) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_model(), client, max_tokens=256)  # type: ignore[arg-type]
    yield engine
    engine.close()


def precompute(engine: TransformersEngine) -> None:
    for number, document in enumerate(DOCUMENTS):
        assert engine.precompute(document, f"document {number}", context=PREFIX)


def same(answer: Answer, full: Answer) -> None:
    torch.testing.assert_close(answer.logits, full.logits, rtol=1e-3, atol=1e-3)
    assert answer.tokens.tolist() == full.tokens.tolist()


def counts(answer: Answer) -> dict[str, int]:
    return {source.name: answer.count(source) for source in Source if answer.count(source)}


def test_nothing_known_is_plain_prefill(engine: TransformersEngine, client: FakeClient) -> None:
    answer = engine.answer(PROMPT, 12, question_tokens=QUESTION)
    same(answer, engine.full_prefill(PROMPT, 12, question_tokens=QUESTION))
    assert counts(answer) == {"NEW": len(PROMPT)}
    assert client.open == set()


def test_documents_in_a_new_order_are_reused_and_a_part_of_them_is_recomputed(engine: TransformersEngine) -> None:
    precompute(engine)
    answer = engine.answer(PROMPT, question_tokens=QUESTION, recompute=0.25)
    reused = sum(map(len, DOCUMENTS))
    recomputed = int(0.25 * reused)
    new = len(PREFIX) + QUESTION
    assert counts(answer) == {"NEW": new, "SEGMENT": reused - recomputed, "RECOMPUTED": recomputed}


def test_with_everything_recomputed_the_answer_is_that_of_full_prefill(engine: TransformersEngine) -> None:
    precompute(engine)
    answer = engine.answer(PROMPT, 12, question_tokens=QUESTION, recompute=1.0)
    same(answer, engine.full_prefill(PROMPT, 12, question_tokens=QUESTION))
    assert answer.count(Source.RECOMPUTED) == sum(map(len, DOCUMENTS))


def test_a_document_in_its_own_place_needs_no_repair(engine: TransformersEngine) -> None:
    precompute(engine)
    prompt = np.concatenate([PREFIX, DOCUMENTS[0], ASKED])
    answer = engine.answer(prompt, 12, question_tokens=QUESTION, recompute=0.0)
    same(answer, engine.full_prefill(prompt, 12, question_tokens=QUESTION))
    assert answer.count(Source.SEGMENT) == len(DOCUMENTS[0])


def test_documents_are_stored_where_they_were_computed(engine: TransformersEngine, client: FakeClient) -> None:
    precompute(engine)
    for stored, document in zip(client.stored, DOCUMENTS, strict=True):
        assert (stored.position, stored.tokens.tolist(), stored.context.tolist()) == (
            len(PREFIX),
            document.tolist(),
            PREFIX.tolist(),
        )
    engine.precompute(DOCUMENTS[0], "alone")
    assert client.stored[-1].position == len(client.stored[-1].context) == 0


def test_only_an_exact_prefix_reused_gives_the_greedy_text_of_full_prefill(engine: TransformersEngine) -> None:
    first = engine.answer(PROMPT, 4, question_tokens=QUESTION)
    assert engine.store_prompt(PROMPT)
    longer = np.concatenate([PROMPT, first.tokens, text(20, 7)])
    for prompt in (PROMPT, longer):
        answer = engine.answer(prompt, 12, question_tokens=QUESTION)
        same(answer, engine.full_prefill(prompt, 12, question_tokens=QUESTION))
        assert answer.count(Source.PREFIX) == min(len(PROMPT), len(prompt) - QUESTION)
        assert answer.count(Source.SEGMENT) == answer.count(Source.RECOMPUTED) == 0


def test_a_conversation_goes_on_from_its_last_answer(engine: TransformersEngine, client: FakeClient) -> None:
    answer = engine.answer(PROMPT, 8)
    turn = np.concatenate([PROMPT, answer.tokens[:-1]])
    engine.store_prompt(turn)
    assert client.stored[-1].tokens.tolist() == turn.tolist()
    following = np.concatenate([turn, text(10, 8)])
    again = engine.answer(following, 12)
    assert again.count(Source.PREFIX) == len(turn)
    same(again, engine.full_prefill(following, 12))


def test_a_blended_prompt_says_which_of_its_tokens_were_reused(engine: TransformersEngine, client: FakeClient) -> None:
    precompute(engine)
    engine.answer(PROMPT, question_tokens=QUESTION)
    engine.store_prompt(PROMPT)
    assert client.last_store["reused"] == [(len(PREFIX), sum(map(len, DOCUMENTS)))]
    other = text(30, 9)
    engine.store_prompt(other)
    assert client.last_store["reused"] == []


def test_case_17_ranges_that_failed_are_computed(engine: TransformersEngine, client: FakeClient) -> None:
    precompute(engine)
    client.fail = [(20, 30)]
    answer = engine.answer(PROMPT, 12, question_tokens=QUESTION, recompute=1.0)
    same(answer, engine.full_prefill(PROMPT, 12, question_tokens=QUESTION))
    assert (answer.sources[20:50] == Source.NEW).all()
    assert answer.failed == ((20, 30, "EVICTED"),)


@pytest.mark.parametrize("reason", ["AGENT_UNAVAILABLE", "DEADLINE"])
def test_case_72_an_agent_that_dies_costs_reuse_and_nothing_else(
    engine: TransformersEngine, client: FakeClient, reason: str
) -> None:
    precompute(engine)
    client.down = reason
    answer = engine.answer(PROMPT, 12, question_tokens=QUESTION)
    same(answer, engine.full_prefill(PROMPT, 12, question_tokens=QUESTION))
    assert counts(answer) == {"NEW": len(PROMPT)}
    assert answer.lookup is not None
    assert answer.lookup.reason == reason
    assert not engine.precompute(DOCUMENTS[0], "again")
    assert not engine.store_prompt(PROMPT)
    client.down = ""
    assert engine.answer(PROMPT, question_tokens=QUESTION).count(Source.NEW) == len(PREFIX) + QUESTION


def test_case_65_an_agent_that_starts_later_is_used_from_then_on(client: FakeClient) -> None:
    client.down = "AGENT_UNAVAILABLE"
    engine = TransformersEngine(tiny_model(), client, max_tokens=256)  # type: ignore[arg-type]
    answer = engine.answer(PROMPT)
    assert answer.lookup is not None
    assert [(item.reason, item.tokens) for item in answer.lookup.shortfalls] == [("AGENT_UNAVAILABLE", len(PROMPT))]
    client.down = ""
    precompute(engine)
    assert engine.answer(PROMPT).count(Source.NEW) == len(PREFIX) + QUESTION
    engine.close()


def test_a_copy_nobody_answered_for_cannot_reach_a_later_prompt(engine: TransformersEngine, client: FakeClient) -> None:
    """The agent may still be writing when the engine gives up: it must not be writing into what is computed."""
    precompute(engine)
    given_up = client.kv
    client.silent = {"retrieve"}
    answer = engine.answer(PROMPT, 4, question_tokens=QUESTION)
    assert counts(answer) == {"NEW": len(PROMPT)}
    assert answer.failed == ((0, len(PROMPT), "DEADLINE"),)
    given_up.fill_(1e6)
    assert engine.store_prompt(PROMPT)
    assert client.kv.data_ptr() != given_up.data_ptr()
    client.silent = set()
    same(engine.answer(PROMPT, 12), engine.full_prefill(PROMPT, 12))


def test_case_18_slots_that_a_store_may_still_read_are_not_overwritten(
    engine: TransformersEngine, client: FakeClient
) -> None:
    client.silent = {"store"}
    assert not engine.precompute(DOCUMENTS[0], "slow", context=PREFIX)
    reading, before = client.kv, client.kv.clone()
    client.silent = set()
    assert engine.precompute(DOCUMENTS[1], "next", context=PREFIX)
    engine.answer(PROMPT, 4)
    assert torch.equal(reading, before)


def test_case_01_the_request_ends_whatever_happens(
    engine: TransformersEngine, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    precompute(engine)

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("kvblend.engines.transformers.blended_prefill", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.answer(PROMPT)
    assert client.calls[-1] == "end_session"
    assert client.open == set()


def test_reuse_can_be_left_out(engine: TransformersEngine, client: FakeClient) -> None:
    precompute(engine)
    client.calls.clear()
    answer = engine.answer(PROMPT, 12, reuse=False)
    same(answer, engine.full_prefill(PROMPT, 12))
    assert (client.calls, answer.lookup) == ([], None)


def test_generation_stops_at_the_end_of_text(engine: TransformersEngine, client: FakeClient) -> None:
    full = engine.full_prefill(PROMPT, 20)
    model = tiny_model()
    model.generation_config.eos_token_id = [int(full.tokens[3])]
    stopping = TransformersEngine(model, client, max_tokens=256)  # type: ignore[arg-type]
    first = full.tokens.tolist().index(full.tokens[3]) + 1
    assert stopping.answer(PROMPT, 20).tokens.tolist() == full.tokens[:first].tolist()
    assert stopping.full_prefill(PROMPT, 20).tokens.tolist() == full.tokens[:first].tolist()
    stopping.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": np.zeros(0, np.uint32)}, "n > 0"),
        ({"tokens": [[1, 2]]}, "n > 0"),
        ({"tokens": [0.5]}, "integers"),
        ({"tokens": [1, VOCABULARY]}, f"0 to {VOCABULARY - 1}"),
        ({"tokens": [-1]}, f"0 to {VOCABULARY - 1}"),
        ({"tokens": np.ones(257, np.uint32)}, "256 slots"),
        ({"tokens": np.ones(250, np.uint32), "max_new_tokens": 7}, "256 slots"),
        ({"tokens": [1, 2], "question_tokens": 3}, "question_tokens"),
        ({"tokens": [1, 2], "question_tokens": 0}, "question_tokens"),
        ({"tokens": [1, 2], "recompute": 1.5}, "fraction"),
    ],
)
def test_impossible_requests_are_refused(
    engine: TransformersEngine, client: FakeClient, arguments: dict[str, object], message: str
) -> None:
    client.calls.clear()
    with pytest.raises(ValueError, match=message):
        engine.answer(**arguments)  # type: ignore[arg-type]
    assert client.calls == []


def test_a_document_must_fit_with_its_context(engine: TransformersEngine) -> None:
    with pytest.raises(ValueError, match="256 slots"):
        engine.precompute(text(250, 1), "long", context=PREFIX)
    with pytest.raises(ValueError, match="n > 0"):
        engine.precompute([], "empty", context=PREFIX)
