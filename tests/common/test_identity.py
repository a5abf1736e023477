"""Identities: equal where KV is equal, different where it is not, and the same in every release."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.v1 import common_pb2 as pb
from services.common import identity
from services.common.errors import KvblendError

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "identity.json"


def model_space(**changes: object) -> pb.ModelSpace:
    rope = pb.Rope(style=pb.ROPE_STYLE_NEOX, inv_freq=np.arange(1, 5, dtype="<f8").tobytes())
    group = pb.LayerGroup(attention=pb.ATTENTION_KIND_FULL, layers=2, kv_heads=3, head_size=8, rope=rope)
    fields: dict[str, object] = {
        "weights_fingerprint": bytes(range(32)),
        "kv_dtype": pb.DTYPE_FLOAT32,
        "groups": [group],
        "chunk_tokens": 16,
    }
    return pb.ModelSpace(**(fields | changes))


def other_rope() -> list[pb.LayerGroup]:
    group = model_space().groups[0]
    group.rope.inv_freq = np.arange(2, 6, dtype="<f8").tobytes()
    return [group]


def golden_vectors() -> dict[str, object]:
    space = model_space()
    root = identity.space_root(space, pb.Space(tenant="acme", cache_salt=b"s", adapter_digest=b"\x07" * 32))
    plain = identity.space_root(space, pb.Space())
    tokens = np.arange(40, dtype=np.uint32) * 1_000_003
    span = pb.OpaqueSpan(offset=12, length=8, digest=b"\x01" * 32)
    context = identity.context_hash(plain, np.array([1, 2, 3], dtype=np.uint32), 16)
    return {
        "hash_version": identity.HASH_VERSION,
        "object_format_version": identity.OBJECT_FORMAT_VERSION,
        "model_space_id": identity.model_space_id(space).hex(),
        "space_root": root.hex(),
        "default_space_root": plain.hex(),
        "context_hash": context.hex(),
        "chain": [c.chain_hash.hex() for c in identity.chain_chunks(identity.chain_start(plain, b""), tokens, 16)],
        "chain_behind_context": [
            c.chain_hash.hex() for c in identity.chain_chunks(identity.chain_start(plain, context), tokens, 16)
        ],
        "chain_with_span": [
            c.chain_hash.hex() for c in identity.chain_chunks(identity.chain_start(plain, b""), tokens, 16, [span])
        ],
    }


def test_case_46_golden_vectors_are_those_of_every_release() -> None:
    assert golden_vectors() == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(
    "changes",
    [
        {"weights_fingerprint": bytes(32)},
        {"weights_epoch": 1},
        {"kv_dtype": pb.DTYPE_BFLOAT16},
        {"numerics": "flash-3"},
        {"tensor_parallel": 2},
        {"chunk_tokens": 32},
        {"scales_digest": bytes(32)},
        {"groups": other_rope()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_changes_kv_bytes_changes_the_space(changes: dict[str, object]) -> None:
    changed = model_space(**changes)
    assert identity.model_space_id(changed) != identity.model_space_id(model_space())
    assert identity.space_root(changed, pb.Space()) != identity.space_root(model_space(), pb.Space())


@pytest.mark.parametrize(
    "space",
    [pb.Space(tenant="b"), pb.Space(cache_salt=b"x"), pb.Space(adapter_digest=b"\x01" * 32)],
    ids=["tenant", "salt", "adapter"],
)
def test_case_43_44_tenants_salts_and_adapters_have_their_own_space(space: pb.Space) -> None:
    assert identity.space_root(model_space(), space) != identity.space_root(model_space(), pb.Space())


def test_defaults_written_out_are_the_same_space() -> None:
    explicit = model_space(tensor_parallel=1, pipeline_parallel=1, context_parallel=1, display_name="a name")
    assert identity.model_space_id(explicit) == identity.model_space_id(model_space())
    named = pb.Space(tenant=identity.DEFAULT_TENANT)
    assert identity.space_root(explicit, named) == identity.space_root(model_space(), pb.Space())


def test_fields_do_not_run_into_each_other() -> None:
    one = identity.space_root(model_space(), pb.Space(tenant="ab", cache_salt=b"c"))
    other = identity.space_root(model_space(), pb.Space(tenant="a", cache_salt=b"bc"))
    assert one != other


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights_fingerprint": b""}, "WEIGHTS_UNKNOWN"),
        ({"kv_dtype": pb.DTYPE_UNSPECIFIED}, "INVALID_SPACE"),
        ({"chunk_tokens": 100}, "INVALID_SPACE"),
        ({"chunk_tokens": 8}, "INVALID_SPACE"),
        ({"groups": []}, "INVALID_SPACE"),
        ({"groups": [pb.LayerGroup(attention=pb.ATTENTION_KIND_FULL)]}, "INVALID_SPACE"),
    ],
)
def test_an_identity_that_cannot_be_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(KvblendError) as caught:
        identity.model_space_id(model_space(**changes))
    assert caught.value.reason == reason


def test_a_field_from_a_newer_release_is_refused() -> None:
    unknown = b"\xfa\x07\x01x"  # field 127, length-delimited
    newer = pb.ModelSpace.FromString(model_space().SerializeToString() + unknown)
    with pytest.raises(KvblendError) as caught:
        identity.model_space_id(newer)
    assert caught.value.reason == "INVALID_SPACE"


def chain(tokens: list[int], context: bytes = b"") -> list[bytes]:
    array = np.asarray(tokens, dtype=np.uint32)
    start = identity.chain_start(b"\x05" * 32, context)
    return [chunk.chain_hash for chunk in identity.chain_chunks(start, array, 16)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=70), st.data())
def test_chains_agree_exactly_as_far_as_tokens_do(tokens: list[int], data: st.DataObject) -> None:
    changed_at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:changed_at], tokens[changed_at] + 1, *tokens[changed_at + 1 :]]
    before, after = chain(tokens), chain(changed)
    same = changed_at // 16
    assert before[:same] == after[:same]
    assert all(one != other for one, other in zip(before[same:], after[same:], strict=True))


def test_the_same_text_behind_another_context_has_other_keys() -> None:
    tokens = list(range(40))
    bos = identity.context_hash(b"\x05" * 32, np.array([1], dtype=np.uint32), 16)
    assert not set(chain(tokens)) & set(chain(tokens, bos))


def test_a_partial_chunk_is_not_the_full_one_padded_with_zero() -> None:
    assert chain([1, 2, 3])[0] != chain([1, 2, 3, 0])[0]


def test_opaque_spans_change_their_chunk_and_all_behind() -> None:
    tokens = np.zeros(64, dtype=np.uint32)
    start = identity.chain_start(b"\x05" * 32, b"")
    span = pb.OpaqueSpan(offset=20, length=4, digest=b"\x01" * 32)
    plain = identity.chain_chunks(start, tokens, 16)
    spanned = identity.chain_chunks(start, tokens, 16, [span])
    assert [a.chain_hash == b.chain_hash for a, b in zip(plain, spanned, strict=True)] == [True, False, False, False]
    assert [chunk.has_opaque_span for chunk in spanned] == [False, True, False, False]


@pytest.mark.parametrize(
    "spans",
    [
        [pb.OpaqueSpan(offset=0, length=99, digest=b"\x01" * 32)],
        [pb.OpaqueSpan(offset=0, length=1, digest=b"short")],
        [pb.OpaqueSpan(offset=4, length=4, digest=b"\x01" * 32), pb.OpaqueSpan(offset=6, length=2, digest=bytes(32))],
    ],
    ids=["outside", "short digest", "overlapping"],
)
def test_impossible_spans_are_refused(spans: list[pb.OpaqueSpan]) -> None:
    with pytest.raises(KvblendError) as caught:
        identity.chain_chunks(bytes(32), np.zeros(16, dtype=np.uint32), 16, spans)
    assert caught.value.reason == "INVALID_ARGUMENT"
