"""A made-up but lifelike report: real source text, the same on every run."""

import random
import re
import sysconfig
from pathlib import Path

from cli.report.model import (
    DemoReport,
    Precompute,
    PromptReport,
    RunFacts,
    SegmentPlace,
    Shortfall,
    StoredDocument,
)
from cli.report.pieces import build_pieces, sources_of_lookup

FILES = ("bisect", "shlex", "textwrap", "heapq", "fnmatch", "queue", "glob", "stat", "string", "sched")
SYSTEM = "You answer questions about source code.\n\n"
PER_PROMPT = 6
CHARACTERS = 1400
RECOMPUTE = 0.15


class WordTokens:
    """Words, blanks and signs as tokens: enough of a tokenizer for pictures."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        found = re.findall(r"\s?\w{1,6}|\s+|[^\w\s]", text)
        for word in found:
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
        return [self._ids[word] for word in found]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self._words[token] for token in tokens)


def documents() -> dict[str, str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = {f"{name}.py": (folder / f"{name}.py").read_text(encoding="utf-8")[:CHARACTERS] for name in FILES}
    return {name: f"File: {name}\n{text}\n\n" for name, text in texts.items()}


def _prompt(
    draw: random.Random,
    words: WordTokens,
    stored: dict[str, tuple[int, list[int]]],
    name: str,
    order: list[str],
    question: str,
) -> PromptReport:
    tokens = words.encode(SYSTEM)
    prefix = len(tokens)
    places = []
    lost = 0
    for document in order:
        first, ids = stored[document]
        skipped = draw.choice([0, 0, 0, 9])
        places.append(SegmentPlace(len(tokens) + skipped, first + skipped, len(ids) - skipped, document))
        lost += skipped
        tokens += ids
    ask = words.encode(f"Question: {question}\nAnswer:")
    tokens += ask
    reused = [p for place in places for p in range(place.query_position, place.query_position + place.length)]
    recomputed = draw.sample(reused, int(RECOMPUTE * len(reused)))
    sources, owners = sources_of_lookup(len(tokens), prefix, places, recomputed)
    # Within a document the tokens that were not found belong to it too.
    for place in places:
        first = stored[place.document][0]
        start = place.query_position - (place.stored_position - first)
        owners[start : place.query_position] = [place.document] * (place.query_position - start)
    full = 0.72 * len(tokens) + draw.uniform(0, 60)
    kvblend = 0.72 * (len(recomputed) + len(ask) + lost) + draw.uniform(30, 60)
    unrepaired = draw.uniform(0.06, 0.1)
    shortfalls = [Shortfall("UNKNOWN_TEXT", len(ask) - 1 + lost), Shortfall("LAST_TOKEN", 1)]
    answer = f"The module {order[0]} comes first; it defines what the question asks about."
    return PromptReport(
        name=name,
        question=question,
        documents=order,
        tokens_total=len(tokens),
        **{f"tokens_{source}": sources.count(source) for source in ("prefix", "segment", "recomputed", "new")},
        ttft_full_ms=full,
        ttft_kvblend_ms=kvblend,
        klq=unrepaired * draw.uniform(0.3, 0.5),
        klq_without_recompute=unrepaired,
        false_matches=0,
        answer_full=answer + " It is part of the standard library.",
        answer_kvblend=answer + draw.choice([" It is part of the standard library.", " It belongs to Python itself."]),
        pieces=build_pieces(tokens, sources, owners, lambda ids: words.decode(list(ids))),
        shortfalls=shortfalls,
        lookup_ms=3.1,
        retrieve_ms=14.2,
        compute_ms=kvblend - 17.3,
        segments=places,
    )


def _plain(name: str, question: str, words: WordTokens, text: str, known: bool) -> PromptReport:
    tokens = words.encode(text)
    prefix = len(tokens) - 1 if known else 0
    sources, owners = sources_of_lookup(len(tokens), prefix, [])
    full = 0.72 * len(tokens)
    return PromptReport(
        name=name,
        question=question,
        documents=[],
        tokens_total=len(tokens),
        tokens_prefix=prefix,
        tokens_segment=0,
        tokens_recomputed=0,
        tokens_new=len(tokens) - prefix,
        ttft_full_ms=full,
        ttft_kvblend_ms=41.0 if known else full + 6,
        klq=0.0,
        klq_without_recompute=None,
        false_matches=0,
        answer_full="It keeps a list in order.",
        answer_kvblend="It keeps a list in order.",
        pieces=build_pieces(tokens, sources, owners, lambda ids: words.decode(list(ids))),
        shortfalls=[Shortfall("LAST_TOKEN", 1)] + ([] if known else [Shortfall("UNKNOWN_TEXT", len(tokens) - 1)]),
        lookup_ms=2.0,
        retrieve_ms=9.0 if known else 0.0,
        compute_ms=30.0 if known else full,
    )


def make_sample(prompts: int = 6) -> DemoReport:
    draw = random.Random(7)
    words = WordTokens()
    prefix = len(words.encode(SYSTEM))
    texts = documents()
    stored = {name: (prefix, words.encode(text)) for name, text in texts.items()}
    names = list(stored)
    asked = []
    for number in range(1, prompts + 1):
        order = draw.sample(names, PER_PROMPT)
        question = f"What is {order[2].removesuffix('.py')} for, and which function would you call first?"
        asked.append(_prompt(draw, words, stored, f"Prompt {number}", order, question))
    same = SYSTEM + "".join(texts[name] for name in names[:PER_PROMPT]) + "Question: What is bisect for?\nAnswer:"
    other = "\n".join(f"Note {number}: nothing of this was ever stored." for number in range(120))
    versions = {"kvblend": "0.1.0", "python": "3.11", "torch": "2.13.0", "transformers": "5.24.0"}
    return DemoReport(
        facts=RunFacts(
            "The same files, in ever new orders", "SmolLM2-135M-Instruct", "float32", 30, 256, 0.15, 2, versions
        ),
        precompute=Precompute(
            [StoredDocument(name, len(ids), first) for name, (first, ids) in stored.items()], 6.4, 214_000_000
        ),
        prompts=asked,
        exact_prefix=_plain("Exact prefix", "What is bisect for?", words, same, known=True),
        unknown=_plain("Unknown", "What do the notes say?", words, other, known=False),
    )
