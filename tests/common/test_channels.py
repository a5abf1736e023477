"""Where replicas are: the addresses that a setting may name, and what gRPC makes of them."""

import pytest

from services.common.channels import target_of


@pytest.mark.parametrize(
    ("addresses", "target"),
    [
        ("matcher:50051", "matcher:50051"),
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("dns:///matcher.kvblend.svc:50051", "dns:///matcher.kvblend.svc:50051"),
        ("unix:/run/m.sock", "unix:/run/m.sock"),
        ("unix:/run/1.sock,unix:/run/2.sock", "unix:/run/1.sock,/run/2.sock"),
        ("10.0.0.1:50051,10.0.0.2:50052", "ipv4:10.0.0.1:50051,10.0.0.2:50052"),
        ("[::1]:50051,[::1]:50052", "ipv6:[::1]:50051,[::1]:50052"),
    ],
)
def test_one_address_or_several_replicas(addresses: str, target: str) -> None:
    assert target_of(addresses) == target


@pytest.mark.parametrize(
    ("addresses", "allowed"),
    [
        ("", "host:port"),
        ("matcher", "host:port"),
        ("matcher:port", "host:port"),
        ("unix:relative.sock", "unix:/absolute/path"),
        ("unix:/", "unix:/absolute/path"),
        ("10.0.0.1:1,", "host:port"),
        ("10.0.0.1:1,unix:/run/m.sock", "host:port"),
        ("one:50051,two:50051", "dns:///name:port"),
        ("10.0.0.1:1,[::1]:2", "one family"),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(addresses: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed):
        target_of(addresses)
