"""Lookups from start to end: joining, superseding, releasing, and what happens when something is away."""

import threading
import time

import pytest
from agent_rig import INSTANCE, SHAPE, CallFailed, Rig, blocks, encode, failures, ranges, running_agent
from engine_memory import EngineMemory
from fake_store import FakeStore

from kvblend.host_calls import host_channel
from kvblend.results import Segments
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import agent_pb2_grpc
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store

TEXT = list(range(100, 140))
STORED = blocks(*range(10))
OTHER = blocks(*range(10, 22))


@pytest.fixture
def stored(rig: Rig) -> Rig:
    """TEXT is stored and is the prefix that the store will answer with."""
    rig.store(TEXT, STORED)
    rig.fake.serve_prefix(3)
    return rig


def get(rig: Rig, request_id: str = "r", wait_ms: int = 0) -> pb.LookupAnswer:
    request = pb.GetLookupRequest(instance_id=INSTANCE, request_id=request_id, wait_ms=wait_ms)
    return rig.call("GetLookup", request).answer


def ended_calls(rig: Rig, method: str) -> int:
    latencies = rig.call("GetAgentStats", pb.GetAgentStatsRequest()).latencies
    return sum(latency.count for latency in latencies if latency.name == method)


def shortfalls(answer: pb.LookupAnswer) -> list[tuple[str, int]]:
    return [(common.Reason.Name(item.reason).removeprefix("REASON_"), item.tokens) for item in answer.shortfalls]


def test_the_same_request_joins_and_reads_one_answer(stored: Rig) -> None:
    first = stored.lookup(TEXT, attempt=3)
    stored.fake.serve_prefix(1)
    assert stored.lookup(TEXT, attempt=3) == first == get(stored) == get(stored)
    assert (first.prefix_tokens, first.state, first.request.attempt) == (40, pb.LOOKUP_STATE_DONE, 3)
    assert len(stored.fake.named("Lookup")) == 1


def test_case_49_a_lookup_needs_one_call_and_a_started_one_two(stored: Rig) -> None:
    slow = threading.Event()
    stored.fake.before["Lookup"] = lambda _: slow.wait(5)
    answer = stored.lookup(TEXT, no_wait=True)
    assert (answer.state, answer.prefix_tokens) == (pb.LOOKUP_STATE_RUNNING, 0)
    assert get(stored).state == pb.LOOKUP_STATE_RUNNING
    slow.set()
    assert get(stored, wait_ms=4000).prefix_tokens == 40


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"text": [*TEXT, 7]}, {"accept_blended": True}])
def test_a_newer_attempt_or_other_tokens_supersede(stored: Rig, changes: dict[str, object]) -> None:
    slow = threading.Event()
    stored.fake.before["Lookup"] = lambda _: slow.wait(5)
    old: list[str] = []

    def first() -> None:
        try:
            stored.lookup(TEXT)
        except CallFailed as error:
            old.append(str(error))

    waiter = threading.Thread(target=first)
    waiter.start()
    stored.wait_for(lambda: len(stored.fake.named("Lookup")) == 1)
    del stored.fake.before["Lookup"]
    newer = {"text": TEXT} | changes
    assert stored.lookup(**newer).prefix_tokens == 40
    slow.set()
    waiter.join(5)
    assert old[0].startswith("SUPERSEDED")
    # The old one's leases ended before the new one's began.
    assert called(stored.fake, "Lookup", "EndRequests") == ["Lookup", "EndRequests", "Lookup"]


def called(fake: FakeStore, *names: str) -> list[str]:
    return [name for name, _ in fake.calls if name in names]


def test_an_older_attempt_is_refused(stored: Rig) -> None:
    stored.lookup(TEXT, attempt=2)
    with pytest.raises(CallFailed, match="SUPERSEDED"):
        stored.lookup(TEXT, attempt=1)
    for attempt in (1, 3):
        with pytest.raises(CallFailed, match="SUPERSEDED"):
            stored.retrieve(OTHER, attempt=attempt)
    assert ranges(stored.retrieve(OTHER, attempt=2).written) == [(0, 40)]


def test_case_01_ending_before_the_retrieve_gives_everything_back(stored: Rig) -> None:
    stored.lookup(TEXT)
    assert stored.ping().oldest_lease_ms >= 0
    stored.end()
    stored.wait_for(lambda: len(stored.fake.named("EndRequests")) == 1)
    for attempt in (lambda: get(stored), lambda: stored.retrieve(OTHER)):
        with pytest.raises(CallFailed, match="UNKNOWN_REQUEST"):
            attempt()


