"""What blending costs in quality on a real model and real text. KLQ: mean KL to full prefill over the question."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from fake_client import FakeClient
from transformers import AutoTokenizer, LlamaForCausalLM

from kvblend import Prompt, PromptBuilder
from kvblend.blend import ByDeviation, ByInfluence, Source
from kvblend.engines.answer import Answer
from kvblend.engines.transformers import TransformersEngine

SYSTEM = "You answer questions about the documents that the user gives. Be brief, and name the document you used."
SOURCES = ["textwrap.py", "bisect.py", "shlex.py", "sched.py"]
PROSE = ["assignment", "exceptions", "naming"]
QUESTIONS = [
    "Which of these modules splits text like a shell does?",
    "Summarise in two sentences what bisect.py is for.",
]
DOCUMENT_TOKENS = 230


@dataclass(frozen=True)
class Bench:
    engine: TransformersEngine
    client: FakeClient
    prompts: list[Prompt]
    full: list[Answer]

    def klq(self, **options: object) -> float:
        """Mean over all prompts."""
        return float(
            np.mean([divergence(full, self.answer(number, **options)) for number, full in enumerate(self.full)])
        )

    def answer(self, number: int, **options: object) -> Answer:
        prompt = self.prompts[number]
        return self.engine.answer(prompt.tokens, question_tokens=prompt.question[1], **options)  # type: ignore[arg-type]


def divergence(full: Answer, other: Answer) -> float:
    """KL(full || other) in nats, mean over the question's tokens."""
    expected, actual = (answer.logits.double().log_softmax(-1) for answer in (full, other))
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


def documents() -> dict[str, str]:
    library = Path(sysconfig.get_path("stdlib"))
    texts = {name: f"File {name}:\n{(library / name).read_text(encoding='utf-8')}" for name in SOURCES}
    return texts | {name: f"About {name}:\n{topics[name]}" for name in PROSE}


@pytest.fixture(scope="module")
def bench(model_dir: Path) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    builder = PromptBuilder(tokenizer, SYSTEM)
    client = FakeClient()
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    engine = TransformersEngine(model, client, max_tokens=2048)  # type: ignore[arg-type]
    for name, text in documents().items():
        shortened = tokenizer.decode(tokenizer.encode(text)[:DOCUMENT_TOKENS])
        engine.precompute(builder.add_document(name, shortened), name, context=builder.prefix)
    names = list(builder.documents)
    prompts = [
        builder.build(order, question)
        for order, question in zip([names[::-1], names[3:] + names[:3]], QUESTIONS, strict=True)
    ]
    full = [engine.full_prefill(prompt.tokens, question_tokens=prompt.question[1]) for prompt in prompts]
    yield Bench(engine, client, prompts, full)
    engine.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def unrepaired(bench: Bench) -> float:
    return bench.klq(recompute=0.0)


def test_a_small_recomputed_part_gives_nearly_the_answer_of_full_prefill(bench: Bench, unrepaired: float) -> None:
    answers = [bench.answer(number) for number in range(len(bench.prompts))]
    klq = np.mean([divergence(full, answer) for full, answer in zip(bench.full, answers, strict=True)])
    for answer in answers:
        assert answer.count(Source.SEGMENT) + answer.count(Source.RECOMPUTED) >= 0.7 * len(answer.sources)
        assert answer.count(Source.RECOMPUTED) <= 0.2 * len(answer.sources)
    assert klq <= 0.06
    assert klq <= 0.5 * unrepaired


def test_what_the_question_attends_to_chooses_better_than_deviation_alone(bench: Bench) -> None:
    assert bench.klq(selector=ByInfluence) < bench.klq(selector=ByDeviation)


def test_case_36_a_forgotten_rotation_is_seen(bench: Bench, unrepaired: float) -> None:
    bench.client.rotate = False
    try:
        assert bench.klq(recompute=0.0) > 2 * unrepaired
    finally:
        bench.client.rotate = True


def test_a_wholly_known_prompt_gives_the_same_text(bench: Bench) -> None:
    prompt = bench.prompts[0]
    stored = list(bench.client.stored)
    bench.engine.answer(prompt.tokens, reuse=False)
    bench.engine.store_prompt(prompt.tokens)
    try:
        answer = bench.engine.answer(prompt.tokens, 12)
        assert answer.count(Source.PREFIX) == len(prompt.tokens) - 1
        assert answer.tokens.tolist() == bench.engine.full_prefill(prompt.tokens, 12).tokens.tolist()
    finally:
        bench.client.stored = stored
