"""`kvblend explain` against an agent on a real socket: asks once, gives the leases back, registers nothing."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cli import explain
from cli.report.model import Shortfall
from kvblend.v1 import agent_pb2, agent_pb2_grpc
from kvblend.v1 import common_pb2 as pb
from services.common.errors import KvblendError, abort
from services.common.tokens import encode_u32

STORED = 5


class FakeAgent(agent_pb2_grpc.AgentServiceServicer):  # type: ignore[misc]
    """Finds whatever lies from the fifth token on, up to the last."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.open: set[str] = set()
        self.instances = [agent_pb2.InstanceStats(instance_id="engine-1", display_name="tiny-words")]
        self.failure = ""

    def PingAgent(self, request: object, context: grpc.ServicerContext) -> agent_pb2.PingAgentResponse:
        return agent_pb2.PingAgentResponse(liveness=pb.Liveness(service="agent"))

    def GetAgentStats(self, request: object, context: grpc.ServicerContext) -> agent_pb2.GetAgentStatsResponse:
        return agent_pb2.GetAgentStatsResponse(instances=self.instances)

    def EngineSession(self, requests: object, context: grpc.ServicerContext) -> Iterator[object]:
        self.calls.append("EngineSession")
        yield from ()

    def Lookup(
        self, request: agent_pb2.AgentServiceLookupRequest, context: grpc.ServicerContext
    ) -> agent_pb2.AgentServiceLookupResponse:
        self.calls.append("Lookup")
        self.open.add(request.request.request_id)
        if self.failure:
            abort(context, KvblendError(self.failure, "made to fail"))
        total = len(np.frombuffer(request.tokens, dtype="<u4"))
        if total <= STORED + 1:
            shortfalls = [pb.Shortfall(reason=pb.REASON_UNKNOWN_TEXT, tokens=total)]
            return agent_pb2.AgentServiceLookupResponse(answer=agent_pb2.LookupAnswer(shortfalls=shortfalls))
        answer = agent_pb2.LookupAnswer(
            state=agent_pb2.LOOKUP_STATE_DONE,
            prefix_tokens=2,
            segments=pb.SegmentColumns(
                query_positions=encode_u32([STORED]),
                stored_positions=encode_u32([900]),
                lengths=encode_u32([total - STORED - 1]),
                context_classes=bytes([pb.CONTEXT_CLASS_ALONE]),
                document_indexes=encode_u32([0]),
                documents=["notes"],
            ),
            shortfalls=[pb.Shortfall(reason=pb.REASON_LAST_TOKEN, tokens=1)],
        )
        return agent_pb2.AgentServiceLookupResponse(answer=answer)

    def EndSession(
        self, request: agent_pb2.EndSessionRequest, context: grpc.ServicerContext
    ) -> agent_pb2.EndSessionResponse:
        self.open.discard(request.request_id)
        return agent_pb2.EndSessionResponse()


