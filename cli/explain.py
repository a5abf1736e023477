"""`kvblend explain`: where each token's KV of one prompt would come from, and why not more.

Where an engine serves the model, it only observes: it asks for that engine's answer under a request of its own and
gives the leases back. It opens no engine session, as its end would mean to the agent that the engine is gone.
Where none does, it loads the model and answers as `kvblend demo` would.
"""

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.text import Text

from cli.console import make_console
from cli.explain_answer import Explained
from cli.probe import Peer
from cli.report.model import SegmentPlace, Shortfall
from cli.report.pieces import build_pieces, sources_of_lookup, visible
from cli.report.reasons import WORDS, bare_name
from cli.report.terminal import Summary, render
from kvblend.prompt import PromptBuilder
from kvblend.results import Segments
from kvblend.v1 import agent_pb2
from kvblend.v1 import common_pb2 as pb
from services.common.errors import reason_of

__all__ = ["Summary", "render", "run"]

# What `kvblend demo` recomputes unless told otherwise.
EXPECTED_RECOMPUTE = 0.15
_LOOKUP_SECONDS = 5.0
_CALL_SECONDS = 2.0

_SEAMS = (
    "This file is one plain text. Inside it, documents are tokenised together with what stands next to them, so their "
    "tokens can differ from those of the same documents stored on their own: the commonest reason for no reuse. "
    'Give the documents apart, as JSON {"documents": [{"name": ..., "text": ...}], "question": ...}, and let engines '
    "build prompts from the documents' own token ids (kvblend.prompt)."
)
_FORM = 'JSON {"documents": [{"name": ..., "text": ...}, ...], "question": ...}, with "system" if the engine has one'


class CannotExplain(Exception):
    """One line for the person who asked."""


@dataclass(frozen=True)
class Question:
    """What the file holds: plain text, or documents (name, text) with a question."""

    text: str = ""
    documents: tuple[tuple[str, str], ...] = ()
    question: str = ""
    system: str = ""

    @property
    def plain(self) -> bool:
        return not self.documents


def run(file: Path, agent: str, model: Path, as_json: bool, instance: str = "") -> int:
    """0: explained; 1: it could not be, said in one line. `instance`: whose answer; "": the one that serves `model`."""
    peer = Peer("agent", agent)
    try:
        question = read_question(file)
        chosen, note = _choose_instance(peer, model, instance)
        tokenizer = _load_tokenizer(model)
        tokens, owners, question_tokens = tokenise(question, tokenizer)
        answer = _lookup(peer, chosen, tokens) if chosen else _answer(model, agent, tokens, question_tokens)
    except CannotExplain as error:
        make_console(stderr=True).print(Text(f"kvblend explain: {visible(str(error))}"), soft_wrap=True)
        return 1
    finally:
        peer.close()
    if as_json:
        print(json.dumps({"file": str(file), "instance": chosen, "tokens": len(tokens), **asdict(answer)}, indent=2))
        return 0
    sources, found = sources_of_lookup(len(tokens), answer.prefix_tokens, answer.segments, answer.recomputed or ())
    pieces = build_pieces(
        tokens,
        sources,
        [owner or document for owner, document in zip(owners, found, strict=True)],
        lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)),
    )
    notes = [note] if note else []
    if _seams_likely(question, answer, len(tokens)):
        notes.append(_SEAMS)
    expected = EXPECTED_RECOMPUTE if answer.recomputed is None else None
    title = f"{file.name}, as {chosen or model.resolve().name} would answer it"
    summary = Summary(title, answer.segments, expected, notes=notes)
    render(pieces, answer.shortfalls, summary, make_console())
    return 0


def read_question(file: Path) -> Question:
    """Raises CannotExplain with what is wrong with the file."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise CannotExplain(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CannotExplain(f"{file} is not UTF-8 text") from None
    if not text.strip():
        raise CannotExplain(f"{file} is empty")
    try:
        data = json.loads(text) if file.suffix == ".json" or text.lstrip().startswith("{") else None
    except json.JSONDecodeError as error:
        if file.suffix == ".json":
            raise CannotExplain(f"{file} is not JSON ({error}); it must be text, or {_FORM}") from None
        data = None
    if data is None or (file.suffix != ".json" and "documents" not in data):
        return Question(text=text)
    return _documents_of(file, data)


def _documents_of(file: Path, data: Any) -> Question:
    try:
        documents = tuple((item["name"], item["text"]) for item in data["documents"])
        question = Question("", documents, data["question"], data.get("system", ""))
    except (KeyError, TypeError, AttributeError):
        raise CannotExplain(f"{file} must hold text, or {_FORM}") from None
    strings = [question.question, question.system, *(part for document in documents for part in document)]
    if not documents or not all(isinstance(part, str) for part in strings):
        raise CannotExplain(f"{file}: at least one document is needed, and every value must be a string")
    if len(dict(documents)) < len(set(documents)):
        raise CannotExplain(f"{file}: two documents have the same name, but other texts")
    return question


def tokenise(question: Question, tokenizer: Any) -> tuple[list[int], list[str], int]:
    """Token ids; of each the document it belongs to ("" outside of documents, or unknown); the question's tokens."""
    if question.plain:
        tokens = [int(token) for token in tokenizer.encode(question.text)]
        return tokens, [""] * len(tokens), 1
    builder = PromptBuilder(tokenizer, question.system)
    for name, text in question.documents:
        builder.add_document(name, text)
    prompt = builder.build([name for name, _ in question.documents], question.question)
    owners = [""] * len(prompt.tokens)
    for name, first, length in prompt.parts:
        owners[first : first + length] = [name] * length
    return prompt.tokens.tolist(), owners, prompt.question[1]


