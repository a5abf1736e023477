"""The report itself: what the demo fills, what `report.json` holds, what the page shows.

Counts are tokens, durations milliseconds. The four token counts of a prompt add up to
`tokens_total`; totals are derived from the prompts, so the two cannot disagree.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from cli.colors import SOURCES


class ReportError(ValueError):
    """The report contradicts itself."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one source: their decoded text, their document ("" for none), how many."""

    text: str
    source: str
    document: str
    count: int


@dataclass(frozen=True)
class Shortfall:
    """Tokens that were not reused, and why: a `Reason` of the contract, without its prefix."""

    reason: str
    tokens: int
    detail: str = ""


@dataclass(frozen=True)
class SegmentPlace:
    """Stored text found in the prompt: where it is now, where it was when it was stored."""

    query_position: int
    stored_position: int
    length: int
    document: str


@dataclass
class PromptReport:
    """One prompt, answered by full prefill and through kvblend."""

    name: str
    question: str
    # Names, in this prompt's order.
    documents: list[str]
    tokens_total: int
    tokens_prefix: int
    # Reused as they were, without the recomputed ones.
    tokens_segment: int
    tokens_recomputed: int
    tokens_new: int
    ttft_full_ms: float
    ttft_kvblend_ms: float
    # Mean KL divergence (full prefill against kvblend) over the question's tokens, in nats.
    klq: float
    # The same without any recompute; None where it was not measured.
    klq_without_recompute: float | None
    false_matches: int
    answer_full: str
    answer_kvblend: str
    # Why the prompt fell back to full prefill; None if it did not.
    degraded: str | None = None
    pieces: list[Piece] = field(default_factory=list)
    shortfalls: list[Shortfall] = field(default_factory=list)
    # Parts of ttft_kvblend_ms.
    lookup_ms: float = 0.0
    retrieve_ms: float = 0.0
    compute_ms: float = 0.0
    segments: list[SegmentPlace] = field(default_factory=list)

    def tokens_by_source(self) -> dict[str, int]:
        return {source: int(getattr(self, f"tokens_{source}")) for source in SOURCES}

    def check(self) -> None:
        """Raises ReportError if the numbers contradict each other or cannot be."""
        counts = self.tokens_by_source()
        if min(counts.values()) < 0 or sum(counts.values()) != self.tokens_total:
            raise ReportError(f"{self.name}: {counts} do not add up to {self.tokens_total} tokens")
        if self.pieces:
            coloured = Counter[str]()
            for piece in self.pieces:
                coloured[piece.source] += piece.count
            if coloured != Counter(counts):
                raise ReportError(f"{self.name}: the pieces have {dict(coloured)}, the counts say {counts}")
        for place in self.segments:
            if (
                min(place.query_position, place.stored_position) < 0
                or place.length < 1
                or place.query_position + place.length > self.tokens_total
            ):
                raise ReportError(f"{self.name}: {place} is no place in a prompt of {self.tokens_total} tokens")
        times = [self.ttft_full_ms, self.ttft_kvblend_ms, self.lookup_ms, self.retrieve_ms, self.compute_ms]
        numbers = [*times, self.klq, self.klq_without_recompute or 0.0]
        if not all(math.isfinite(number) for number in numbers) or min(times) < 0:
            raise ReportError(f"{self.name}: a time or a divergence is no finite number: {numbers}")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "PromptReport":
        """Raises TypeError on a missing or unknown key."""
        lists = {
            "pieces": [Piece(**item) for item in data.get("pieces", [])],
            "shortfalls": [Shortfall(**item) for item in data.get("shortfalls", [])],
            "segments": [SegmentPlace(**item) for item in data.get("segments", [])],
        }
        return cls(**{**data, **lists})


@dataclass(frozen=True)
class RunFacts:
    """What was run, and on what."""

    title: str
    model: str
    dtype: str
    layers: int
    chunk_tokens: int
    # Share of reused tokens that is recomputed in all layers, 0 to 1.
    recompute_fraction: float
    cpu_count: int
    # Package -> version.
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredDocument:
    """A document computed ahead. `first_position` is where its first token was stored."""

    name: str
    tokens: int
    first_position: int = 0


@dataclass(frozen=True)
class Precompute:
    """Documents computed ahead, in the order of storing; `bytes` of KV that they take."""

    documents: list[StoredDocument]
    seconds: float
    bytes: int

    @property
    def tokens(self) -> int:
        return sum(document.tokens for document in self.documents)


@dataclass
class DemoReport:
    """A whole run. `prompts` are the reordered ones; the other two stand apart from all totals."""

    facts: RunFacts
    precompute: Precompute
    prompts: list[PromptReport]
    exact_prefix: PromptReport | None = None
    unknown: PromptReport | None = None

    def every_prompt(self) -> Iterable[PromptReport]:
        yield from self.prompts
        yield from (prompt for prompt in (self.exact_prefix, self.unknown) if prompt)

    def totals(self) -> dict[str, float | None]:
        """Over the reordered prompts: sums of tokens, times and false matches, means of the divergences."""
        summed = ("tokens_total", *(f"tokens_{source}" for source in SOURCES), "ttft_full_ms", "ttft_kvblend_ms")
        totals: dict[str, float | None] = {key: sum(getattr(prompt, key) for prompt in self.prompts) for key in summed}
        for key in ("ttft_full_ms", "ttft_kvblend_ms"):
            values = [getattr(prompt, key) for prompt in self.prompts]
            totals[f"{key}_median"] = median(values) if values else None
        for key in ("klq", "klq_without_recompute"):
            measured = [value for prompt in self.prompts if (value := getattr(prompt, key)) is not None]
            totals[key] = fmean(measured) if measured else None
        totals["false_matches"] = sum(prompt.false_matches for prompt in self.prompts)
        return totals

    def check(self) -> None:
        """Raises ReportError as `PromptReport.check` does."""
        for prompt in self.every_prompt():
            prompt.check()

    def to_json(self) -> str:
        """Checked first. Totals are at the top level, the prompts below them have the same keys."""
        self.check()
        precompute = {**asdict(self.precompute), "tokens": self.precompute.tokens}
        body = {**asdict(self), "precompute": precompute}
        return json.dumps({**self.totals(), **body}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "DemoReport":
        """Reads what `to_json` wrote; totals are derived again.

        Raises:
            ReportError: the counts do not add up.
            KeyError, TypeError, json.JSONDecodeError: this is no such report.
        """
        data = json.loads(text)
        stored = data["precompute"]
        apart = {key: PromptReport.from_dict(data[key]) if data[key] else None for key in ("exact_prefix", "unknown")}
        report = cls(
            facts=RunFacts(**data["facts"]),
            precompute=Precompute(
                [StoredDocument(**item) for item in stored["documents"]], stored["seconds"], stored["bytes"]
            ),
            prompts=[PromptReport.from_dict(item) for item in data["prompts"]],
            **apart,
        )
        report.check()
        return report
