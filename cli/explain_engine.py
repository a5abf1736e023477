"""`kvblend explain` without a running engine: this process loads the model and answers as one would.

Heavy: it imports torch. Then the recomputed tokens are the real ones, not an expectation.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cli.demo.loading import load_model, open_engine, source_names
from cli.explain_answer import Explained
from cli.report.model import SegmentPlace, Shortfall

# Logits of so few tokens: what the prompt is followed by does not matter here.
_QUESTION_TOKENS = 1


def answer_with_model(model: Path, target: str, tokens: Sequence[int], question_tokens: int) -> Explained:
    """Prefills the prompt through the agent at `target`, as `kvblend demo` would."""
    loaded = load_model(model)
    prompt = np.asarray(tokens, dtype=np.uint32)
    with open_engine(loaded, target, f"explain-{os.getpid()}") as engine:
        answer = engine.answer(prompt, 1, question_tokens=max(question_tokens, _QUESTION_TOKENS))
    lookup = answer.lookup
    segments = [
        SegmentPlace(s.query_position, s.stored_position, s.length, s.document)
        for s in (lookup.segments if lookup else ())
    ]
    shortfalls = [Shortfall(s.reason, s.tokens, s.detail) for s in (lookup.shortfalls if lookup else ())]
    shortfalls += [Shortfall(reason, length, f"from token {first}") for first, length, reason in answer.failed]
    prefix = lookup.prefix_tokens if lookup else 0
    return Explained(prefix, segments, shortfalls, recomputed=_recomputed(source_names(answer.sources)))


def _recomputed(sources: Sequence[str]) -> list[int]:
    return [position for position, source in enumerate(sources) if source == "recomputed"]
