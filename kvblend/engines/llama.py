"""The Llama family of Transformers, one layer at a time: a `Decoder` over the model's own modules."""

import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvblend.blend.decoder import Rotary


class LlamaDecoder:
    """Runs a model's own embeddings, projections, norms and MLPs; only the attention is done by the caller."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self._stack = list(model.model.layers[: model.config.num_hidden_layers])

    @property
    def layers(self) -> int:
        return len(self._stack)

    @property
    def attention_scale(self) -> float:
        return float(self._stack[0].self_attn.scaling)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model.model.embed_tokens(tokens)

    def rotary(self, positions: torch.Tensor) -> Rotary:
        cos, sin = self._model.model.rotary_emb(self._model.lm_head.weight, position_ids=positions[None])
        return cos, sin

    def project(
        self, layer: int, hidden: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block = self._stack[layer]
        attention = block.self_attn
        normed = block.input_layernorm(hidden)
        shape = (1, len(hidden), -1, attention.head_dim)
        queries = attention.q_proj(normed).view(shape).transpose(1, 2)
        keys = attention.k_proj(normed).view(shape).transpose(1, 2)
        values = attention.v_proj(normed).view(shape[1:])
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        return queries[0].transpose(0, 1), keys[0].transpose(0, 1), values

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        block = self._stack[layer]
        hidden = hidden + block.self_attn.o_proj(attended.reshape(len(hidden), -1))
        return hidden + block.mlp(block.post_attention_layernorm(hidden))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.lm_head(self._model.model.norm(hidden))
