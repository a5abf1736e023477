"""`kvblend check` through a running store with a real matcher and a real Redis, and in a stopped store's arena."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from process_kit import Agent, StoreProcess, redis_server
from store_kit import CHUNK, text
from test_store_neighbours import MatcherProcess

from cli.check import run

ROOT = Path(__file__).resolve().parents[2]


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.1)


def check(
    capsys: pytest.CaptureFixture[str], store: str, *, fix: bool = False, token: str = ""
) -> tuple[int, dict[str, Any]]:
    """(exit code, kind -> (how many, repaired))"""
    code = run(store, None, fix=fix, as_json=True, timeout=60, token=token)
    answer = json.loads(capsys.readouterr().out)
    assert not [part["unfinished"] for part in answer["parts"] if part["unfinished"]]
    assert answer["ok"] == (code == 0)
    return code, {item["kind"]: (item["count"], item["fixed"]) for part in answer["parts"] for item in part["findings"]}


def test_what_is_damaged_anywhere_is_found_and_repaired(shm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"unix:{shm_dir}/matcher.sock"
    command = [sys.executable, "-m", "services.matcher", "--listen", target, "--log-level", "error"]
    command += ["--drain-seconds", "0", "--grace-seconds", "0.2", "--log", f"sqlite:{shm_dir}/log.db"]
    matcher = subprocess.Popen(command)
    try:
        with (
            redis_server() as server,
            redis.Redis.from_url(server.unix_url) as client,
            StoreProcess(shm_dir, "--matcher", target, "--redis-url", server.unix_url) as store,
            Agent(store) as agent,
        ):
            for seed in range(6):
                agent.put(text(seed, 3 * CHUNK + seed), f"document {seed}")
            chunks = sum(-(-(3 * CHUNK + seed) // CHUNK) for seed in range(6))
            until(lambda: len(client.keys("*:h")) == chunks and not agent.stats().outbox_events)
            until(lambda: check(capsys, store.target) == (0, {}))

            headers = sorted(client.keys("*:h"))
            client.delete(headers[0])
            parts = [key for key in client.keys(headers[1][:-1] + b"*") if key != headers[1]]
            client.delete(parts[0])
            objects, _ = agent.lookup([*text(5, 3 * CHUNK), 1], want_segments=True)
            agent.view(objects[0].place)[7] ^= 1
            agent.call("EndRequests", request_ids=["r"])

            wrong = {"PAYLOAD_DAMAGED": 1, "L2_MISSING": 1, "L2_TORN": 1}
            assert check(capsys, store.target) == (1, {kind: (count, 0) for kind, count in wrong.items()})
            assert check(capsys, store.target, fix=True)[0] == 0
            assert not client.exists(headers[1])
            until(lambda: check(capsys, store.target)[0] == 0)
    finally:
        matcher.kill()
        matcher.wait(30)


def test_what_only_l2_has_is_found_again_after_the_log_was_lost(
    shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [text(seed, 4 * CHUNK) for seed in range(100)]
    matcher = MatcherProcess(shm_dir)
    try:
        with (
            redis_server() as server,
            StoreProcess(
                shm_dir, "--matcher", matcher.target, "--redis-url", server.unix_url, arena_bytes=1 << 20
            ) as store,
        ):
            with Agent(store) as agent:
                for number, tokens in enumerate(texts):
                    agent.put(tokens, f"document {number}")
                    until(lambda: not agent.stats().l2.queued_writes)
                assert agent.stats().evicted_chunks > 20
                until(lambda: check(capsys, store.target) == (0, {}))

            # The store's next life knows of no change before it.
            store.stop()
            matcher.kill()
            matcher.lose_log()
            matcher.restart()
            store.start()
            with Agent(store) as agent:
                until(lambda: is_in_step(agent))
                lost = check(capsys, store.target)[1]["L2_UNKNOWN"][0]
                assert lost > 20
                assert check(capsys, store.target, fix=True) == (0, {"L2_UNKNOWN": (lost, lost)})
                until(lambda: check(capsys, store.target) == (0, {}))
                _, summary = agent.lookup([7, *texts[0], 1], want_segments=True)
                assert len(summary.segments.chain_hashes) == 4 * 32
    finally:
        matcher.kill()


def is_in_step(agent: Agent) -> bool:
    dependencies = {item.name: item.ready for item in agent.call("PingStore").liveness.dependencies}
    return dependencies["publisher"] and not agent.stats().outbox_events


def test_under_load_there_is_no_false_alarm(shm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreProcess(shm_dir) as store:
        stopping = threading.Event()
        failures: list[BaseException] = []

        def load(number: int) -> None:
            try:
                with Agent(store) as agent:
                    for turn in range(1_000_000):
                        if stopping.is_set():
                            return
                        tokens = text(100 * turn + number, 8 * CHUNK + turn % 5)
                        agent.put(tokens)
                        objects, _ = agent.lookup([*tokens, 1], request=str(turn))
                        agent.retrieve(objects, str(turn))
                        agent.call("EndRequests", request_ids=[str(turn)])
            except BaseException as error:
                failures.append(error)

        users = [threading.Thread(target=load, args=(number,)) for number in range(2)]
        for user in users:
            user.start()
        with Agent(store) as watcher:
            until(lambda: watcher.stats().evicted_chunks > 100)
            for turn in range(12):
                assert check(capsys, store.target, fix=turn % 2 == 1) == (0, {})
            stopping.set()
            for user in users:
                user.join()
            assert not failures
            assert watcher.stats().checksum_failures == 0


def test_the_command_tells_people_what_is_wrong_and_what_to_do(shm_dir: Path) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from cli.main import main; main()", "check", *arguments],
            capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
        )  # fmt: skip

    with StoreProcess(shm_dir) as store:
        with Agent(store) as agent:
            agent.put(text(1, 2 * CHUNK))
            objects, _ = agent.lookup([*text(1, 2 * CHUNK), 1])
            agent.view(objects[0].place)[0] ^= 1
        online = command("--store", store.target)
        assert online.returncode == 1
        assert "objects whose KV bytes differ from their checksum: 1 (chunk" in online.stdout
        assert "kvblend check --fix repairs" in online.stdout
        refused = command("--arena", str(store.arena))
        assert refused.returncode == 1
        assert "runs: check it through --store" in refused.stderr
        store.stop()
        away = command("--store", store.target)
        assert away.returncode == 1
        assert "cannot reach the store" in away.stderr
        assert "Traceback" not in away.stderr
        assert command("--arena", str(store.arena)).returncode == 1
        mended = command("--arena", str(store.arena), "--fix")
        assert mended.returncode == 0
        assert "nothing is left" in mended.stdout
        assert command("--arena", str(store.arena)).stdout.endswith("everything agrees\n")
        store.start()
        with Agent(store) as agent:
            assert agent.lookup([*text(1, 2 * CHUNK), 1])[1].prefix_tokens == 0


def test_a_repair_needs_the_right_to_clear_everything(shm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = json.dumps({"of-a": ["a"], "of-all": ["*"]})
    with StoreProcess(shm_dir, "--tenant-tokens", tokens) as store:
        with Agent(store, tenant="b", token="of-all") as agent:
            agent.put(text(1, CHUNK))
        assert check(capsys, store.target) == (0, {})
        assert check(capsys, store.target, fix=True, token="of-all") == (0, {})
        assert run(store.target, None, fix=True, as_json=False, timeout=60, token="of-a") == 1
        assert "TENANT_NOT_ALLOWED" in capsys.readouterr().err
