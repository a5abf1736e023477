"""`kvblend ping`: exit code, table, JSON and quiet forms."""

import json
import socket

import pytest
from canned_services import Agent, Store, serve, serve_all

from cli.ping import run
from kvblend.v1 import common_pb2

NOBODY = "127.0.0.1:1"


def test_all_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_all() as targets:
        assert run(targets, as_json=False, quiet=False, timeout=5) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["service", "matcher", "store", "agent"]
    assert all("ready" in line and "2 h 5 min" in line for line in lines[1:])


def test_one_that_is_down_is_named_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Store()) as store:
        assert run({"store": store, "agent": NOBODY}, as_json=False, quiet=False, timeout=5) == 1
    output = capsys.readouterr().out
    assert f"cannot reach the agent at {NOBODY}: start it with `kvblend up`" in output


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run({"agent": NOBODY}, as_json=False, quiet=True, timeout=5) == 1
    assert capsys.readouterr() == ("", "")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Agent()) as agent:
        assert run({"agent": agent, "store": NOBODY}, as_json=True, quiet=False, timeout=5) == 1
    answer = json.loads(capsys.readouterr().out)
    agent_answer, store_answer = answer["services"]
    assert not answer["ready"]
    assert agent_answer["ready"]
    assert agent_answer["boot_id"] == "07" * 16
    assert agent_answer["version"] == "0.1.0"
    assert not store_answer["reachable"]
    assert store_answer["detail"]


def test_a_dependency_that_hangs_is_not_fine(capsys: pytest.CaptureFixture[str]) -> None:
    redis = common_pb2.Dependency(name="L2", ready=False, detail="no answer for 3 s")
    with serve(Store(redis)) as store:
        assert run({"store": store}, as_json=False, quiet=False, timeout=5) == 1
    output = capsys.readouterr().out
    assert "not ready" in output
    assert "L2: no answer for 3 s" in output


def test_a_draining_server_is_not_ready() -> None:
    with serve(Store(), serving=False) as store:
        assert run({"store": store}, as_json=False, quiet=True, timeout=5) == 1


def test_another_service_at_the_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Store()) as store:
        assert run({"agent": store}, as_json=False, quiet=False, timeout=5) == 1
    assert "is no kvblend AgentService" in capsys.readouterr().out


def test_one_that_accepts_and_never_answers_ends_at_the_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        assert run({"agent": target}, as_json=False, quiet=False, timeout=0.3) == 1
    assert f"the agent at {target}" in capsys.readouterr().out
