"""Calls over the host's socket are as those over gRPC; ways that are not are found out."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from host_contract import CHECKS, Bench, Check
from host_service import SECONDS, grpc_alone, host_alone, serving, unary

from kvblend.host_calls.calls import Running
from kvblend.host_calls.connections import Connection
from services.common.host_calls.context import HostContext

WAYS = {"grpc": grpc_alone, "host": host_alone}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Callable[[Path], grpc.Channel]:
    return WAYS[request.param]


def run(check: Check, way: Callable[[Path], grpc.Channel], path: Path, seconds: float = SECONDS) -> None:
    with serving(path) as (service, _), way(path) as channel:
        check(Bench(channel, service, seconds))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_calls_keep_the_contract(check: Check, way: Callable[[Path], grpc.Channel], shm_dir: Path) -> None:
    run(check, way, shm_dir / "s")


def test_more_calls_than_may_wait_are_refused(way: Callable[[Path], grpc.Channel], shm_dir: Path) -> None:
    """The rest are answered; and those whose time is over while they wait are not begun."""
    with serving(shm_dir / "s", threads=2, waiting_calls=3) as (service, _), way(shm_dir / "s") as channel:
        wait = unary(channel, "wait_silently")

        def outcome(number: int) -> grpc.StatusCode:
            try:
                wait(b"waiting", timeout=SECONDS)
            except grpc.RpcError as error:
                service.release.set()
                return error.code()
            return grpc.StatusCode.OK

        with ThreadPoolExecutor(60) as pool:
            outcomes = list(pool.map(outcome, range(60)))
        assert set(outcomes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert outcomes.count(grpc.StatusCode.OK) == service.begun["waiting"]
        assert unary(channel, "echo")(b"after", timeout=SECONDS) == b"after"


BROKEN: dict[str, tuple[type, str, Any]] = {
    "keeps a connection after a timeout": (Running, "_end", lambda self, **_: self._connections.keep(self._connection)),
    "never ends abandoned streams": (Running, "abandon", lambda self: None),
    "does not cancel": (Connection, "interrupt", lambda self: None),
    "loses the reasons": (HostContext, "set_trailing_metadata", lambda self, metadata: None),
    "runs no callbacks": (HostContext, "end", lambda self: None),
    "runs callbacks again": (HostContext, "end", lambda self: [each() for each in self._callbacks]),
    "believes in callers that are gone": (HostContext, "is_active", lambda self: True),
    "answers a call that was aborted": (HostContext, "failure", lambda self: None),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what they forget to close
@pytest.mark.parametrize("flaw", BROKEN)
def test_the_contract_finds_a_broken_way(flaw: str, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[flaw])
    monkeypatch.setattr("host_service.SECONDS", 1.0)
    failed = []
    for number, check in enumerate(CHECKS):
        try:
            run(check, host_alone, shm_dir / str(number), seconds=1.0)
        except (Exception, pytest.fail.Exception):
            failed.append(check.__name__)
            break
    gc.collect()
    assert failed, f"no check noticed a way that {flaw}"
