"""`kvblend demo`: documents computed once, then asked about in ever new orders, both ways."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cli.demo.documents import Document, NoDocuments, from_folder, standard_library
from cli.demo.loading import CHUNK_TOKENS, load_model, open_engine
from cli.demo.orders import new_orders
from cli.demo.screen import precompute_line, print_report, prompt_line
from cli.demo.session import SYSTEM, Asked, DemoSession
from cli.local import LocalServices
from cli.report.model import DemoReport, RunFacts
from cli.report.page import write_report
from kvblend.v1 import common_pb2 as pb

PER_PROMPT = 6
LEAST_DOCUMENTS = 5
UNKNOWN_DOCUMENTS = 2
ARENA_BYTES = 1 << 30
SEED = 20
VERSIONS = ("kvblend", "torch", "transformers", "grpcio", "numba")


def run(docs: Path | None, out: Path, prompts: int, recompute: float, model: Path, agent: str | None) -> int:
    """Runs the demo and writes `out`/report.json and report.html. Returns the exit code."""
    console = Console()
    errors = Console(stderr=True)
    if not (model / "config.json").exists():
        errors.print(f"there is no model in {model}: `make model` fetches and converts it")
        return 1
    try:
        documents = _documents(docs)
        orders = list(_orders(documents, prompts))
    except (NoDocuments, ValueError) as error:
        errors.print(str(error))
        return 1
    console.print(f"loading the model from {model}")
    loaded = load_model(model)
    with (
        _agent_target(agent, console) as target,
        open_engine(loaded, target, f"demo-{os.getpid()}") as engine,
    ):
        session = DemoSession(engine, loaded.tokenizer, recompute)
        report = _measure(session, documents, orders, _facts(engine.space, recompute), console)
    print_report(report, console)
    page, data = write_report(report, out)
    example = _write_example(documents, orders[0], out)
    console.print(f"\nthe report: {page} and {data}\na prompt for `kvblend explain`: {example}")
    return 0 if report.totals()["false_matches"] == 0 else 1


def _documents(docs: Path | None) -> list[Document]:
    return from_folder(docs, LEAST_DOCUMENTS + UNKNOWN_DOCUMENTS) if docs else standard_library()


def _orders(documents: list[Document], prompts: int) -> Iterator[Asked]:
    """The reordered prompts, each with a question about one of its documents."""
    by_name = {document.name: document for document in documents[:-UNKNOWN_DOCUMENTS]}
    for number, order in enumerate(new_orders(list(by_name), PER_PROMPT, prompts, SEED), start=1):
        asked_about = order[number % len(order)]
        yield Asked(f"order {number}", _question(asked_about), order)


def _question(name: str) -> str:
    return f"What is {name} for?"


@contextmanager
def _agent_target(agent: str | None, console: Console) -> Iterator[str]:
    """The agent's address: the one given, or services of our own for as long as the demo runs."""
    if agent:
        yield agent
        return
    console.print("starting matcher, store and agent")
    with LocalServices(arena_bytes=ARENA_BYTES, chunk_tokens=CHUNK_TOKENS) as services:
        yield services.agent_target


def _measure(
    session: DemoSession, documents: list[Document], orders: list[Asked], facts: RunFacts, console: Console
) -> DemoReport:
    known, unknown = documents[:-UNKNOWN_DOCUMENTS], documents[-UNKNOWN_DOCUMENTS:]
    for document in documents:
        session.add(document)
    with _progress(console) as progress:
        task = progress.add_task("computing documents", total=len(orders) + 4)
        precompute = session.precompute(known)
        progress.console.print(precompute_line(precompute), highlight=False)
        for problem in session.problems:
            progress.console.print(f"not stored: {problem.reason} {problem.detail}", highlight=False)
        progress.update(task, advance=1, description="warming up")
        session.warm_up(orders[0])
        reports = []
        for asked in orders:
            progress.update(task, advance=1, description=f"asking {asked.name}")
            reports.append(session.ask(asked))
            progress.console.print(prompt_line(reports[-1]), highlight=False, soft_wrap=True)
        progress.update(task, advance=1, description="asking the same prompt again, and an unknown one")
        exact = session.ask(_same_again(orders[0]), store_first=True, unrepaired=False)
        unknown_report = session.ask(_unknown(unknown), unrepaired=False)
        progress.update(task, advance=1)
    for report in (exact, unknown_report):
        console.print(prompt_line(report), highlight=False, soft_wrap=True)
    return DemoReport(facts, precompute, reports, exact, unknown_report)


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _same_again(asked: Asked) -> Asked:
    return Asked("same order again", asked.question, asked.documents)


def _unknown(documents: list[Document]) -> Asked:
    return Asked("unknown documents", _question(documents[0].name), [document.name for document in documents])


def _write_example(documents: list[Document], asked: Asked, out: Path) -> Path:
    """The first prompt in yet another order, as `kvblend explain` reads it."""
    texts = {document.name: document.text for document in documents}
    named = [{"name": name, "text": texts[name]} for name in reversed(asked.documents)]
    example = out / "prompt.json"
    body = {"system": SYSTEM, "documents": named, "question": asked.question}
    example.write_text(json.dumps(body, indent=1, ensure_ascii=False), encoding="utf-8")
    return example


def _facts(space: pb.ModelSpace, recompute: float) -> RunFacts:
    return RunFacts(
        title="kvblend demo",
        model=space.display_name,
        dtype="float32",
        layers=sum(group.layers for group in space.groups),
        chunk_tokens=space.chunk_tokens,
        recompute_fraction=recompute,
        cpu_count=os.cpu_count() or 1,
        versions={name: metadata.version(name) for name in VERSIONS},
    )
