"""The demo's main job on the real model and real services: quality, truth, and services killed in the middle."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.demo.documents import Document, standard_library
from cli.demo.loading import LoadedModel, load_model, open_engine
from cli.demo.session import Asked, DemoSession
from cli.local import LocalServices

DOCUMENTS = standard_library()[:4]
NAMES = [document.name for document in DOCUMENTS]


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> LoadedModel:
    return load_model(model_dir)


@pytest.fixture(scope="module")
def services() -> Iterator[LocalServices]:
    with LocalServices(arena_bytes=512 << 20, chunk_tokens=64) as running:
        yield running


@pytest.fixture(scope="module")
def session(loaded: LoadedModel, services: LocalServices) -> Iterator[DemoSession]:
    with open_engine(loaded, services.agent_target, "demo-test") as engine:
        demo = DemoSession(engine, loaded.tokenizer, recompute=0.15, answer_tokens=8)
        for document in DOCUMENTS:
            demo.add(document)
        demo.precompute(DOCUMENTS)
        assert demo.problems == []
        yield demo


def asked(*order: int) -> Asked:
    return Asked(f"order {order}", f"What is {NAMES[order[0]]} for?", [NAMES[number] for number in order])


def test_reordered_documents_are_reused_and_answers_stay_close_to_full_prefill(session: DemoSession) -> None:
    reports = [session.ask(asked(*order)) for order in ((2, 0, 1), (1, 3, 0), (3, 2, 1))]
    total = sum(report.tokens_total for report in reports)
    assert sum(report.tokens_segment + report.tokens_recomputed for report in reports) >= 0.7 * total
    assert sum(report.tokens_recomputed for report in reports) <= 0.2 * total
    assert [report.false_matches for report in reports] == [0, 0, 0]
    assert [report.degraded for report in reports] == [None, None, None]
    klq = sum(report.klq for report in reports) / len(reports)
    unrepaired = sum(report.klq_without_recompute or 0.0 for report in reports) / len(reports)
    assert klq <= 0.06
    assert klq <= unrepaired / 2


def test_the_same_prompt_again_is_an_exact_prefix_with_the_same_greedy_text(session: DemoSession) -> None:
    report = session.ask(asked(0, 1, 2), store_first=True, unrepaired=False)
    assert report.tokens_prefix == report.tokens_total - report.tokens_new
    assert (report.tokens_segment, report.tokens_recomputed) == (0, 0)
    assert report.answer_kvblend == report.answer_full
    assert report.klq < 1e-5


@pytest.mark.parametrize("service", ["matcher", "store", "agent"])
def test_case_72_a_service_killed_in_the_middle_is_said_and_loses_no_answer(
    session: DemoSession, services: LocalServices, service: str
) -> None:
    services.kill(service, restart=False)
    report = session.ask(asked(3, 1), unrepaired=False)
    assert report.degraded is not None
    assert report.answer_kvblend == report.answer_full
    assert report.tokens_segment + report.tokens_recomputed == 0
    services.start(service)
    services.wait_ready()
    back = [session.ask(asked(1, 3), unrepaired=False) for _ in range(2)]
    assert back[-1].degraded is None
    assert back[-1].tokens_segment > 0


def test_a_text_that_was_never_stored_is_computed(session: DemoSession) -> None:
    session.add(Document("never.txt", "A text that nobody has stored before. " * 20, "never"))
    report = session.ask(Asked("unknown", "What is this?", ["never.txt"]), unrepaired=False)
    assert report.tokens_new == report.tokens_total - report.tokens_prefix
    assert report.answer_kvblend == report.answer_full


def test_the_command_writes_a_report_that_adds_up(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for document in standard_library()[:7]:
        (folder / document.name).write_text(document.text[:500])
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from cli.main import main; main()", "demo"]
    flags = ["--prompts", "1", "--docs", str(folder), "--out", str(out), "--model", str(model_dir)]
    result = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=170, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads((out / "report.json").read_text())
    for part in (report, *report["prompts"], report["exact_prefix"], report["unknown"]):
        sources = ("tokens_prefix", "tokens_segment", "tokens_recomputed", "tokens_new")
        assert sum(part[source] for source in sources) == part["tokens_total"] > 0
    assert report["false_matches"] == 0
    assert (out / "report.html").stat().st_size > 10_000
    assert "\x1b[" not in result.stdout
    assert json.loads((out / "prompt.json").read_text())["question"]
