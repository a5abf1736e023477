"""The picture in the terminal: complete with colours, readable without, safe with any text."""

import io
import re

import pytest
from report_sample import make_sample
from rich.console import Console

from cli.report.model import Piece, PromptReport, SegmentPlace, Shortfall
from cli.report.terminal import Summary, render

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def prompt() -> PromptReport:
    return make_sample(1).prompts[0]


def picture(
    prompt: PromptReport, *, text_lines: int | None = None, summary: Summary | None = None, **how: object
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, highlight=False, **how)  # type: ignore[arg-type]
    render(
        prompt.pieces,
        prompt.shortfalls,
        summary or Summary(prompt.name, prompt.segments),
        console,
        text_lines=text_lines,
    )
    return out.getvalue()


def test_counts_segments_and_reasons_are_there(prompt: PromptReport) -> None:
    shown = picture(prompt)
    for count in prompt.tokens_by_source().values():
        assert re.search(rf"\b{count:,}\b", shown)
    for place in prompt.segments:
        row = rf"{re.escape(place.document)} +{place.stored_position:,} +→ +{place.query_position:,} +{place.length:,}"
        assert re.search(row, shown)
    assert "The last token is always computed" in shown


def test_without_a_terminal_there_are_letters_and_no_codes(prompt: PromptReport) -> None:
    shown = picture(prompt)
    assert "\x1b" not in shown
    text = "".join(piece.text for piece in prompt.pieces)
    lines = [line.split(" │ ", 1) for line in shown.splitlines() if re.match(r"[P·][S·][R·][N·] │ ", line)]
    assert [line.rstrip() for _, line in lines if line.strip()] == [x.rstrip() for x in text.splitlines() if x.strip()]
    assert lines[0][0] == "P···"
    assert lines[-1][0] == "···N"


def test_no_color_is_honoured_on_a_terminal(prompt: PromptReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = picture(prompt, force_terminal=True, color_system="truecolor")
    assert "48;2;" not in shown
    assert "P··· │" in ANSI.sub("", shown)


def test_on_a_terminal_every_source_has_its_colour(prompt: PromptReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = picture(prompt, force_terminal=True, color_system="truecolor")
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", shown))) == 4
    assert "│" not in shown


def test_a_document_cannot_drive_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J[bold red]x[/]\r\x9b31m"
    pieces = [Piece(evil, "new", evil, 3)]
    summary = Summary(evil, [SegmentPlace(0, 0, 3, evil)], degraded=evil, notes=[evil])
    out = io.StringIO()
    render(pieces, [Shortfall(evil, 3, evil)], summary, Console(file=out, width=120, highlight=False))
    assert not set(out.getvalue()) & {"\x1b", "\x07", "\r", "\x9b"}
    assert "[bold red]x[/]" in out.getvalue()


def test_long_texts_can_be_cut(prompt: PromptReport) -> None:
    cut = picture(prompt, text_lines=2)
    assert len(cut.splitlines()) < len(picture(prompt).splitlines()) / 2
    assert re.search(r"… \d+ more lines", cut)


def test_what_the_engine_will_recompute_is_announced_only_where_it_is_not_known() -> None:
    pieces = [Piece("abc", "segment", "", 1000)]
    prompt = make_sample(1).prompts[0]
    out = io.StringIO()
    render(pieces, [], Summary("x", expected_recompute=0.15), Console(file=out, width=120))
    assert "about 15% of the segment tokens again (some 150)" in out.getvalue()
    assert "computes about" not in picture(prompt, summary=Summary("x", expected_recompute=0.15))
