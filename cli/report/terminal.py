"""A prompt in the terminal: its text coloured by source, the cover as a strip, and why there is no more reuse."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.colors import SOURCES, STYLES
from cli.report.model import Piece, SegmentPlace, Shortfall
from cli.report.pieces import visible
from cli.report.reasons import words_of

_STEPS = " ▁▂▃▄▅▆▇█"
_STRIP_COLUMNS = 100

# A line of the prompt: its parts with their sources.
Line = list[tuple[str, str]]


@dataclass(frozen=True)
class Summary:
    """What the picture says beside the text."""

    title: str
    segments: Sequence[SegmentPlace] = ()
    # Share of segment tokens that the engine will recompute, where the model has not run yet.
    expected_recompute: float | None = None
    # Why the prompt fell back to full prefill.
    degraded: str | None = None
    notes: Sequence[str] = field(default_factory=tuple)


def render(
    pieces: Sequence[Piece],
    shortfalls: Sequence[Shortfall],
    summary: Summary,
    console: Console,
    *,
    text_lines: int | None = None,
) -> None:
    """Prints the picture. `text_lines`: at most so many lines of each document; None prints all.

    Where there are no colours (a pipe, a file, NO_COLOR) letters in a margin name the sources.
    """
    colours = console.color_system is not None and not console.no_color
    counts = Counter[str]()
    for piece in pieces:
        counts[piece.source] += piece.count
    total = counts.total()
    console.print(Text(f"{visible(summary.title)}: {total:,} tokens", style="bold"), soft_wrap=True)
    if summary.degraded:
        console.print(Text(f"Answered by full prefill: {visible(summary.degraded)}", style="red"), soft_wrap=True)
    _print_text(pieces, console, colours, text_lines)
    console.print()
    _print_strip(pieces, total, console, colours)
    console.print(_legend(counts, total, colours))
    if summary.expected_recompute and counts["segment"] and not counts["recomputed"]:
        again = round(summary.expected_recompute * counts["segment"])
        line = (
            f"The engine computes about {summary.expected_recompute:.0%} of the segment tokens again (some {again:,})."
        )
        console.print(Text(line, style="dim"))
    if summary.segments:
        console.print()
        console.print(_segments(summary.segments))
    _print_reasons(shortfalls, console)
    for note in summary.notes:
        console.print()
        console.print(Text(visible(note)))


def _style(source: str) -> str:
    return f"white on {STYLES[source].terminal}"


def _lines(pieces: Sequence[Piece]) -> Iterator[Line]:
    line: Line = []
    for piece in pieces:
        first, *rest = visible(piece.text).split("\n")
        line.append((first, piece.source))
        for text in rest:
            yield line
            line = [(text, piece.source)]
    if any(text for text, _ in line):
        yield line


def _print_text(pieces: Sequence[Piece], console: Console, colours: bool, text_lines: int | None) -> None:
    for document, group in groupby(pieces, key=lambda piece: piece.document):
        run = list(group)
        tokens = sum(piece.count for piece in run)
        name = visible(document).replace("\n", " ") or "outside of documents"
        console.print()
        console.print(Text(f"── {name} · {tokens:,} tokens", style="bold" if document else "dim"), soft_wrap=True)
        lines = list(_lines(run))
        shown = lines if text_lines is None else lines[:text_lines]
        for line in shown:
            console.print(_coloured(line) if colours else _lettered(line), soft_wrap=True)
        if len(shown) < len(lines):
            console.print(Text(f"… {len(lines) - len(shown):,} more lines", style="dim"))


def _coloured(line: Line) -> Text:
    return Text.assemble(*((text, _style(source)) for text, source in line))


def _lettered(line: Line) -> Text:
    """A margin with one column for each source: its letter where the line has text of it."""
    present = {source for text, source in line if text}
    margin = "".join(STYLES[source].letter if source in present else "·" for source in SOURCES)
    return Text(f"{margin} │ " + "".join(text for text, _ in line))


def _columns(pieces: Sequence[Piece], total: int, width: int) -> list[Counter[str]]:
    """Tokens by source in each of `width` equal stretches of the prompt."""
    columns = [Counter[str]() for _ in range(min(width, total))]
    position = 0
    for piece in pieces:
        for token in range(position, position + piece.count):
            columns[token * len(columns) // total][piece.source] += 1
        position += piece.count
    return columns


def _print_strip(pieces: Sequence[Piece], total: int, console: Console, colours: bool) -> None:
    """The cover: what most of each stretch is; above it, as a height, how much of it is recomputed."""
    columns = _columns(pieces, total, min(_STRIP_COLUMNS, console.width))
    if any(column["recomputed"] for column in columns):
        heights = (round((len(_STEPS) - 1) * column["recomputed"] / column.total()) for column in columns)
        style = STYLES["recomputed"].terminal if colours else ""
        console.print(Text("".join(_STEPS[height] for height in heights), style=style))
    ground = [_ground(column) for column in columns]
    strip = Text()
    for source, group in groupby(ground):
        cells = len(list(group))
        letter = STYLES[source].letter
        strip.append(
            letter.ljust(cells, "▇") if not colours else letter.ljust(cells), _style(source) if colours else ""
        )
    console.print(strip)


def _ground(column: Counter[str]) -> str:
    """What most of a column is; recomputed tokens are known text, so they count as segment."""
    known = {"segment": column["segment"] + column["recomputed"], "prefix": column["prefix"], "new": column["new"]}
    return max(known, key=known.__getitem__)


def _legend(counts: Counter[str], total: int, colours: bool) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for source in SOURCES:
        style = STYLES[source]
        percent = f"{100 * counts[source] / total:.1f} %" if total else ""
        mark = Text(f" {style.letter} ", style=_style(source)) if colours else Text(style.letter)
        table.add_row(mark, style.label, f"{counts[source]:,}", percent, Text(style.meaning, style="dim"))
    return table


def _segments(segments: Sequence[SegmentPlace]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("document", overflow="fold")
    for name in ("stored at", "", "now at", "tokens"):
        table.add_column(name, justify="right")
    for place in segments:
        name = visible(place.document).replace("\n", " ") or "–"
        table.add_row(Text(name), f"{place.stored_position:,}", "→", f"{place.query_position:,}", f"{place.length:,}")
    return table


def _print_reasons(shortfalls: Sequence[Shortfall], console: Console) -> None:
    if not shortfalls:
        return
    console.print()
    console.print(Text("Why there is no more reuse", style="bold"))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for shortfall in sorted(shortfalls, key=lambda shortfall: -shortfall.tokens):
        words = words_of(shortfall.reason)
        text = Text(visible(words.sentence))
        if shortfall.detail:
            text.append(f" ({visible(shortfall.detail)})")
        if words.advice:
            text.append(f"\n{words.advice}", "dim")
        table.add_row(f"{shortfall.tokens:,}", text)
    console.print(table)
