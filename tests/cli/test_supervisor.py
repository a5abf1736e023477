"""Supervised processes: started in order, restarted with growing pauses, refused in one line, stopped in reverse."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.keeper import Backoff, Change, Keeper, Spec, State
from cli.supervisor import StartFailed, Supervisor

FAKE = Path(__file__).with_name("fake_service.py")
QUICK = Backoff(first=0.05, longest=0.2)


def spec(folder: Path, name: str, mode: str = "serve") -> Spec:
    def is_ready() -> bool:
        """As Ping does: only the process that runs now counts."""
        ready = folder / f"{name}.ready"
        return ready.exists() and is_alive(int(ready.read_text() or 0))

    return Spec(name, [sys.executable, str(FAKE), str(folder), name, mode], folder / "logs" / f"{name}.log", is_ready)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def events(folder: Path, kind: str) -> list[tuple[str, int]]:
    lines = [line.split() for line in (folder / "events").read_text().splitlines()]
    return [(name, int(pid)) for what, name, pid, _ in lines if what == kind]


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.02)


def test_all_become_ready_and_stop_in_reverse_order(tmp_path: Path) -> None:
    changes: list[Change] = []
    specs = [spec(tmp_path, name) for name in ("matcher", "store", "agent")]
    with Supervisor(specs, backoff=QUICK, on_change=changes.append) as supervisor:
        supervisor.wait_ready(20)
        pids = [supervisor.pid(name) for name in ("matcher", "store", "agent")]
        assert set(supervisor.states().values()) == {State.READY}
    assert [name for name, _ in events(tmp_path, "stop")] == ["agent", "store", "matcher"]
    assert not any(is_alive(pid) for pid in pids if pid)
    assert [change.name for change in changes if change.state is State.STOPPED] == ["agent", "store", "matcher"]


def test_a_killed_process_comes_back_under_a_new_pid(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "store")], backoff=QUICK) as supervisor:
        supervisor.wait_ready(20)
        first = supervisor.pid("store")
        supervisor.kill("store")
        supervisor.wait_ready(20)
        second = supervisor.pid("store")
        assert second is not None
        assert second != first
        # A kill from outside, as the kernel's when memory is short.
        os.kill(second, signal.SIGKILL)
        eventually(lambda: supervisor.pid("store") not in (None, second))
        supervisor.wait_ready(20)


def test_killed_for_good_stays_down_until_it_is_started(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "store"), spec(tmp_path, "agent")], backoff=QUICK) as supervisor:
        supervisor.wait_ready(20)
        supervisor.kill("store", restart=False)
        eventually(lambda: supervisor.states()["store"] is State.STOPPED)
        supervisor.wait_ready(5)
        assert supervisor.pid("store") is None
        assert len(events(tmp_path, "start")) == 2
        supervisor.start("store")
        supervisor.wait_ready(20)
        assert supervisor.pid("store") is not None


def test_start_leaves_a_running_process_alone(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "store")], backoff=QUICK) as supervisor:
        supervisor.wait_ready(20)
        pid = supervisor.pid("store")
        supervisor.start("store")
        assert supervisor.pid("store") == pid


def test_one_that_keeps_crashing_is_started_again_with_growing_pauses(tmp_path: Path) -> None:
    changes: list[Change] = []
    backoff = Backoff(first=0.05, longest=0.2, well_after=60)
    with Supervisor([spec(tmp_path, "store", "crash")], backoff=backoff, on_change=changes.append):
        eventually(lambda: len([c for c in changes if c.state is State.WAITING]) >= 4)
    details = [change.detail for change in changes if change.state is State.WAITING]
    assert all("exited with code 3" in detail for detail in details)
    assert [detail.rpartition("in ")[2] for detail in details[:4]] == ["0.1 s", "0.1 s", "0.2 s", "0.2 s"]


def test_a_refused_setting_ends_the_start_with_its_own_line(tmp_path: Path) -> None:
    supervisor = Supervisor([spec(tmp_path, "matcher"), spec(tmp_path, "store", "refuse")], backoff=QUICK)
    with pytest.raises(StartFailed, match="chunk_tokens = 0 is refused") as caught, supervisor:
        supervisor.wait_ready(20)
    assert "some earlier line" not in str(caught.value)
    assert len([name for name, _ in events(tmp_path, "start") if name == "store"]) == 1
    assert not any(is_alive(pid) for _, pid in events(tmp_path, "start"))


def test_a_command_that_does_not_exist_is_a_failed_start(tmp_path: Path) -> None:
    missing = Spec("store", [str(tmp_path / "nothing")], tmp_path / "store.log", lambda: False)
    with pytest.raises(StartFailed, match="cannot start"), Supervisor([missing]) as supervisor:
        supervisor.wait_ready(20)


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "store", "stubborn")], stop_seconds=0.3) as supervisor:
        supervisor.wait_ready(20)
        pid = supervisor.pid("store")
    assert pid is not None
    assert not is_alive(pid)


def test_waiting_for_one_that_never_answers_names_it_and_its_log(tmp_path: Path) -> None:
    silent = Spec("store", spec(tmp_path, "store").command, tmp_path / "store.log", lambda: False)
    with Supervisor([silent, spec(tmp_path, "agent")]) as supervisor:
        eventually(lambda: supervisor.states()["agent"] is State.READY)
        with pytest.raises(TimeoutError, match=r"store; see .*store\.log"):
            supervisor.wait_ready(0.1)


def test_stop_ends_a_process_that_is_between_two_starts(tmp_path: Path) -> None:
    changes: list[Change] = []
    keeper = Keeper(spec(tmp_path, "store", "crash"), Backoff(first=60, longest=60), changes.append)
    keeper.start()
    eventually(lambda: keeper.state is State.WAITING)
    keeper.stop(5)
    assert keeper.state is State.STOPPED
    assert keeper.pid is None


def test_children_learn_who_supervises_them(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "store")]) as supervisor:
        supervisor.wait_ready(20)
        environment = Path(f"/proc/{supervisor.pid('store')}/environ").read_bytes().split(b"\0")
        assert f"KVBLEND_SUPERVISED={os.getpid()}".encode() in environment
        # Not in this process's group: Ctrl-C in a terminal must not reach them before the supervisor.
        assert os.getpgid(supervisor.pid("store") or 0) != os.getpgid(0)


@given(deaths=st.integers(1, 200), first=st.floats(0.01, 1), longest=st.floats(1, 60))
def test_pauses_never_shrink_and_never_exceed_the_longest(deaths: int, first: float, longest: float) -> None:
    backoff = Backoff(first, longest)
    assert first <= backoff.pause(deaths) <= backoff.pause(deaths + 1) <= longest
