"""What an engine declares of its model, and which models it refuses."""

import numpy as np
import pytest
import torch
from fake_client import FakeClient, rotated
from tiny_llama import tiny_model
from transformers import MistralConfig, MistralForCausalLM

from kvblend.engines.model_space import model_space, rope_of, rope_proof, weights_fingerprint
from kvblend.engines.transformers import TransformersEngine
from kvblend.v1 import common_pb2 as pb

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, **LLAMA3},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
}


def with_rope(kind: str, **parameters: object):  # type: ignore[no-untyped-def]
    return tiny_model(rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters})


def test_the_model_space_describes_the_model() -> None:
    space = model_space(tiny_model(), name="tiny", chunk_tokens=64, numerics="n", weights_epoch=3)
    (group,) = space.groups
    assert (group.layers, group.kv_heads, group.head_size) == (4, 2, 16)
    assert group.attention == pb.ATTENTION_KIND_FULL
    assert (space.kv_dtype, space.chunk_tokens, space.numerics, space.weights_epoch) == (
        pb.DTYPE_FLOAT32,
        64,
        "n",
        3,
    )


def test_the_fingerprint_follows_weights_configuration_and_dtype_and_nothing_else() -> None:
    base = weights_fingerprint(tiny_model())
    assert len(base) == 32
    renamed = tiny_model()
    renamed.config._name_or_path = "elsewhere"
    assert weights_fingerprint(renamed) == base
    changed = tiny_model()
    with torch.no_grad():
        changed.model.layers[3].mlp.up_proj.weight[5, 5] += 1e-3
    others = [changed, tiny_model(seed=1), tiny_model(rms_norm_eps=1e-5), tiny_model().bfloat16()]
    assert len({base, *map(weights_fingerprint, others)}) == 5


@pytest.mark.parametrize("kind", ROPES)
def test_case_36_the_proof_agrees_with_the_declared_rope(kind: str) -> None:
    model = with_rope(kind, **ROPES[kind])
    rope, proof = rope_of(model), rope_proof(model)
    assert rope.style == pb.ROPE_STYLE_NEOX
    key_a, key_b = (
        torch.from_numpy(np.frombuffer(key, "<f4").copy()).view(2, 16) for key in (proof.key_a, proof.key_b)
    )
    inv_freq = torch.from_numpy(np.frombuffer(rope.inv_freq, "<f8").copy())
    moved = rotated(key_a, inv_freq, proof.position_b - proof.position_a)
    assert (moved - key_b).abs().max() < 1e-3 * key_b.abs().max()
    assert not torch.allclose(key_a, key_b, atol=0.1)


def test_a_rope_that_depends_on_length_serves_prefixes_only_and_only_where_its_table_is_one() -> None:
    model = with_rope("dynamic", factor=2.0)
    client = FakeClient()
    assert rope_of(model).style == pb.ROPE_STYLE_NOT_RELATIVE
    engine = TransformersEngine(model, client, max_tokens=2048)  # type: ignore[arg-type]
    engine.close()
    assert "register_rope" not in client.calls
    with pytest.raises(ValueError, match="only up to 2048 tokens"):
        TransformersEngine(model, client, max_tokens=2049)  # type: ignore[arg-type]


def test_other_models_are_refused_by_name() -> None:
    config = MistralConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    config.num_attention_heads = config.num_key_value_heads = 1
    with pytest.raises(ValueError, match="MistralForCausalLM is not supported; LlamaForCausalLM is"):
        TransformersEngine(MistralForCausalLM(config), FakeClient(), max_tokens=8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "max_tokens", "message"), [(torch.float64, 8, "float64"), (torch.float32, 0, "at least 1")]
)
def test_a_buffer_of_no_use_is_refused(dtype: torch.dtype, max_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersEngine(tiny_model().to(dtype), FakeClient(), max_tokens=max_tokens)  # type: ignore[arg-type]
