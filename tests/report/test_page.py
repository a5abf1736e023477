"""The page: complete, self-contained, and safe whatever the documents hold."""

import dataclasses
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_sample import make_sample

from cli.report.figure import BOX_HEIGHT, cover_of
from cli.report.model import DemoReport, Piece, PromptReport, ReportError, SegmentPlace, Shortfall, StoredDocument
from cli.report.page import render_page, write_report

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x00\x1b[31m\u202e&amp;{{ 7*7 }}"
VOID = {"meta", "br", "path"}


class Page(HTMLParser):
    """Tags, attributes and text as a browser would take them; fails on tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def report() -> DemoReport:
    return make_sample(3)


def evil_prompt(prompt: PromptReport) -> PromptReport:
    return dataclasses.replace(
        prompt,
        name=EVIL,
        question=EVIL,
        documents=[EVIL],
        answer_full=EVIL,
        answer_kvblend=EVIL + "!",
        degraded=EVIL,
        tokens_total=4,
        tokens_prefix=1,
        tokens_segment=1,
        tokens_recomputed=1,
        tokens_new=1,
        pieces=[Piece(EVIL, source, EVIL, 1) for source in ("prefix", "segment", "recomputed", "new")],
        shortfalls=[Shortfall(EVIL, 1, EVIL)],
        segments=[SegmentPlace(1, 7, 2, EVIL)],
    )


def test_the_page_shows_every_prompt_its_answers_and_reasons(report: DemoReport) -> None:
    page = Page(render_page(report))
    for prompt in report.every_prompt():
        for text in (prompt.name, prompt.question, prompt.answer_full, prompt.answer_kvblend):
            assert text in page.text
        assert "".join(piece.text for piece in prompt.pieces) in page.text
    assert "The last token is always computed" in page.text
    assert page.tags["article"] == 5


def test_documents_are_escaped_wherever_they_appear(report: DemoReport) -> None:
    evil = evil_prompt(report.prompts[0])
    stored = dataclasses.replace(report.precompute, documents=[StoredDocument(EVIL, 9, 5)])
    facts = dataclasses.replace(report.facts, title=EVIL, model=EVIL, versions={EVIL: EVIL})
    html = render_page(DemoReport(facts, stored, [evil], evil, evil))
    page = Page(html)
    assert page.tags["script"] == 1
    assert page.tags["img"] == 0
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert(1)" in page.text
    assert "{{ 7*7 }}" in page.text
    assert not set(html) & {"\x00", "\x1b", "\u202e"}


def test_the_page_asks_nothing_of_the_network(report: DemoReport) -> None:
    page = Page(render_page(report))
    assert not [value for _, name, value in page.attributes if name in ("src", "srcset", "action", "formaction")]
    assert all(value.startswith("#") for _, name, value in page.attributes if name == "href")
    (style,) = re.findall(r"<style>(.*?)</style>", render_page(report), re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    policy = next(
        value for tag, name, value in page.attributes if (tag, name) == ("meta", "content") and "src" in value
    )
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_links_lead_somewhere_and_ids_are_unique(report: DemoReport) -> None:
    page = Page(render_page(report))
    ids = Counter(value for _, name, value in page.attributes if name == "id")
    assert max(ids.values()) == 1
    for _, name, value in page.attributes:
        if name == "href":
            assert value.removeprefix("#") in ids
        if name == "aria-labelledby":
            assert value in ids


def test_a_fallback_says_why(report: DemoReport) -> None:
    prompt = dataclasses.replace(report.prompts[0], degraded="the agent did not answer")
    assert "the agent did not answer" in Page(render_page(dataclasses.replace(report, prompts=[prompt]))).text


def test_a_report_without_prompts_is_still_a_page(report: DemoReport) -> None:
    Page(render_page(dataclasses.replace(report, prompts=[], exact_prefix=None, unknown=None)))


def test_both_files_or_none(report: DemoReport, tmp_path: Path) -> None:
    wrong = dataclasses.replace(report, prompts=[dataclasses.replace(report.prompts[0], tokens_new=10**6)])
    with pytest.raises(ReportError):
        write_report(wrong, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    html, data = write_report(report, tmp_path / "demo")
    assert (html.name, data.name) == ("report.html", "report.json")
    assert DemoReport.from_json(data.read_text(encoding="utf-8")) == report


def test_the_cover_spans_the_prompt_and_shows_what_moved(report: DemoReport) -> None:
    prompt = report.prompts[0]
    cover = cover_of(prompt, report.precompute.documents)
    assert sum(block.tokens for block in cover.sources) == prompt.tokens_total
    assert sum(block.width for block in cover.sources) == pytest.approx(100, abs=0.1)
    assert [block.name for block in cover.documents] == prompt.documents
    assert [block.stored_first for block in cover.documents] == [9] * len(prompt.documents)
    assert [block.name for block in cover.stored] == [document.name for document in report.precompute.documents]
    assert [ribbon.document for ribbon in cover.ribbons] == [place.document for place in prompt.segments]
    place = prompt.segments[0]
    assert f"stored at {place.stored_position:,}, now at {place.query_position:,}" in cover.ribbons[0].label


def test_segments_that_moved_together_are_one_ribbon(report: DemoReport) -> None:
    document = report.precompute.documents[0]
    first = document.first_position
    segments = [
        SegmentPlace(100, first, 50, document.name),
        SegmentPlace(150, first + 50, 30, document.name),
        SegmentPlace(200, first + 90, 5, document.name),
    ]
    prompt = dataclasses.replace(report.prompts[0], segments=segments)
    cover = cover_of(prompt, report.precompute.documents)
    assert [ribbon.label.split()[0] for ribbon in cover.ribbons] == ["80", "5"]


def test_recomputed_columns_are_as_high_as_their_share(report: DemoReport) -> None:
    pieces = [Piece("", "segment", "", 500), Piece("", "recomputed", "", 400), Piece("", "new", "", 100)]
    prompt = dataclasses.replace(report.prompts[0], pieces=pieces, tokens_total=1000, segments=[])
    path = cover_of(prompt, []).recomputed_path
    columns = [(float(x), float(height)) for x, height in re.findall(rf"M([\d.]+) {BOX_HEIGHT}v-([\d.]+)", path)]
    assert all(490 < x < 900 for x, _ in columns)
    area = sum(height for _, height in columns) * 1000 / 180
    assert area == pytest.approx(400 * BOX_HEIGHT, rel=0.02)