def test_case_03_ending_twice_or_first_or_for_nobody_is_nothing(stored: Rig) -> None:
    stored.end()
    stored.lookup(TEXT)
    stored.end()
    stored.end()
    stored.call("EndSession", pb.EndSessionRequest(instance_id="nobody", request_id="r"))
    stored.wait_for(lambda: len(stored.fake.named("EndRequests")) == 1)
    assert stored.lookup(TEXT).prefix_tokens == 40


def test_ending_while_the_lookup_runs_ends_it(stored: Rig) -> None:
    """While the store's answer, which takes longer than anybody waits here, is still to come."""
    slow = threading.Event()
    stored.fake.before["Lookup"] = lambda _: slow.wait(60)
    stored.lookup(TEXT, no_wait=True)
    stored.end()
    try:
        stored.wait_for(lambda: len(stored.fake.named("EndRequests")) == 1)
    finally:
        slow.set()


@pytest.mark.parametrize("over", ["gRPC", "host"])
@pytest.mark.parametrize("method", ["Lookup", "StoreKv"])
def test_what_was_given_up_before_it_began_does_nothing(
    stored: Rig, monkeypatch: pytest.MonkeyPatch, over: str, method: str
) -> None:
    """Its end comes first: an engine has other text in those slots by the time it begins."""
    begins, goes_on = threading.Event(), threading.Event()

    def wait_to_begin(*_: object) -> None:
        begins.set()
        goes_on.wait(10)

    monkeypatch.setattr("services.gpu_agent.service.validate_spans", wait_to_begin)
    name = {"instance_id": INSTANCE, "request": common.RequestKey(request_id="r")}
    requests = {
        "Lookup": pb.AgentServiceLookupRequest(tokens=encode(TEXT), **name),
        "StoreKv": pb.StoreKvRequest(tokens=encode(TEXT[::-1]), slots=OTHER, kind=store.STORE_KIND_PROMPT, **name),
    }
    stored.fake.calls.clear()
    before = ended_calls(stored, method)
    channel = host_channel(stored.target, stored.channel) if over == "host" else stored.channel
    stub = agent_pb2_grpc.AgentServiceStub(channel)
    running = getattr(stub, method).future(requests[method], timeout=10)
    assert begins.wait(10)
    running.cancel()
    stub.EndSession(pb.EndSessionRequest(instance_id=INSTANCE, request_id="r"), timeout=10)
    goes_on.set()
    stored.wait_for(lambda: ended_calls(stored, method) > before)
    assert not stored.fake.named("Lookup")
    assert not stored.fake.named("Commit")
    assert not stored.call("GetAgentStats", pb.GetAgentStatsRequest()).instances[0].open_requests


def test_ending_during_a_retrieve_stops_it_and_ends_its_copies(stored: Rig) -> None:
    stored.lookup(TEXT)
    stored.fake.before["BeginCopy"] = lambda _: stored.end()
    response = stored.retrieve(OTHER)
    assert failures(response) == [(0, 40, "SUPERSEDED")]
    stored.wait_for(lambda: len(stored.fake.named("EndRequests")) == 1)
    assert called(stored.fake, "EndCopy", "EndRequests") == ["EndCopy", "EndRequests"]


def test_kept_leases_end_with_the_request(stored: Rig) -> None:
    stored.lookup(TEXT)
    stored.retrieve(OTHER, keep_leases=True)
    stored.wait_for(lambda: len(stored.fake.named("EndCopy")) == 1)
    (ended,) = stored.fake.named("EndCopy")
    assert (len(ended.objects), ended.keep) == (3, True)
    stored.end()
    stored.wait_for(lambda: len(stored.fake.named("EndRequests")) == 1)


def test_a_segment_is_dropped_until_the_rope_is_proven(rig: Rig) -> None:
    other = EngineMemory("paged_nhd", SHAPE)
    rig.register(handles=other.handles)
    rig.store(TEXT, STORED)
    rig.fake.serve_segment(5, 0, 40)
    answer = rig.lookup(list(range(60)))
    assert not answer.segments.lengths
    assert ("ROPE_NOT_REGISTERED", 40) in shortfalls(answer)
    rig.wait_for(lambda: [len(request.objects) for request in rig.fake.named("ReleaseLeases")] == [3])
    rig.prove_rope()
    assert [item.length for item in Segments(rig.lookup(list(range(60)), "r2").segments)] == [40]
    # The same engine that only registers again need not prove it again.
    rig.register(handles=other.handles)
    assert [item.length for item in Segments(rig.lookup(list(range(60)), "r3").segments)] == [40]
    other.close()


