"""What is measured of reused tokens, and which of them are chosen by it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import model_forward, random_prompt, tiny_model

from kvblend.blend import ByAttention, ByDeviation, ByInfluence, Candidates, SegmentStarts
from kvblend.blend.attention import CausalAttention
from kvblend.blend.prefill import run_offsets
from kvblend.blend.question import MAX_QUESTION_TOKENS, question_attention
from kvblend.blend.select import choose
from kvblend.engines.llama import LlamaDecoder

CANDIDATES = Candidates(
    offsets=torch.tensor([0, 1, 2, 0, 1]),
    attention=torch.tensor([1.0, 5.0, 2.0, 4.0, 3.0]),
    deviation=torch.tensor([9.0, 0.0, 4.0, 1.0, 1.0]),
)


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        (ByAttention(0.4), [1, 3]),
        (ByDeviation(0.4), [0, 2]),
        # attention * sqrt(deviation): 3, 0, 4, 4, 3
        (ByInfluence(0.4), [2, 3]),
        (SegmentStarts(0.6), [0, 1, 3]),
        (ByAttention(0.0), []),
        (ByAttention(0.19), []),
        (ByAttention(1.0), [0, 1, 2, 3, 4]),
    ],
)
def test_the_highest_scores_are_chosen_and_no_more_than_the_fraction(selector, chosen: list[int]) -> None:  # type: ignore[no-untyped-def]
    assert choose(selector, CANDIDATES).tolist() == chosen


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_is_between_0_and_1(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction from 0 to 1"):
        ByInfluence(fraction)


def test_offsets_restart_behind_every_gap() -> None:
    assert run_offsets(torch.tensor([3, 4, 5, 9, 10, 20])).tolist() == [0, 1, 2, 0, 1, 0]


@settings(max_examples=25, deadline=None)
@given(
    positions=st.sets(st.integers(0, 299), min_size=1, max_size=150).map(sorted),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 9),
)
def test_scattered_queries_attend_to_all_keys_up_to_their_position(positions: list[int], group: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(len(positions), 2 * group, 8, generator=generator)
    keys, values = torch.randn(2, 300, 2, 8, generator=generator)
    attended = CausalAttention(torch.tensor(positions), 0.5)(queries, keys, values)
    for row, position in enumerate(positions):
        for head in range(2 * group):
            weights = (keys[: position + 1, head // group] @ queries[row, head] * 0.5).softmax(-1)
            expected = weights @ values[: position + 1, head // group]
            torch.testing.assert_close(attended[row, head], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("question", [1, 7, MAX_QUESTION_TOKENS + 10])
@torch.inference_mode()
def test_the_questions_attention_is_what_the_model_itself_pays(question: int) -> None:
    model = tiny_model()
    tokens = random_prompt(150)
    known = torch.arange(150) < 150 - question
    _, kv = model_forward(model, tokens)
    model.set_attn_implementation("eager")
    attentions = model(tokens[None], output_attentions=True).attentions
    rows = min(question, MAX_QUESTION_TOKENS)
    expected = sum(layer[0, :, -rows:].sum(dim=(0, 1)) for layer in attentions)
    if question > rows:
        # The unknown tokens in front of the last ones have no KV: a question this long is approximated.
        paid = question_attention(LlamaDecoder(model), tokens, kv.clone(), known)
        assert (paid[150 - question : 150 - rows] == 0).all()
        assert np.corrcoef(paid[: 150 - question], expected[: 150 - question])[0, 1] > 0.5
    else:
        paid = question_attention(LlamaDecoder(model), tokens, kv.clone(), known)
        torch.testing.assert_close(paid, expected, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_unknown_tokens_between_segments_get_no_attention() -> None:
    model = tiny_model()
    tokens = random_prompt(100)
    _, kv = model_forward(model, tokens)
    known = torch.ones(100, dtype=torch.bool)
    known[30:50] = known[90:] = False
    kv[:, :, ~known] = float("nan")
    paid = question_attention(LlamaDecoder(model), tokens, kv, known)
    assert (paid[30:50] == 0).all()
    assert torch.isfinite(paid).all()
    torch.testing.assert_close(paid.sum(), torch.tensor(4 * 6 * 10.0), rtol=1e-4, atol=0)
