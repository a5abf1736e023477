"""The model's own ordinary forward pass: what every blended answer is compared with."""

import inspect
import time
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from kvblend.engines.answer import Answer
from kvblend.engines.reuse import Reuse
from kvblend.engines.tokens import Tokens

# Renamed between releases of Transformers.
_CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


@torch.inference_mode()
def full_answer(
    model: LlamaForCausalLM, prompt: Tokens, max_new_tokens: int, question_tokens: int, stop: frozenset[int]
) -> Answer:
    """Prefill and greedy decoding through `model(...)` with Transformers' own KV cache."""
    start = time.perf_counter()
    output: Any = model(_batch(prompt), use_cache=True, logits_to_keep=question_tokens)
    logits = output.logits[0]
    latest = int(logits[-1].argmax())
    prefilled = 1e3 * (time.perf_counter() - start)
    generated: list[int] = []
    while len(generated) < max_new_tokens:
        generated.append(latest)
        if latest in stop or len(generated) == max_new_tokens:
            break
        output = model(torch.tensor([[latest]]), use_cache=True, **{_CACHE: output[_CACHE]})
        latest = int(output.logits[0, -1].argmax())
    sources = np.zeros(len(prompt), dtype=np.uint8)
    return Answer(np.array(generated, dtype=np.uint32), logits, sources, prefilled, Reuse.nothing(len(prompt)))


def _batch(tokens: Tokens) -> torch.Tensor:
    return torch.from_numpy(tokens.astype(np.int64))[None]