def test_case_65_without_a_store_the_answer_is_nothing_to_reuse(stored: Rig) -> None:
    stored.fake.stop()
    stored.wait_for(lambda: not stored.ping().liveness.dependencies[0].ready)
    answer = stored.lookup(TEXT)
    assert answer.state == pb.LOOKUP_STATE_DONE
    assert shortfalls(answer) == [("STORE_UNAVAILABLE", 40)]
    assert stored.ping().liveness.dependencies[0].detail
    stored.fake.start()
    stored.wait_ready()
    assert stored.lookup(TEXT, "r2").prefix_tokens == 40


def test_case_29_a_slow_store_costs_the_deadline_and_no_more(stored: Rig) -> None:
    slow = threading.Event()
    stored.fake.before["Lookup"] = lambda _: slow.wait(10)
    answer = stored.lookup(TEXT, timeout=0.3)
    assert shortfalls(answer) == [("DEADLINE", 40)]
    slow.set()


@pytest.mark.parametrize(
    ("reason", "shortfall"), [("OVERLOADED", "STORE_UNAVAILABLE"), ("UNKNOWN_SESSION", "SESSION_LOST")]
)
def test_a_store_s_trouble_is_a_shortfall(stored: Rig, reason: str, shortfall: str) -> None:
    stored.fake.errors["Lookup"] = [reason]
    assert shortfalls(stored.lookup(TEXT)) == [(shortfall, 40)]


def test_a_store_that_forgot_the_model_space_is_told_again_by_a_lookup(stored: Rig) -> None:
    stored.fake.errors["Lookup"] = ["UNKNOWN_MODEL_SPACE"]
    assert stored.lookup(TEXT).prefix_tokens == 40


def test_a_store_that_contradicts_itself_is_not_believed(stored: Rig) -> None:
    stored.fake.summary.prefix_tokens = 39
    with pytest.raises(CallFailed, match="INTERNAL"):
        stored.lookup(TEXT)
    stored.wait_for(lambda: [len(request.objects) for request in stored.fake.named("ReleaseLeases")] == [3])
    with pytest.raises(CallFailed, match="UNKNOWN_REQUEST"):
        get(stored)


