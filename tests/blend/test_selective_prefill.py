"""Selective prefill is the model's own forward pass where everything is computed, and the obvious loop elsewhere."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import masks, model_forward, naive_blend, random_prompt, tiny_model

from kvblend.blend import (
    ByAttention,
    ByDeviation,
    ByInfluence,
    SegmentStarts,
    Selector,
    Source,
    Sources,
    blended_prefill,
)
from kvblend.engines.llama import LlamaDecoder

MODEL = tiny_model()
DECODER = LlamaDecoder(MODEL)
SELECTORS = [ByInfluence, ByAttention, ByDeviation, SegmentStarts]
QUERY = 5


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def reused_kv(kv: torch.Tensor, sources: Sources, error: float = 0.3) -> torch.Tensor:
    """A buffer as retrieval leaves it: exact prefix, segments that are somewhat off, nothing (NaN) elsewhere."""
    new, reused = masks(sources)
    noise = torch.randn(kv.shape, generator=torch.Generator().manual_seed(1))
    noise[0] = 0  # Layer 0 depends on nothing but the token.
    buffer = torch.where(reused[:, None, None], kv + error * noise, kv)
    buffer[:, :, new] = float("nan")
    return buffer


def sources_of(*runs: tuple[Source, int]) -> Sources:
    return np.concatenate([np.full(length, source, dtype=np.uint8) for source, length in runs])


MIXED = sources_of(
    (Source.PREFIX, 20),
    (Source.SEGMENT, 30),
    (Source.NEW, 7),
    (Source.SEGMENT, 40),
    (Source.SEGMENT, 3),
    (Source.NEW, 9),
)


@pytest.mark.parametrize("length", [QUERY, 64, 65, 150])
def test_with_everything_new_it_is_the_models_own_forward_pass(length: int) -> None:
    tokens = random_prompt(length)
    logits, kv = model_forward(MODEL, tokens)
    buffer = torch.full_like(kv, float("nan"))
    prefill = blended_prefill(DECODER, tokens, buffer, np.zeros(length, np.uint8), ByInfluence(0.15), QUERY)
    close(prefill.logits, logits[-QUERY:])
    close(buffer, kv)
    assert (prefill.sources == Source.NEW).all()


@pytest.mark.parametrize("selector", SELECTORS)
def test_with_every_reused_token_recomputed_it_is_full_prefill(selector: type[Selector]) -> None:
    tokens = random_prompt(len(MIXED))
    logits, kv = model_forward(MODEL, tokens)
    buffer = reused_kv(kv, MIXED)
    prefill = blended_prefill(DECODER, tokens, buffer, MIXED, selector(1.0), QUERY)  # type: ignore[call-arg]
    close(prefill.logits, logits[-QUERY:])
    close(buffer, kv)
    assert (prefill.sources == Source.RECOMPUTED).sum() == (MIXED == Source.SEGMENT).sum()


def test_behind_an_exact_prefix_it_is_full_prefill_and_the_prefix_is_untouched() -> None:
    sources = sources_of((Source.PREFIX, 100), (Source.NEW, 30))
    tokens = random_prompt(len(sources))
    logits, kv = model_forward(MODEL, tokens)
    buffer = reused_kv(kv, sources)
    prefill = blended_prefill(DECODER, tokens, buffer, sources, ByInfluence(0.15), QUERY)
    close(prefill.logits, logits[-QUERY:])
    assert torch.equal(buffer[:, :, :100], kv[:, :, :100])


@st.composite
def layouts(draw: st.DrawFn) -> Sources:
    runs = draw(st.lists(st.tuples(st.sampled_from([Source.NEW, Source.SEGMENT]), st.integers(1, 12)), max_size=5))
    return sources_of((Source.PREFIX, draw(st.integers(0, 6))), *runs, (Source.NEW, QUERY))


@settings(max_examples=25, deadline=None)
@given(sources=layouts(), selector=st.sampled_from(SELECTORS), fraction=st.sampled_from([0.0, 0.1, 0.5]))
def test_it_is_what_the_obvious_loop_computes(sources: Sources, selector: type[Selector], fraction: float) -> None:
    tokens = random_prompt(len(sources))
    buffer = reused_kv(model_forward(MODEL, tokens)[1], sources)
    expected = buffer.clone()
    choice = selector(fraction)  # type: ignore[call-arg]
    prefill = blended_prefill(DECODER, tokens, buffer, sources, choice, QUERY)

    new, reused = masks(sources)
    chosen = torch.from_numpy(prefill.sources == Source.RECOMPUTED)
    assert int(chosen.sum()) == int(fraction * int(reused.sum()))
    assert not (chosen & ~reused).any()
    probed = choice.probe_layer if chosen.any() else 0
    computed = [new | reused if layer < probed else new | chosen for layer in range(DECODER.layers)]
    written = [new | reused if probed and layer <= probed else new | chosen for layer in range(DECODER.layers)]
    logits = naive_blend(MODEL, tokens, expected, computed, written)
    close(prefill.logits, logits[-QUERY:])
    close(buffer, expected)


def test_tokens_that_are_off_are_chosen_before_those_that_are_not() -> None:
    """Two segments, one of them stored behind this very context: repairing it would be a waste."""
    sources = sources_of(
        (Source.PREFIX, 10), (Source.SEGMENT, 40), (Source.NEW, 2), (Source.SEGMENT, 40), (Source.NEW, 8)
    )
    tokens = random_prompt(len(sources))
    _, kv = model_forward(MODEL, tokens)
    buffer = reused_kv(kv, sources)
    buffer[:, :, 10:50] = kv[:, :, 10:50]
    for selector in (ByInfluence(0.25), ByDeviation(0.25)):
        chosen = np.flatnonzero(
            blended_prefill(DECODER, tokens, buffer.clone(), sources, selector, QUERY).sources == Source.RECOMPUTED
        )
        assert len(chosen) == 20
        assert (chosen >= 52).all()


def test_it_works_in_bfloat16() -> None:
    model = tiny_model().bfloat16()
    tokens = random_prompt(len(MIXED))
    logits, kv = model_forward(model, tokens)
    buffer = reused_kv(kv, MIXED).bfloat16()
    prefill = blended_prefill(LlamaDecoder(model), tokens, buffer, MIXED, ByInfluence(1.0), QUERY)
    assert prefill.logits.dtype == torch.bfloat16
    assert (prefill.logits - logits[-QUERY:]).abs().max() < 0.1 * logits.abs().max()


@pytest.mark.parametrize("query", [0, 10, 200])
def test_tokens_whose_logits_are_wanted_must_be_new(query: int) -> None:
    tokens = random_prompt(len(MIXED))
    kv = torch.zeros_like(model_forward(MODEL, tokens)[1])
    with pytest.raises(ValueError, match="must be new"):
        blended_prefill(DECODER, tokens, kv, MIXED, ByInfluence(0.15), query)