@pytest.fixture
def agent() -> Iterator[tuple[FakeAgent, str]]:
    fake = FakeAgent()
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        agent_pb2_grpc.add_AgentServiceServicer_to_server(fake, server)
        checks = health.HealthServicer()
        checks.set("readiness", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield fake, f"127.0.0.1:{port}"
        server.stop(0).wait()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny-words"
    vocabulary = {word: number for number, word in enumerate(["?", *"abcdefghij"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


def write(folder: Path, content: object, name: str = "prompt.txt") -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def test_a_plain_text_is_explained_and_its_leases_given_back(
    agent: tuple[FakeAgent, str], words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, target = agent
    assert explain.run(write(tmp_path, "a b c d e f g h i j"), target, words, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "prompt.txt, as engine-1 would answer it: 10 tokens" in shown
    assert "notes" in shown
    assert "900" in shown
    assert "The last token is always computed" in shown
    assert "\x1b" not in shown
    assert fake.calls == ["Lookup"]
    assert not fake.open


def test_json_output_is_the_agents_answer(
    agent: tuple[FakeAgent, str], words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.run(write(tmp_path, "a b c d e f g h"), agent[1], words, as_json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["tokens"], data["prefix_tokens"], data["instance"]) == (8, 2, "engine-1")
    assert data["segments"] == [{"query_position": 5, "stored_position": 900, "length": 2, "document": "notes"}]
    assert data["shortfalls"] == [{"reason": "LAST_TOKEN", "tokens": 1, "detail": ""}]


def test_documents_are_shown_under_their_own_names(
    agent: tuple[FakeAgent, str], words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {
        "documents": [{"name": "one.txt", "text": "a b c d"}, {"name": "two.txt", "text": "e f"}],
        "question": "g",
    }
    assert explain.run(write(tmp_path, content, "prompt.json"), agent[1], words, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "── one.txt · 4 tokens" in shown
    assert "── two.txt · 2 tokens" in shown


def test_a_plain_text_without_reuse_hears_of_the_seams(
    agent: tuple[FakeAgent, str], words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.run(write(tmp_path, "a b c"), agent[1], words, as_json=False) == 0
    assert "the commonest reason for no reuse" in " ".join(capsys.readouterr().out.split())
    content = {"documents": [{"name": "one", "text": "a"}], "question": "b"}
    assert explain.run(write(tmp_path, content, "prompt.json"), agent[1], words, as_json=False) == 0
    assert "the commonest reason for no reuse" not in " ".join(capsys.readouterr().out.split())


def test_case_67_a_store_that_is_down_is_named_as_the_reason(
    agent: tuple[FakeAgent, str], words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, target = agent
    fake.failure = "STORE_UNAVAILABLE"
    assert explain.run(write(tmp_path, "a b c"), target, words, as_json=False) == 0
    assert "The store did not answer" in capsys.readouterr().out
    assert not fake.open


def test_other_failures_are_one_line(
    agent: tuple[FakeAgent, str], words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, target = agent
    fake.failure = "PROMPT_TOO_LONG"
    assert explain.run(write(tmp_path, "a b c"), target, words, as_json=False) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "PROMPT_TOO_LONG" in captured.err


def test_an_agent_that_is_not_there_is_one_line(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "a b c")
    assert explain.run(file, f"unix:{tmp_path}/nobody.sock", words, as_json=False) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "kvblend up" in error


def stats(*names: str) -> list[agent_pb2.InstanceStats]:
    return [agent_pb2.InstanceStats(instance_id=f"id-{name}", display_name=name) for name in names]


def test_the_instance_that_serves_the_model_is_asked() -> None:
    model = Path("/models/smollm2")
    assert explain.choose_instance(stats("llama", "SmolLM2-135M"), model, "", "t") == ("id-SmolLM2-135M", "")
    assert explain.choose_instance(stats("llama", "smollm2"), model, "id-llama", "t") == ("id-llama", "")
    chosen, note = explain.choose_instance(stats("llama"), model, "", "t")
    assert chosen == "id-llama"
    assert "llama" in note
    for instances, wanted in ((stats(), ""), (stats("a", "b"), ""), (stats("a"), "id-x")):
        with pytest.raises(explain.CannotExplain):
            explain.choose_instance(instances, model, wanted, "t")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", ""),
        ("a.txt", " \n"),
        ("a.json", "no json"),
        ("a.json", "[1]"),
        ("a.json", '{"documents": [], "question": "q"}'),
        ("a.json", '{"documents": [{"name": "n"}], "question": "q"}'),
        ("a.json", '{"documents": [{"name": "n", "text": 3}], "question": "q"}'),
        ("a.json", '{"documents": [{"name": "n", "text": "t"}]}'),
        ("a.json", '{"documents": [{"name":"n","text":"t"}, {"name":"n","text":"u"}], "question": "q"}'),
        ("a.txt", '{"documents": 3, "question": "q"}'),
    ],
)
def test_files_that_say_nothing_are_refused_with_a_reason(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(explain.CannotExplain, match=name):
        explain.read_question(write(tmp_path, content, name))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(explain.CannotExplain, match="cannot read"):
        explain.read_question(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(explain.CannotExplain, match="UTF-8"):
        explain.read_question(tmp_path / "binary")


def test_source_code_that_begins_with_a_brace_is_plain_text(tmp_path: Path) -> None:
    assert explain.read_question(write(tmp_path, '{"a": 1}')).plain
    assert explain.read_question(write(tmp_path, "{ int x; }")).plain


def test_nothing_stored_is_not_blamed_on_the_seams() -> None:
    question = explain.Question(text="a")
    nothing = explain.Explained(0, [], [Shortfall("NOTHING_STORED", 9)])
    assert not explain._seams_likely(question, nothing, 9)
