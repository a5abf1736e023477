"""Figures of docs/matcher.md from build/bench/matcher.json: `python -m benchmarks.matcher.plots JSON FOLDER`.

Needs the `bench` extra (matplotlib) and nothing of the project.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

_COLORS = {"ours": "#1557b0", "fleet": "#b35900", "local": "#6b6b6b"}
_NAMES = {"ours": "kvblend", "fleet": "lmcache fleet", "local": "lmcache local"}
_COVERAGES = (0, 50, 100)
_SHADES = {0: "#7fa6d9", 50: "#3f78c0", 100: "#0f3f80"}
_BOUND = "#c0392b"
_COVERED = {0: "nothing known", 50: "half of it known", 100: "all of it known"}
_QUERY = 1 << 17
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    # The same figures make the same file.
    "svg.hashsalt": "kvblend",
}

Row = dict[str, Any]


def latency(section: Row) -> Figure:
    """Milliseconds over the length of the query, at the largest table."""
    largest = max(row["table"] for row in section["rows"])
    figure = Figure(figsize=(9, 3.3))
    panels = figure.subplots(1, 3, sharey=True)
    for axes, coverage in zip(panels, _COVERAGES, strict=True):
        rows = [row for row in section["rows"] if row["table"] == largest and row["coverage"] == coverage]
        for name in _there(rows):
            _line(axes, [row["tokens"] for row in rows], [row[f"{name}_ms"] for row in rows], name)
        _across(axes, [row["tokens"] for row in rows], _binary, 12)
        axes.set(yscale="log", xlabel="tokens of the query", title=_COVERED[coverage])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    panels[0].set_ylabel("ms of one match (median)")
    figure.suptitle(f"One match, {largest:,} chunks in the table, one core", x=0.01, ha="left", fontsize=11)
    return figure


def ratio(section: Row) -> Figure:
    """How many times faster, over the size of the table; a query of 128 K tokens."""
    rows = [row for row in section["rows"] if row["tokens"] == _QUERY]
    figure = Figure(figsize=(9, 3.4))
    panels = figure.subplots(1, 2)
    bounds = {"local": {60: "wanted at 800 K: 60"}, "fleet": {5: "wanted at 800 K, 0 %: 5", 8: "50 and 100 %: 8"}}
    for axes, peer in zip(panels, ("local", "fleet"), strict=True):
        lines = {}
        for coverage in _COVERAGES:
            chosen = [row for row in rows if row["coverage"] == coverage and row[f"ratio_{peer}"]]
            if chosen:
                sizes, ratios = [row["table"] for row in chosen], [row[f"ratio_{peer}"] for row in chosen]
                axes.plot(sizes, ratios, color=_SHADES[coverage], marker="o", markersize=4)
                lines[f"{coverage} %: {ratios[-1]:.3g}x"] = (sizes[-1], ratios[-1], _SHADES[coverage])
        for bound, words in bounds[peer].items():
            axes.axhline(bound, color=_BOUND, linewidth=0.8)
            axes.annotate(words, (0.01, bound), xycoords=("axes fraction", "data"), va="top", fontsize=8,
                          color=_BOUND, xytext=(0, -1), textcoords="offset points")  # fmt: skip
        _across(axes, sorted({row["table"] for row in rows}), _tokens, 3)
        axes.set(ylim=(0, None), xlabel="chunks in the table", title=f"times faster than {_NAMES[peer]}")
        _label_ends(axes, lines)
    figure.suptitle("Beside the peers: queries of 128 K tokens, of which 0, 50 or 100 % are known", x=0.01, ha="left",
                    fontsize=11)  # fmt: skip
    return figure


def classes(section: Row) -> Figure:
    """Milliseconds that each further window class adds."""
    figure = Figure(figsize=(5.5, 3))
    axes = figure.subplots()
    windows = sorted({row["window"] for row in section["classes"]}, reverse=True)
    for offset, coverage in zip((-0.26, 0, 0.26), _COVERAGES, strict=True):
        added = [row["added_ms"] for w in windows for row in section["classes"]
                 if row["window"] == w and row["coverage"] == coverage]  # fmt: skip
        places = [place + offset for place in range(len(windows))]
        axes.bar(places, added, 0.24, color=_SHADES[coverage], label=f"{coverage} %")
    axes.axhline(0.2, color=_BOUND, linewidth=0.8)
    axes.annotate("wanted: at most 0.2", (0, 0.2), xycoords=("axes fraction", "data"), fontsize=8, color=_BOUND,
                  xytext=(4, 2), textcoords="offset points")  # fmt: skip
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set_xticks(range(len(windows)), [f"{window} tokens" for window in windows])
    axes.grid(axis="x", visible=False)
    axes.set(ylabel="ms added to a match", title="Cost of each further window class, 128 K tokens")
    axes.legend(title="known", frameon=False, fontsize=8, title_fontsize=8, ncols=3, loc="upper right")
    axes.set_ylim(top=max(0.32, axes.get_ylim()[1] * 1.15))
    return figure


def registration(section: Row, durable: Row | None) -> Figure:
    """Chunks per second into the table, and until the log has them."""
    figure = Figure(figsize=(9.5, 3))
    left, right = figure.subplots(1, 2)
    rows = section["registration"]
    sizes = [row["table"] for row in rows]
    lines = {}
    for name in _there(rows, "chunks_s"):
        rates = [row[f"{name}_median_page_chunks_s"] for row in rows]
        left.plot(sizes, rates, color=_COLORS[name], marker="o", markersize=3.5, linewidth=1.6)
        left.plot(sizes, [row[f"{name}_chunks_s"] for row in rows], ":", color=_COLORS[name], linewidth=1.2)
        lines[_NAMES[name]] = (sizes[-1], rates[-1], _COLORS[name])
    _across(left, sizes, _tokens, 8)
    left.set(ylim=(0, None), xlabel="chunks in the table", ylabel="chunks a second")
    left.set_title("into the table, one core: median page (dotted: all time)")
    _label_ends(left, lines)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
    if durable:
        words = [f"{row['log']}, {row['writers']} store{'s' * (row['writers'] > 1)}" for row in durable["rows"]]
        _bars(right, words, [row["chunks_s"] for row in durable["rows"]], _tokens)
    right.set(xlabel="chunks a second", title="through the service, until the log has them")
    figure.suptitle("Registering chunks of 256 tokens", x=0.01, ha="left", fontsize=11)
    return figure


def rpc(section: Row) -> Figure:
    """p50 (bar) and p99 (mark) of `Match` and of the no-op, by server and transport."""
    figure = Figure(figsize=(9, 5.4))
    panels = figure.subplots(2, 2)
    kinds = [(server, transport) for server in ("sync", "asyncio") for transport in ("unix", "tcp")]
    for line, clients in zip(panels, (1, 8), strict=True):
        for axes, tokens in zip(line, (1 << 15, _QUERY), strict=True):
            for shift, call, color, ink in (
                (0.2, "match", _COLORS["ours"], "white"),
                (-0.2, "no-op", "#b5b5b5", "black"),
            ):
                found = [_one(section["rows"], server=server, transport=transport, call=call, tokens=tokens,
                              clients=clients) for server, transport in kinds]  # fmt: skip
                places = [place + shift for place in range(len(kinds))][::-1]
                axes.barh(places, [row["p50_ms"] for row in found], 0.36, color=color, label=f"{call}, p50")
                axes.plot([row["p99_ms"] for row in found], places, "|", color="#222222", markersize=9,
                          label="p99" if call == "match" else None)  # fmt: skip
                for place, row in zip(places, found, strict=True):
                    axes.annotate(_plain(row["p50_ms"]), (0, place), fontsize=7.5, va="center", xytext=(4, 0),
                                  textcoords="offset points", color=ink)  # fmt: skip
            axes.set_yticks(range(len(kinds)), [f"{server}, {transport}" for server, transport in kinds][::-1])
            axes.grid(axis="y", visible=False)
            axes.set(title=f"{tokens >> 10} K tokens, {clients} client{'s' * (clients > 1)}", xlim=(0, None))
    for axes in panels[1]:
        axes.set_xlabel("ms")
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=3, loc="outside lower left"
    )
    figure.suptitle(f"Match from end to end, {section['chunks']:,} chunks", x=0.01, ha="left", fontsize=11)
    return figure


def coverage(section: Row) -> Figure:
    """Share of documents' tokens that is found, by contestant."""
    figure = Figure(figsize=(7, 2.8))
    axes = figure.subplots()
    names = [name for name in _COLORS if f"{name}_share" in section["rows"][0]]
    for index, name in enumerate(names):
        places = [place + 0.26 * (1 - index) for place in range(len(section["rows"]))][::-1]
        shares = [100 * row[f"{name}_share"] for row in section["rows"]]
        axes.barh(places, shares, 0.24, color=_COLORS[name], label=_NAMES[name])
        for place, share in zip(places, shares, strict=True):
            axes.annotate(f"{share:.1f} %" if share % 1 else f"{share:.0f} %", (share, place), fontsize=8, va="center",
                          xytext=(3, 0), textcoords="offset points")  # fmt: skip
    words = [f"{' and '.join(map(str, row['lengths']))} tokens" for row in section["rows"]]
    axes.set_yticks(range(len(words)), words[::-1])
    axes.grid(axis="y", visible=False)
    axes.set(xlim=(0, 112), xticks=range(0, 101, 20), xlabel="% of tokens found",
             title="Documents of one length in a random order, chunks of 256")  # fmt: skip
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    return figure


