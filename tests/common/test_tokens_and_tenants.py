"""Token bytes and tenants are checked in one place."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.common.errors import KvblendError
from services.common.tenants import TenantPolicy
from services.common.tokens import decode_tokens, encode_u32


def test_tokens_travel_as_little_endian_u32() -> None:
    assert encode_u32([1, 256]) == b"\x01\0\0\0\0\x01\0\0"
    assert decode_tokens(b"\x01\0\0\0\0\x01\0\0").tolist() == [1, 256]


@pytest.mark.parametrize(("data", "reason"), [(b"", "EMPTY_PROMPT"), (b"123", "INVALID_TOKENS")])
def test_bytes_that_are_no_tokens_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(KvblendError) as caught:
        decode_tokens(data)
    assert caught.value.reason == reason


def test_nothing_is_a_valid_context() -> None:
    assert decode_tokens(b"", allow_empty=True).dtype == np.uint32


def caller(token: str | None) -> Any:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    return SimpleNamespace(invocation_metadata=lambda: metadata)


POLICY = TenantPolicy({"one": ["acme", "beta"], "all": ["*"]})


@pytest.mark.parametrize(
    ("token", "requested", "tenant"),
    [("one", "", "acme"), ("one", "beta", "beta"), ("all", "zeta", "zeta"), ("all", "", "default")],
)
def test_the_identity_decides_and_the_request_chooses(token: str, requested: str, tenant: str) -> None:
    assert POLICY.tenant_for(caller(token), requested) == tenant


@pytest.mark.parametrize(
    ("token", "requested", "reason"),
    [("one", "zeta", "TENANT_NOT_ALLOWED"), ("two", "acme", "UNAUTHENTICATED"), (None, "", "UNAUTHENTICATED")],
)
def test_nobody_acts_for_a_tenant_that_is_not_theirs(token: str | None, requested: str, reason: str) -> None:
    with pytest.raises(KvblendError) as caught:
        POLICY.tenant_for(caller(token), requested)
    assert caught.value.reason == reason
