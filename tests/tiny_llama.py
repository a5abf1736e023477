"""A tiny random Llama with BOS and grouped heads, and the slow obvious way to blend with it."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvblend.blend import Source, Sources
from kvblend.engines.llama import LlamaDecoder

# With tensors this small a second thread costs more than it computes.
torch.set_num_threads(1)

BOS = 1
VOCABULARY = 200


def tiny_model(seed: int = 0, **settings: object) -> LlamaForCausalLM:
    """Weights are large enough that its attention is far from uniform."""
    options: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.25,
        "bos_token_id": BOS,
        "eos_token_id": 0,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(options | settings))).eval()


def random_prompt(length: int, seed: int = 0) -> torch.Tensor:
    """[length] int64, BOS first."""
    tokens = torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    tokens[0] = BOS
    return tokens


@torch.inference_mode()
def model_forward(model: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, vocabulary] and KV [layers, 2, n, kv_heads, size] of the model's own forward pass."""
    output = model(tokens[None], use_cache=True)
    cache = output[1]
    planes = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    return output.logits[0], torch.stack(planes).transpose(2, 3)


def masks(sources: Sources) -> tuple[torch.Tensor, torch.Tensor]:
    """(new, reused) flags [n]."""
    marks = torch.from_numpy(sources.astype(np.int64))
    return marks == Source.NEW, marks == Source.SEGMENT


@torch.inference_mode()
def naive_blend(
    model: LlamaForCausalLM,
    tokens: torch.Tensor,
    kv: torch.Tensor,
    computed: list[torch.Tensor],
    written: list[torch.Tensor],
) -> torch.Tensor:
    """Logits [n, vocabulary] (zeros where not computed), one token after the other, one head at a time.

    computed, written: for each layer, flags [n] of the tokens that run through it, and of those whose K and V
    are written there.
    """
    decoder = LlamaDecoder(model)
    hidden = decoder.embed(tokens).clone()
    rotary = decoder.rotary(torch.arange(len(tokens)))
    for layer in range(decoder.layers):
        queries, keys, values = decoder.project(layer, hidden, rotary)
        for position in torch.nonzero(written[layer])[:, 0].tolist():
            kv[layer, 0, position], kv[layer, 1, position] = keys[position], values[position]
        group = queries.shape[1] // keys.shape[1]
        attended = torch.zeros_like(queries)
        for position in torch.nonzero(computed[layer])[:, 0].tolist():
            for head in range(queries.shape[1]):
                past = kv[layer, :, : position + 1, head // group]
                weights = (past[0] @ queries[position, head] * decoder.attention_scale).softmax(-1)
                attended[position, head] = weights @ past[1]
        hidden = torch.where(computed[layer][:, None], decoder.finish(layer, hidden, attended), hidden)
    return torch.where(computed[-1][:, None], decoder.logits(hidden), 0.0)
