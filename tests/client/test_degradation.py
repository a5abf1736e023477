"""Whatever is wrong with the cache, a verb answers "not cached" with a reason, in time."""

import threading
import time

import grpc
import numpy as np
import pytest

from kvblend import KvblendClient
from kvblend.connection import Connection
from kvblend.v1 import agent_pb2, agent_pb2_grpc
from kvblend.v1 import common_pb2 as pb

TOKENS = np.arange(100, dtype=np.uint32)
VERBS = {
    "lookup": lambda client: client.lookup(TOKENS, "r", timeout=1),
    "get_lookup": lambda client: client.get_lookup("r", timeout=1),
    "release_lookup": lambda client: client.release_lookup("r", timeout=1),
    "retrieve": lambda client: client.retrieve("r", timeout=1),
    "store": lambda client: client.store(TOKENS, "r", timeout=1),
    "end_session": lambda client: client.end_session("r", timeout=1),
    "clear": lambda client: client.clear(pb.ClearScope(everything=True), timeout=1),
    "score": lambda client: client.score(TOKENS, timeout=1),
    "get_format": lambda client: client.get_format(timeout=1),
    "ping": lambda client: client.ping(timeout=1),
    "report_block_allocation": lambda client: client.report_block_allocation([], timeout=1),
    "register_kv_cache": lambda client: client.register_kv_cache(pb.ModelSpace(), [], agent_pb2.KvLayout(), timeout=1),
    "register_rope": lambda client: client.register_rope([], [], timeout=1),
    "prove_layout": lambda client: client.prove_layout(1, [1]),
    "unregister_kv_cache": lambda client: client.unregister_kv_cache(timeout=1),
}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_case_72_without_an_agent_every_verb_answers_not_cached(verb: str) -> None:
    client = KvblendClient("127.0.0.1:1", "engine")
    try:
        result = VERBS[verb](client)
        assert not result.ok
        assert result.reason == "AGENT_UNAVAILABLE"
        assert client.failures["AGENT_UNAVAILABLE"] >= 1
    finally:
        client.close()


def test_a_failed_lookup_says_why_none_of_its_tokens_is_reused() -> None:
    client = KvblendClient("127.0.0.1:1", "engine")
    try:
        result = client.lookup(TOKENS, "r", timeout=1)
        assert (result.covered_tokens, result.shortfalls[0].tokens) == (0, len(TOKENS))
    finally:
        client.close()


def test_a_call_after_close_is_not_cached() -> None:
    client = KvblendClient("127.0.0.1:1", "engine")
    client.close()
    assert client.ping().reason == "AGENT_UNAVAILABLE"


class Agent(agent_pb2_grpc.AgentServiceServicer):
    """An agent that hangs in lookups and forgets its instances at will."""

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.registers = threading.Event()
        self.registers.set()
        self.boot_id = b"1" * 16
        self.holds_sessions = threading.Event()
        self.holds_sessions.set()

    def PingAgent(self, request, context):  # type: ignore[no-untyped-def]
        return agent_pb2.PingAgentResponse()

    def EngineSession(self, requests, context):  # type: ignore[no-untyped-def]
        for _ in requests:
            self.holds_sessions.wait(10)
            yield agent_pb2.EngineSessionResponse(boot_id=self.boot_id)

    def RegisterKvCache(self, request, context):  # type: ignore[no-untyped-def]
        self.registers.wait(10)
        self.registered.append(request.instance_id)
        return agent_pb2.RegisterKvCacheResponse(boot_id=self.boot_id)

    def Lookup(self, request, context):  # type: ignore[no-untyped-def]
        time.sleep(3)
        return agent_pb2.AgentServiceLookupResponse()

    def GetFormat(self, request, context):  # type: ignore[no-untyped-def]
        if not self.registered:
            context.set_trailing_metadata((("kvblend-reason", "UNKNOWN_INSTANCE"),))
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown instance")
        return agent_pb2.GetFormatResponse(chunk_tokens=16)