def test_segments_that_overlap_are_not_believed(rig: Rig) -> None:
    rig.store(TEXT, blocks(*range(10)))
    rig.fake.serve_segment(3, 0, 20)
    rig.fake.serve_segment(22, 20, 10)
    with pytest.raises(CallFailed, match="overlap"):
        rig.lookup(TEXT)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": b""}, "EMPTY_PROMPT"),
        ({"tokens": b"123"}, "INVALID_TOKENS"),
        ({"instance_id": "nobody"}, "UNKNOWN_INSTANCE"),
        ({"request": common.RequestKey(request_id="x" * 129)}, "INVALID_ARGUMENT"),
        ({"space": common.Space(model_space_id=b"y" * 16)}, "INVALID_SPACE"),
        ({"opaque_spans": [common.OpaqueSpan(offset=1, length=1)]}, "INVALID_ARGUMENT"),
    ],
)
def test_a_lookup_that_cannot_be_meant_is_refused(rig: Rig, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(CallFailed, match=reason):
        rig.lookup(TEXT, **changes)
    assert not rig.fake.named("Lookup")


def test_every_call_needs_a_deadline(rig: Rig) -> None:
    with pytest.raises(CallFailed, match="DEADLINE_REQUIRED"):
        rig.call("PingAgent", pb.PingAgentRequest(), timeout=None)  # type: ignore[arg-type]


def test_two_engines_may_use_the_same_request_ids(stored: Rig) -> None:
    stored.register(instance_id="engine-2")
    stored.lookup(TEXT)
    stored.lookup(TEXT, instance_id="engine-2")
    names = {request.request.request_id for request in stored.fake.named("Lookup")}
    assert names == {"engine-1/r", "engine-2/r"}


def test_the_oldest_request_is_ended_when_there_are_too_many(fake: FakeStore) -> None:
    with running_agent(fake, max_requests=2) as rig:
        for name in ("a", "b", "c"):
            rig.lookup(TEXT, name)
        rig.wait_for(lambda: [list(item.request_ids) for item in fake.named("EndRequests")] == [["engine-1/a"]])
        with pytest.raises(CallFailed, match="UNKNOWN_REQUEST"):
            get(rig, "a")


def test_numbers_for_people_add_up(stored: Rig) -> None:
    stored.lookup(TEXT)
    stored.retrieve(OTHER, ranges=[pb.TokenRange(length=40), pb.TokenRange(first=39, length=1)])
    allocation = pb.BlockAllocation(request_id="r", block_ids=STORED.block_ids, cached_tokens=3, new_tokens=4)
    stored.call(
        "ReportBlockAllocation", pb.ReportBlockAllocationRequest(instance_id=INSTANCE, allocations=[allocation])
    )
    stats = stored.call("GetAgentStats", pb.GetAgentStatsRequest())
    per_token = 2 * 2 * 2 * 8 * 4
    assert (stats.retrieved_tokens, stats.failed_tokens, stats.device) == (40, 0, "cpu")
    assert stats.retrieved_bytes == stats.stored_bytes == 40 * per_token
    assert "Retrieve" in {item.name for item in stats.latencies}
    one = stats.instances[0]
    assert (one.instance_id, one.rope_proven, one.open_requests, one.allocated_blocks_reported) == (
        INSTANCE,
        True,
        1,
        10,
    )


def test_scores_come_from_the_store(rig: Rig) -> None:
    answer = rig.call("Score", pb.AgentServiceScoreRequest(instance_id=INSTANCE, tokens=b"\1\0\0\0"))
    assert [(item.store, item.prefix_tokens) for item in answer.stores] == [("fake", 16)]
    rig.fake.errors["Score"] = ["MATCHER_UNAVAILABLE"]
    with pytest.raises(CallFailed, match="MATCHER_UNAVAILABLE"):
        rig.call("Score", pb.AgentServiceScoreRequest(instance_id=INSTANCE, tokens=b"\1\0\0\0"))


def test_a_lookup_and_its_end_are_one_call_each_to_the_store(stored: Rig) -> None:
    """However much is found; nothing else is asked or told."""
    stored.fake.serve_prefix(3)
    stored.fake.calls.clear()
    stored.lookup(TEXT)
    stored.end()
    stored.wait_for(lambda: bool(stored.fake.named("EndRequests")))
    assert [name for name, _ in stored.fake.calls if name not in ("PingStore", "Session")] == ["Lookup", "EndRequests"]


def ended(rig: Rig) -> list[str]:
    """What the store was told of, in order."""
    return [name for request in rig.fake.named("EndRequests") for name in request.request_ids]


def test_requests_that_end_together_are_told_in_few_calls_and_each_once(stored: Rig) -> None:
    names = [f"r{number}" for number in range(24)]
    for name in names:
        stored.lookup(TEXT, name)
    # Telling takes a while: what ends meanwhile goes with the next call.
    stored.fake.before["EndRequests"] = lambda _: time.sleep(0.05)
    for name in names:
        stored.end(name)
    stored.wait_for(lambda: len(ended(stored)) >= len(names))
    assert sorted(ended(stored)) == sorted(f"{INSTANCE}/{name}" for name in names)
    assert len(stored.fake.named("EndRequests")) < len(names) / 2


def test_a_request_whose_copy_still_runs_holds_no_other_back(stored: Rig) -> None:
    goes_on = threading.Event()
    stored.lookup(TEXT, "slow")
    stored.lookup(TEXT, "other")
    stored.fake.before["BeginCopy"] = lambda _: goes_on.wait(20)
    copying = threading.Thread(target=lambda: stored.retrieve(OTHER, request_id="slow"))
    copying.start()
    try:
        stored.wait_for(lambda: bool(stored.fake.named("BeginCopy")))
        stored.end("slow")
        stored.end("other")
        stored.wait_for(lambda: ended(stored) == [f"{INSTANCE}/other"])
    finally:
        goes_on.set()
        copying.join(20)
    stored.wait_for(lambda: len(stored.fake.named("EndRequests")) == 2)


def test_ends_are_told_also_after_a_call_that_failed(stored: Rig) -> None:
    stored.fake.errors["EndRequests"] = ["INTERNAL"]
    for number, name in enumerate(("a", "b"), 1):
        stored.lookup(TEXT, name)
        stored.end(name)
        stored.wait_for(lambda wanted=number: len(ended(stored)) == wanted)
    assert stored.lookup(TEXT, "a").prefix_tokens == 40
