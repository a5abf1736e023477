"""One engine, its documents, and prompts answered twice: by full prefill and through kvblend."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cli.colors import SOURCES
from cli.demo.divergence import mean_divergence
from cli.demo.documents import Document
from cli.demo.loading import source_names
from cli.report.model import Precompute, PromptReport, SegmentPlace, Shortfall, StoredDocument
from cli.report.pieces import build_pieces
from kvblend import Prompt, PromptBuilder
from kvblend.engines.answer import Answer
from kvblend.engines.transformers import TransformersEngine
from kvblend.results import Segment, StoreResult
from kvblend.v1 import common_pb2 as pb

SYSTEM = "You document a code base. Answer from the files given, in one or two sentences."
ANSWER_TOKENS = 32


def kv_bytes_per_token(space: pb.ModelSpace) -> int:
    """K and V of all layers in float32, which the demo runs in."""
    return sum(2 * 4 * group.layers * group.kv_heads * group.head_size for group in space.groups)


@dataclass(frozen=True)
class Asked:
    """What is asked about which documents, in which order."""

    name: str
    question: str
    documents: list[str]


class DemoSession:
    """Asks prompts of `engine` and measures; documents are added once and stay known."""

    def __init__(
        self, engine: TransformersEngine, tokenizer: Any, recompute: float, answer_tokens: int = ANSWER_TOKENS
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._recompute = recompute
        self._answer_tokens = answer_tokens
        self.builder = PromptBuilder(tokenizer, SYSTEM)
        # What could not be stored, and why.
        self.problems: list[StoreResult] = []

    def add(self, document: Document) -> int:
        """Tokenises a document, without storing it; returns how many tokens it has."""
        return len(self.builder.add_document(document.name, document.text))

    def precompute(self, documents: Sequence[Document]) -> Precompute:
        """Computes and stores each document behind the shared prefix, and the prefix itself."""
        start = time.perf_counter()
        stored = []
        prefix = self.builder.prefix
        self.problems = [self._engine.store_prompt(prefix)]
        for document in documents:
            tokens = self.builder.documents[document.name]
            self.problems.append(self._engine.precompute(tokens, document.name, context=prefix))
            stored.append(StoredDocument(document.name, len(tokens), first_position=len(prefix)))
        self.problems = [result for result in self.problems if not result.ok]
        total = sum(document.tokens for document in stored) + len(prefix)
        return Precompute(stored, time.perf_counter() - start, total * kv_bytes_per_token(self._engine.space))

    def warm_up(self, asked: Asked) -> None:
        """Runs both ways once, unmeasured: first calls pay for thread pools and lazy initialisation."""
        prompt = self.builder.build(asked.documents, asked.question)
        self._engine.full_prefill(prompt.tokens, max_new_tokens=1, question_tokens=prompt.question[1])
        self._engine.answer(prompt.tokens, max_new_tokens=1, question_tokens=prompt.question[1])

    def ask(self, asked: Asked, *, store_first: bool = False, unrepaired: bool = True) -> PromptReport:
        """Answers one prompt both ways. `store_first` keeps the full prefill's KV before kvblend is asked."""
        prompt = self.builder.build(asked.documents, asked.question)
        question = prompt.question[1]
        full = self._engine.full_prefill(prompt.tokens, max_new_tokens=self._answer_tokens, question_tokens=question)
        if store_first:
            self._engine.store_prompt(prompt.tokens)
        blended = self._engine.answer(
            prompt.tokens, max_new_tokens=self._answer_tokens, recompute=self._recompute, question_tokens=question
        )
        without = None
        if unrepaired:
            plain = self._engine.answer(prompt.tokens, max_new_tokens=0, recompute=0.0, question_tokens=question)
            without = mean_divergence(full.logits, plain.logits)
        report = self._report(asked, prompt, full, blended)
        report.klq_without_recompute = without
        report.check()
        return report

    def _report(self, asked: Asked, prompt: Prompt, full: Answer, blended: Answer) -> PromptReport:
        sources = source_names(blended.sources)
        counts = {name: sources.count(name) for name in SOURCES}
        tokens = prompt.tokens.tolist()
        return PromptReport(
            name=asked.name,
            question=asked.question,
            documents=list(asked.documents),
            tokens_total=len(tokens),
            tokens_prefix=counts["prefix"],
            tokens_segment=counts["segment"],
            tokens_recomputed=counts["recomputed"],
            tokens_new=counts["new"],
            ttft_full_ms=full.ttft_ms,
            ttft_kvblend_ms=blended.ttft_ms,
            klq=mean_divergence(full.logits, blended.logits),
            klq_without_recompute=None,
            false_matches=self._false_matches(prompt, blended),
            answer_full=self._decode(full),
            answer_kvblend=self._decode(blended),
            degraded=_degraded(blended),
            pieces=build_pieces(tokens, sources, _document_of_token(prompt), self._tokenizer.decode),
            shortfalls=_shortfalls(blended),
            lookup_ms=blended.lookup_ms,
            retrieve_ms=blended.retrieve_ms,
            compute_ms=blended.compute_ms,
            segments=[
                SegmentPlace(s.query_position, s.stored_position, s.length, s.document) for s in _segments(blended)
            ],
        )

    def _false_matches(self, prompt: Prompt, answer: Answer) -> int:
        """Segments whose stored tokens are not the prompt's: compared here with the documents themselves."""
        return sum(not self._is_true(prompt, segment) for segment in _segments(answer))

    def _is_true(self, prompt: Prompt, segment: Segment) -> bool:
        document = self.builder.documents.get(segment.document)
        if document is None:
            return False
        first = segment.stored_position - len(self.builder.prefix)
        stored = document[first : first + segment.length]
        asked = prompt.tokens[segment.query_position : segment.query_position + segment.length]
        return first >= 0 and np.array_equal(stored, asked)

    def _decode(self, answer: Answer) -> str:
        return str(self._tokenizer.decode(answer.tokens, skip_special_tokens=True)).strip()


def _segments(answer: Answer) -> Sequence[Segment]:
    return answer.lookup.segments if answer.lookup else ()


def _shortfalls(answer: Answer) -> list[Shortfall]:
    """Why tokens were not reused: not found, or found and then not to be had."""
    found = answer.lookup.shortfalls if answer.lookup else ()
    shortfalls = [Shortfall(s.reason, s.tokens, s.detail) for s in found]
    return shortfalls + [Shortfall(reason, length, f"from token {first}") for first, length, reason in answer.failed]


def _degraded(answer: Answer) -> str | None:
    """Why the cache could not do its part; None if it did."""
    if answer.lookup is not None and not answer.lookup.ok:
        return answer.lookup.reason
    if answer.failed:
        return answer.failed[0][2]
    down = [s.reason for s in _shortfalls(answer) if s.reason.endswith(("_UNAVAILABLE", "DEADLINE", "_LOST"))]
    return down[0] if down else None


def _document_of_token(prompt: Prompt) -> list[str]:
    names = [""] * len(prompt.tokens)
    for name, first, length in prompt.parts:
        names[first : first + length] = [name] * length
    return names