@pytest.fixture
def agent():  # type: ignore[no-untyped-def]
    from concurrent.futures import ThreadPoolExecutor

    servicer = Agent()
    server = grpc.server(ThreadPoolExecutor(8))
    agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)
    servicer.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer
    server.stop(0).wait(5)


def test_a_hung_agent_costs_no_more_than_the_deadline(agent) -> None:  # type: ignore[no-untyped-def]
    client = KvblendClient(f"127.0.0.1:{agent.port}", "engine")
    try:
        assert client.lookup(TOKENS, "r", timeout=0.3).reason == "DEADLINE"
    finally:
        client.close()


def test_case_8_an_agent_that_forgot_the_instance_is_told_again_by_the_next_call(agent) -> None:  # type: ignore[no-untyped-def]
    client = KvblendClient(f"127.0.0.1:{agent.port}", "engine")
    try:
        assert client.register_kv_cache(pb.ModelSpace(), [], agent_pb2.KvLayout())
        agent.registered.clear()
        assert client.get_format().chunk_tokens == 16
        assert agent.registered == ["engine"]
    finally:
        client.close()


def test_a_slow_registration_costs_a_call_no_more_than_its_time_and_is_made_once(agent) -> None:  # type: ignore[no-untyped-def]
    """Of an agent that has forgotten the instance: an engine's lookups go on as plain prefill meanwhile."""
    client = KvblendClient(f"127.0.0.1:{agent.port}", "engine")
    try:
        assert client.register_kv_cache(pb.ModelSpace(), [], agent_pb2.KvLayout())
        agent.registered.clear()
        agent.registers.clear()
        assert [client.get_format(timeout=0.2).reason for _ in range(3)] == ["UNKNOWN_INSTANCE"] * 3
        assert not agent.registered
        agent.registers.set()
        limit = time.monotonic() + 10
        while not agent.registered and time.monotonic() < limit:
            time.sleep(0.01)
        assert client.get_format(timeout=10).chunk_tokens == 16
        assert agent.registered == ["engine"]
    finally:
        client.close()


def test_an_engine_is_registered_when_the_agent_would_notice_its_end(agent) -> None:  # type: ignore[no-untyped-def]
    """Its memory would stay mapped, else, after an engine that is killed early."""
    agent.holds_sessions.clear()
    client = KvblendClient(f"127.0.0.1:{agent.port}", "engine")
    try:
        assert client.register_kv_cache(pb.ModelSpace(), [], agent_pb2.KvLayout(), timeout=0.5).detail == (
            "no session with the agent"
        )
        assert client.get_format().reason == "UNKNOWN_INSTANCE"
        assert not agent.registered
        agent.holds_sessions.set()
        assert client.register_kv_cache(pb.ModelSpace(), [], agent_pb2.KvLayout())
    finally:
        client.close()


def test_case_65_an_engine_may_be_first_and_is_registered_when_the_agent_comes() -> None:
    from concurrent.futures import ThreadPoolExecutor

    probe = grpc.server(ThreadPoolExecutor(1))
    port = probe.add_insecure_port("127.0.0.1:0")
    probe.stop(0).wait(5)
    client = KvblendClient(f"127.0.0.1:{port}", "engine")
    assert not client.register_kv_cache(pb.ModelSpace(), [], agent_pb2.KvLayout(), timeout=1)
    servicer = Agent()
    server = grpc.server(ThreadPoolExecutor(8))
    agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        deadline = time.monotonic() + 30
        while not servicer.registered and time.monotonic() < deadline:
            time.sleep(0.05)
        assert servicer.registered
    finally:
        client.close()
        server.stop(0).wait(5)


def test_every_call_of_the_connection_has_a_deadline() -> None:
    """`call` cannot be used without a timeout: it is a positional argument."""
    connection = Connection("127.0.0.1:1", "engine", None, lambda _: True)
    try:
        with pytest.raises(TypeError):
            connection.call(connection.stub.PingAgent, agent_pb2.PingAgentRequest())  # type: ignore[call-arg]
    finally:
        connection.close()
