"""What a reader of report.json relies on."""

import dataclasses
import json

import pytest
from report_sample import make_sample

from cli.report.model import DemoReport, Piece, ReportError, SegmentPlace

TOKEN_KEYS = ("tokens_total", "tokens_prefix", "tokens_segment", "tokens_recomputed", "tokens_new")
TOTAL_KEYS = (*TOKEN_KEYS, "ttft_full_ms", "ttft_kvblend_ms", "klq", "klq_without_recompute", "false_matches")


@pytest.fixture(scope="module")
def report() -> DemoReport:
    return make_sample(3)


def test_totals_stand_at_the_top_and_prompts_have_the_same_keys(report: DemoReport) -> None:
    data = json.loads(report.to_json())
    for key in TOTAL_KEYS:
        assert key in data
        for prompt in (*data["prompts"], data["exact_prefix"], data["unknown"]):
            assert key in prompt
    for key in (*TOKEN_KEYS, "false_matches"):
        assert data[key] == sum(prompt[key] for prompt in data["prompts"])
    assert data["tokens_total"] == sum(data[key] for key in TOKEN_KEYS[1:])
    assert data["ttft_full_ms"] == pytest.approx(sum(prompt["ttft_full_ms"] for prompt in data["prompts"]))
    assert data["klq"] == pytest.approx(sum(prompt["klq"] for prompt in data["prompts"]) / 3)
    assert data["ttft_kvblend_ms_median"] == sorted(prompt["ttft_kvblend_ms"] for prompt in data["prompts"])[1]


def test_the_prompts_apart_are_in_no_total(report: DemoReport) -> None:
    alone = dataclasses.replace(report, exact_prefix=None, unknown=None)
    assert alone.totals() == report.totals()


def test_json_and_back_is_the_same_report(report: DemoReport) -> None:
    again = DemoReport.from_json(report.to_json())
    assert again == report
    assert again.to_json() == report.to_json()


def test_a_report_without_prompts_has_totals_of_nothing(report: DemoReport) -> None:
    empty = dataclasses.replace(report, prompts=[], exact_prefix=None, unknown=None)
    totals = empty.totals()
    assert totals["tokens_total"] == 0
    assert totals["klq"] is None
    assert DemoReport.from_json(empty.to_json()) == empty


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens_new": 1},
        {"tokens_new": -1, "tokens_segment": 10**6},
        {"pieces": [Piece("x", "segment", "", 3)]},
        {"pieces": [Piece("x", "nowhere", "", 3)]},
        {"segments": [SegmentPlace(10**6, 0, 5, "a")]},
        {"segments": [SegmentPlace(-1, 0, 5, "a")]},
        {"klq": float("nan")},
        {"ttft_kvblend_ms": -1.0},
    ],
)
def test_what_contradicts_itself_is_refused(report: DemoReport, wrong: dict[str, object]) -> None:
    prompt = dataclasses.replace(report.prompts[0], **wrong)
    with pytest.raises(ReportError, match=prompt.name):
        prompt.check()
    with pytest.raises(ReportError):
        dataclasses.replace(report, prompts=[prompt]).to_json()
    with pytest.raises(ReportError):
        dataclasses.replace(report, unknown=prompt).check()
