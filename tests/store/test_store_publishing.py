"""A store process and model matchers: what it publishes, and what it says of itself when that does not work."""

import time
from collections.abc import Callable
from pathlib import Path

from matcher_model import ModelLog, ModelMatcher, serving
from process_kit import Agent, StoreProcess
from store_kit import CHUNK, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, store_pb2
from services.common.errors import KvblendError
from services.store.publishing.changes import Cleared, batches_of


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at, "it never came true"
        time.sleep(0.02)


def trouble(agent: Agent) -> str:
    """What the store says of its publishing; empty if it is well."""
    answer = agent.call("PingStore")
    found = {item.name: item for item in answer.liveness.dependencies}
    assert set(found) == {"keeper", "matcher", "publisher"}
    assert found["publisher"].ready == (not found["publisher"].detail)
    detail: str = found["publisher"].detail
    return detail


def test_the_log_has_what_the_store_holds_whichever_replica_is_there_and_after_a_kill(shm_dir: Path) -> None:
    log = ModelLog()
    first, second = shm_dir / "1.sock", shm_dir / "2.sock"
    store = StoreProcess(shm_dir, "--matcher", f"unix:{first},unix:{second}")
    with serving(ModelMatcher(log), second):
        with serving(ModelMatcher(log), first), store, Agent(store, tenant="a") as agent:
            agent.put(text(1, 3 * CHUNK), "d")
            eventually(lambda: len(log.owned("t")) == 3)
            assert {(added.info.tenant, added.info.document) for added in log.owned("t").values()} == {("a", "d")}
            eventually(lambda: not trouble(agent))
            before = log.streams()["t"]
            store.kill()
        with store, Agent(store, tenant="a") as agent:
            eventually(lambda: log.streams()["t"][0] > before[0])
            eventually(lambda: len(log.owned("t")) == 3)
            agent.call("Clear", scope=pb.ClearScope(tenant="a"), force=True)
            eventually(lambda: log.owned("t") == {})


def test_a_log_that_is_away_is_named_and_costs_nothing_but_news(shm_dir: Path) -> None:
    model = ModelMatcher()
    with serving(model, shm_dir / "m.sock") as address, StoreProcess(shm_dir, "--matcher", address) as store:
        with Agent(store) as agent:
            eventually(lambda: not trouble(agent))
            model.refusal = KvblendError("LOG_UNAVAILABLE", "redis is away")
            agent.put(text(1, CHUNK))
            eventually(lambda: "LOG_UNAVAILABLE: redis is away" in trouble(agent))
            assert agent.lookup([*text(1, CHUNK), 1], want_segments=True)[1].prefix_tokens == CHUNK
            stats: store_pb2.GetStoreStatsResponse = agent.call("GetStoreStats")
            assert stats.outbox_events == 1
            model.refusal = None
            eventually(lambda: not trouble(agent) and len(model.log.owned("t")) == 1)


def test_a_store_whose_name_was_taken_says_so_and_serves_on(shm_dir: Path) -> None:
    model = ModelMatcher()
    with serving(model, shm_dir / "m.sock") as address, StoreProcess(shm_dir, "--matcher", address) as store:
        with Agent(store) as agent:
            eventually(lambda: not trouble(agent))
            taken = matcher_pb2.PublishRequest(
                store="t", epoch=1 << 62, first_sequence=1, batches=batches_of([Cleared("")])
            )
            model.log.publish(taken)
            eventually(lambda: "another process has taken over the name 't'" in trouble(agent))
            agent.put(text(1, CHUNK))
            assert agent.lookup([*text(1, CHUNK), 1])[1].prefix_tokens == CHUNK
            assert model.log.owned("t") == {}
