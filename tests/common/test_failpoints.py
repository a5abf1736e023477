"""Failpoints: the list is the truth, nothing happens unless asked for, and what is asked for happens once."""

import ast
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from services.common import failpoints
from services.common.errors import KvblendError
from services.common.failpoints import POINTS, VARIABLE, armed, parse, passage

SERVICES = Path(failpoints.__file__).resolve().parent.parent


def points_in_the_code() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in SERVICES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "passage":
                (argument,) = node.args
                assert isinstance(argument, ast.Constant), f"{path}: a point is named in words"
                found[argument.value] += 1
    return found


def test_the_list_is_what_the_code_has() -> None:
    found = points_in_the_code()
    assert set(found) == set(POINTS)
    assert set(found.values()) == {1}, "one name, one place"
    assert all(POINTS.values())


@pytest.mark.parametrize(
    "text",
    [
        "nowhere=kill",
        "commit.state=explode",
        "commit.state",
        "commit.state=kill@0",
        "commit.state=sleep(61)",
        "commit.state=sleep(x)",
        "commit.state=error(NO_SUCH)",
        "commit.state=error",
    ],
)
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(text)


def test_an_armed_point_acts_at_the_passage_that_was_named() -> None:
    with armed("commit.state=raise@2; evict.chunk=error(OVERLOADED); l2.write=sleep(0)") as passages:
        passage("commit.state")
        with pytest.raises(RuntimeError, match=r"commit\.state"):
            passage("commit.state")
        passage("commit.state")
        for _ in range(2):
            with pytest.raises(KvblendError, match="OVERLOADED"):
                passage("evict.chunk")
        passage("l2.write")
        assert passages == {"commit.state": 3, "evict.chunk": 2, "l2.write": 1}
    passage("evict.chunk")


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_process_is_killed_or_stopped(action: str, number: signal.Signals) -> None:
    code = "from services.common.failpoints import passage; passage('copy.begin'); print('went on')"
    environment = os.environ | {VARIABLE: f"copy.begin={action}"}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    if action == "kill":
        assert os.WTERMSIG(status) == number
        child.returncode = -number
        child.communicate()
    else:
        assert os.WSTOPSIG(status) == number
        child.send_signal(signal.SIGCONT)
        assert child.communicate()[0].endswith("went on\n")


def test_a_wrong_setting_ends_the_process_at_start() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import services.common.failpoints"],
        env=os.environ | {VARIABLE: "nowhere=kill"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode
    assert "there is no point 'nowhere'" in ended.stderr