def _there(rows: Sequence[Row], figure: str = "ms") -> list[str]:
    return [name for name in _COLORS if f"{name}_{figure}" in rows[0]]


def _one(rows: Sequence[Row], **where: Any) -> Row:
    return next(row for row in rows if all(row[key] == value for key, value in where.items()))


def _label_ends(axes: Axes, lines: dict[str, tuple[float, float, str]]) -> None:
    """Words at the right end (x, y) of each line, in its colour; moved apart where they would stand on each other."""
    low, high = axes.get_ylim()
    gap = 0.065 * (high - low)
    below = low
    for words, (across, up, color) in sorted(lines.items(), key=lambda item: item[1][1]):
        below = max(up, below + gap)
        axes.annotate(words, (across, below), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8,
                      color=color)  # fmt: skip


def _line(axes: Axes, across: Sequence[float], up: Sequence[float], name: str) -> None:
    """A line with its name at its end."""
    axes.plot(across, up, color=_COLORS[name], marker="o", markersize=3.5, linewidth=1.6)
    axes.annotate(_NAMES[name], (across[-1], up[-1]), xytext=(6, 0), textcoords="offset points", va="center",
                  fontsize=8, color=_COLORS[name])  # fmt: skip


def _bars(axes: Axes, words: Sequence[str], values: Sequence[float], form: Callable[[float], str]) -> None:
    places = range(len(words))[::-1]
    axes.barh(list(places), values, 0.6, color=_COLORS["ours"])
    for place, value in zip(places, values, strict=True):
        axes.annotate(form(value), (value, place), fontsize=8, va="center", xytext=(3, 0), textcoords="offset points")
    axes.set_yticks(list(places), words)
    axes.set_xlim(0, max(values) * 1.15)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axes.grid(axis="y", visible=False)


