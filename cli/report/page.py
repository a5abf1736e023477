"""The report as one self-contained HTML page and as JSON."""

import base64
import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cli.colors import SOURCES, STYLES
from cli.report.figure import BOX_HEIGHT, BOX_WIDTH, Cover, cover_of, percent
from cli.report.model import DemoReport, PromptReport, Shortfall
from cli.report.pieces import visible
from cli.report.reasons import Words, words_of
from cli.units import format_bytes

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class PromptView:
    """A prompt with all that the page derives from it."""

    prompt: PromptReport
    anchor: str
    cover: Cover
    # (shortfall, its words), most tokens first.
    why: list[tuple[Shortfall, Words]]
    # Document -> tokens by source.
    by_document: dict[str, Counter[str]]
    # Characters at the start that both answers share; None if they are the same text.
    answers_part_at: int | None
    # Percent of the longest time to first token of the page.
    full_width: float
    kvblend_width: float
    # (name, milliseconds, percent of the kvblend bar).
    steps: list[tuple[str, float, float]]


def _finalize(value: object) -> object:
    """Every string that is printed goes through here, before escaping: documents may hold control characters."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def duration(milliseconds: float) -> str:
    if milliseconds >= 10_000:
        return f"{milliseconds / 1000:,.1f} s"
    return f"{milliseconds:,.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def share(part: float, whole: float) -> str:
    """A percentage that never claims all or nothing where it is not."""
    value = percent(part, whole)
    if 0 < value < 1:
        return "<1 %"
    return ">99 %" if 99 < value < 100 else f"{value:.0f} %"


def ratio(numerator: float, denominator: float) -> str:
    if not denominator:
        return "–"
    value = numerator / denominator
    return f"{value:.1f}×" if value < 100 else f"{value:,.0f}×"


def _divergence_of_answers(full: str, kvblend: str) -> int | None:
    if full == kvblend:
        return None
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(full, kvblend, strict=False)))


def _steps(prompt: PromptReport) -> list[tuple[str, float, float]]:
    parts = [("look up", prompt.lookup_ms), ("retrieve", prompt.retrieve_ms), ("compute", prompt.compute_ms)]
    whole = max(prompt.ttft_kvblend_ms, sum(time for _, time in parts))
    return [(name, time, percent(time, whole)) for name, time in parts if time]


def view_of(prompt: PromptReport, report: DemoReport, anchor: str) -> PromptView:
    by_document: dict[str, Counter[str]] = {}
    for piece in prompt.pieces:
        by_document.setdefault(piece.document, Counter())[piece.source] += piece.count
    longest = max((max(p.ttft_full_ms, p.ttft_kvblend_ms) for p in report.every_prompt()), default=0.0)
    shortfalls = sorted(prompt.shortfalls, key=lambda shortfall: -shortfall.tokens)
    return PromptView(
        prompt=prompt,
        anchor=anchor,
        cover=cover_of(prompt, report.precompute.documents),
        why=[(shortfall, words_of(shortfall.reason)) for shortfall in shortfalls],
        by_document=by_document,
        answers_part_at=_divergence_of_answers(prompt.answer_full, prompt.answer_kvblend),
        full_width=percent(prompt.ttft_full_ms, longest),
        kvblend_width=percent(prompt.ttft_kvblend_ms, longest),
        steps=_steps(prompt),
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=duration, bytes=format_bytes, thousands=lambda number: f"{number:,}")
    environment.globals.update(share=share, ratio=ratio, percent=percent)
    return environment


def _inline(name: str) -> Markup:
    """A file of this package as it is: style and script are ours, nothing of a report is in them."""
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


def render_page(report: DemoReport) -> str:
    """One HTML document without external requests. All text of the report is escaped.

    Raises:
        ReportError: the report's numbers do not add up.
    """
    report.check()
    script = _inline("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    apart = (("exact-prefix", report.exact_prefix), ("unknown", report.unknown))
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            facts=report.facts,
            totals=report.totals(),
            views=[view_of(prompt, report, f"prompt-{n}") for n, prompt in enumerate(report.prompts, 1)],
            apart={anchor: view_of(prompt, report, anchor) for anchor, prompt in apart if prompt},
            sources=SOURCES,
            styles=STYLES,
            box=(BOX_WIDTH, BOX_HEIGHT),
            style=_inline("page.css"),
            script=script,
            # Only this one script may run, whatever a document may contain.
            script_hash=f"sha256-{digest}",
        )
    )


def write_report(report: DemoReport, directory: Path) -> tuple[Path, Path]:
    """Writes report.html and report.json into `directory`, which is made if it is missing; returns both paths.

    Raises:
        ReportError: the report's numbers do not add up; then nothing is written.
    """
    page, data = render_page(report), report.to_json()
    directory.mkdir(parents=True, exist_ok=True)
    html_path, json_path = directory / "report.html", directory / "report.json"
    html_path.write_text(page, encoding="utf-8")
    json_path.write_text(data, encoding="utf-8")
    return html_path, json_path