def _load_tokenizer(model: Path) -> Any:
    if not model.is_dir():
        raise CannotExplain(f"{model} is no folder with a model; `make demo` fetches one, --model names another")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Takes seconds, and only this command needs it.
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CannotExplain(f"{model} has no tokenizer that loads: {str(error).splitlines()[0]}") from None


def _choose_instance(peer: Peer, model: Path, wanted: str) -> tuple[str, str]:
    """The instance to ask for ("": there is none), and a note where that is a guess."""
    probe = peer.probe(_CALL_SECONDS)
    if not probe.reachable:
        raise CannotExplain(probe.detail)
    try:
        instances = list(peer.stub.GetAgentStats(agent_pb2.GetAgentStatsRequest(), timeout=_CALL_SECONDS).instances)
    except grpc.RpcError as error:
        raise CannotExplain(f"the agent at {peer.target} answered {reason_of(error)}: {error.details()}") from None
    return choose_instance(instances, model, wanted, peer.target) if instances or wanted else ("", "")


def _answer(model: Path, agent: str, tokens: Sequence[int], question_tokens: int) -> Explained:
    make_console(stderr=True).print(f"no engine serves {model.resolve().name}: loading the model to answer here")
    from cli.explain_engine import answer_with_model

    return answer_with_model(model, agent, tokens, question_tokens)


def choose_instance(
    instances: Sequence[agent_pb2.InstanceStats], model: Path, wanted: str, target: str
) -> tuple[str, str]:
    """As `_choose_instance`, from what the agent at `target` reports. Raises CannotExplain."""
    if not instances:
        raise CannotExplain(f"no engine is registered with the agent at {target}: start one first")
    names = ", ".join(f"{item.instance_id} ({item.display_name})" for item in instances)
    if wanted:
        if wanted not in {item.instance_id for item in instances}:
            raise CannotExplain(f"the agent at {target} has no instance {wanted}; it has {names}")
        return wanted, ""
    name = model.resolve().name.lower()
    matching = [item for item in instances if name in item.display_name.lower()]
    if matching:
        return matching[0].instance_id, ""
    if len(instances) > 1:
        raise CannotExplain(f"none of the agent's instances serves {name}: {names}")
    only = instances[0]
    return (
        only.instance_id,
        f"The only engine at {target} calls its model {only.display_name!r}; the tokenizer is from {model}. "
        "If they do not belong together, this picture means nothing.",
    )


def _lookup(peer: Peer, instance_id: str, tokens: Sequence[int]) -> Explained:
    request_id = f"explain-{secrets.token_hex(8)}"
    request = agent_pb2.AgentServiceLookupRequest(
        instance_id=instance_id,
        request=pb.RequestKey(request_id=request_id),
        space=pb.Space(),
        tokens=np.asarray(tokens, dtype="<u4").tobytes(),
        want_segments=True,
    )
    try:
        answer = peer.stub.Lookup(request, timeout=_LOOKUP_SECONDS).answer
    except grpc.RpcError as error:
        reason, detail = reason_of(error), error.details() or ""
        if reason not in WORDS:
            raise CannotExplain(f"the agent at {peer.target} answered {reason}: {detail}") from None
        return Explained(0, [], [Shortfall(reason, len(tokens), detail)])
    finally:
        _end(peer, instance_id, request_id)
    segments = [
        SegmentPlace(item.query_position, item.stored_position, item.length, item.document)
        for item in Segments(answer.segments)
    ]
    shortfalls = [
        Shortfall(bare_name(pb.Reason.Name(item.reason)), item.tokens, item.detail) for item in answer.shortfalls
    ]
    return Explained(answer.prefix_tokens, segments, shortfalls)


def _end(peer: Peer, instance_id: str, request_id: str) -> None:
    """Gives the leases back now; if the agent cannot be told, they expire by themselves."""
    request = agent_pb2.EndSessionRequest(instance_id=instance_id, request_id=request_id)
    try:
        peer.stub.EndSession(request, timeout=_CALL_SECONDS)
    except grpc.RpcError:
        return


def _seams_likely(question: Question, answer: Explained, total: int) -> bool:
    """A plain text of which more than half was not found, though something is stored."""
    found = answer.prefix_tokens + sum(place.length for place in answer.segments)
    reasons = {shortfall.reason for shortfall in answer.shortfalls}
    return question.plain and 2 * found < total and "UNKNOWN_TEXT" in reasons