def _across(axes: Axes, sizes: Sequence[int], form: Callable[[int], str], room: int) -> None:
    """A logarithmic axis with a tick at each size, and room for words behind the last."""
    axes.set(xscale="log", xlim=(sizes[0] * 0.8, sizes[-1] * room))
    axes.set_xticks(sizes, [form(size) for size in sizes], minor=False)
    axes.xaxis.set_minor_locator(NullLocator())


def _tokens(value: float) -> str:
    for unit, size in (("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _binary(tokens: int) -> str:
    return f"{tokens >> 20} M" if tokens >> 20 else f"{tokens >> 10} K"


def _plain(value: float) -> str:
    return f"{value:.3g}"


def main(argv: Sequence[str]) -> None:
    """Draws what the file has sections for."""
    results, folder = json.loads(Path(argv[1]).read_text()), Path(argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Figure] = {}
    with mpl.rc_context(_STYLE):
        if "match" in results:
            drawn["latency"] = latency(results["match"])
            drawn["ratio"] = ratio(results["match"])
            drawn["window-classes"] = classes(results["match"])
            drawn["registration"] = registration(results["match"], results.get("durable"))
        if "rpc" in results:
            drawn["rpc"] = rpc(results["rpc"])
        if "coverage" in results:
            drawn["coverage"] = coverage(results["coverage"])
        for name, figure in drawn.items():
            path = folder / f"matcher-{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            print(path)


if __name__ == "__main__":
    main(sys.argv)
