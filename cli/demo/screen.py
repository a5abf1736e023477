"""What the demo prints: progress, a row a prompt, totals, both answers."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from cli.report.model import DemoReport, Precompute, PromptReport
from cli.report.pieces import visible

# The last: KLQ without any recompute. Narrow enough for 80 columns.
COLUMNS = ("prompt", "tokens", "prefix", "as is", "again", "new", "full ms", "ours ms", "KLQ", "KLQ 0%")


def precompute_line(facts: Precompute) -> str:
    return (
        f"{len(facts.documents)} documents, {facts.tokens:,} tokens, computed and stored in {facts.seconds:.1f} s "
        f"({facts.bytes / 2**20:,.0f} MiB of KV)"
    )


def prompt_line(report: PromptReport) -> str:
    reused = report.tokens_prefix + report.tokens_segment
    speed = report.ttft_full_ms / max(report.ttft_kvblend_ms, 1e-9)
    line = (
        f"{report.name}: {reused:,} of {report.tokens_total:,} tokens reused as they were, "
        f"first token in {report.ttft_kvblend_ms:,.0f} ms instead of {report.ttft_full_ms:,.0f} ({speed:.1f}x)"
    )
    return f"{line}; answered by prefill: {report.degraded}" if report.degraded else line


def print_report(report: DemoReport, console: Console) -> None:
    table = Table(title="Tokens and time to first token, by prompt", title_justify="left", padding=(0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "prompt" else "right", no_wrap=True)
    for prompt in report.prompts:
        table.add_row(*_cells(prompt.name, vars(prompt)))
    table.add_section()
    table.add_row(*_cells("total", report.totals()))
    table.add_section()
    for apart in (report.exact_prefix, report.unknown):
        if apart:
            table.add_row(*_cells(apart.name, vars(apart)))
    console.print(table)
    for prompt in report.every_prompt():
        console.print(f"\n[bold]{prompt.name}[/bold]", highlight=False)
        for label, answer in (("full prefill", prompt.answer_full), ("kvblend", prompt.answer_kvblend)):
            console.print(
                f"  {label:>12}: {_one_line(answer) or '(nothing)'}", markup=False, highlight=False, soft_wrap=True
            )


def _one_line(answer: str) -> str:
    """Line ends made visible; what could act on the terminal too."""
    return visible(answer).replace("\n", " ⏎ ")


def _cells(name: str, values: Mapping[str, object]) -> list[str]:
    def number(key: str, form: str) -> str:
        value = values[key]
        return "-" if value is None else format(value, form)

    tokens = ("tokens_total", "tokens_prefix", "tokens_segment", "tokens_recomputed", "tokens_new")
    times = ("ttft_full_ms", "ttft_kvblend_ms")
    return [
        name,
        *(number(key, ",") for key in tokens),
        *(number(key, ",.0f") for key in times),
        *(number(key, ".4f") for key in ("klq", "klq_without_recompute")),
    ]
