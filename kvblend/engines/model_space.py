"""What determines a Transformers model's KV: the model space it registers, and the proof of its RoPE."""

import hashlib
import json

import numpy as np
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvblend.v1 import agent_pb2
from kvblend.v1 import common_pb2 as pb

DTYPES = {
    torch.float32: pb.DTYPE_FLOAT32,
    torch.float16: pb.DTYPE_FLOAT16,
    torch.bfloat16: pb.DTYPE_BFLOAT16,
}
# Tables that depend on the position alone. All others (dynamic NTK, LongRoPE) depend on the length of the text too.
_RELATIVE_ROPES = ("default", "linear", "llama3", "yarn")
# Where a checkpoint came from and who saved it; nothing that a forward pass reads.
_NO_IDENTITY = ("_name_or_path", "_model_name_or_path", "architectures", "transformers_version", "use_cache")
_PROOF_POSITIONS = (5, 1029)


def weights_fingerprint(model: LlamaForCausalLM) -> bytes:
    """32-byte digest of the configuration and of every parameter as it is in memory now."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NO_IDENTITY}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"\n{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.digest()


def rope_of(model: LlamaForCausalLM) -> pb.Rope:
    """The rotary embedding as the model's own module applies it."""
    module = model.model.rotary_emb
    if module.rope_type not in _RELATIVE_ROPES:
        return pb.Rope(style=pb.ROPE_STYLE_NOT_RELATIVE)
    return pb.Rope(
        style=pb.ROPE_STYLE_NEOX,
        inv_freq=module.inv_freq.detach().numpy().astype("<f8").tobytes(),
        magnitude=float(module.attention_scaling),
    )


def check_supported(model: LlamaForCausalLM, max_tokens: int) -> None:
    """Raises ValueError, with the reason, for a model or a buffer that the engine cannot serve."""
    if type(model) is not LlamaForCausalLM:
        raise ValueError(f"{type(model).__name__} is not supported; LlamaForCausalLM is")
    if model.device.type != "cpu":
        raise ValueError(f"the model is on {model.device}; this engine serves models on the CPU")
    if model.dtype not in DTYPES:
        raise ValueError(f"KV of {model.dtype} is not supported; float32, bfloat16 and float16 are")
    if max_tokens <= 0:
        raise ValueError(f"max_tokens is {max_tokens}; at least 1 is needed")
    if model.model.rotary_emb.rope_type in _RELATIVE_ROPES:
        return
    longest = model.config.rope_parameters.get("original_max_position_embeddings")
    longest = min(longest or model.config.max_position_embeddings, model.config.max_position_embeddings)
    if max_tokens > longest:
        raise ValueError(f"max_tokens is {max_tokens}; this model's RoPE has one table only up to {longest} tokens")


def model_space(
    model: LlamaForCausalLM, *, name: str, chunk_tokens: int, numerics: str, weights_epoch: int
) -> pb.ModelSpace:
    attention = model.model.layers[0].self_attn
    group = pb.LayerGroup(
        attention=pb.ATTENTION_KIND_FULL,
        layers=model.config.num_hidden_layers,
        kv_heads=model.config.num_key_value_heads,
        head_size=attention.head_dim,
        rope=rope_of(model),
    )
    return pb.ModelSpace(
        weights_fingerprint=weights_fingerprint(model),
        kv_dtype=DTYPES[model.dtype],
        groups=[group],
        chunk_tokens=chunk_tokens,
        numerics=numerics,
        weights_epoch=weights_epoch,
        display_name=name,
    )


@torch.inference_mode()
def rope_proof(model: LlamaForCausalLM) -> agent_pb2.RopeProof:
    """K made from one random input by the model's own rotary module at two far positions."""
    attention = model.model.layers[0].self_attn
    shape = (1, model.config.num_key_value_heads, 1, attention.head_dim)
    key = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    rotated = []
    for position in _PROOF_POSITIONS:
        tables = model.model.rotary_emb(key, position_ids=torch.tensor([[position]]))
        rotated.append(np.ascontiguousarray(apply_rotary_pos_emb(key, key, *tables)[1].float().numpy(), "<f4"))
    first, second = (array.tobytes() for array in rotated)
    position_a, position_b = _PROOF_POSITIONS
    return agent_pb2.RopeProof(position_a=position_a, key_a=first, position_b=position_b, key_b=second)
