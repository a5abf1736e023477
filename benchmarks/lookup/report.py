"""What a lookup must reach, and its figures beside those of lmcache's server."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.targets import Row, Target, at_most, entry, one
from benchmarks.lookup.plan import PREFIX, SHIFTED

# lmcache 0.5.6, client and server on the same two cores, everything in memory; p50 in ms by tokens.
PEER = {
    PREFIX: {1 << 13: 1.45, 1 << 15: 2.97, 1 << 17: 9.1},
    SHIFTED: {1 << 13: 1.87, 1 << 15: 4.6, 1 << 17: 20.1},
}
PEER_END = {1 << 13: 1.5, 1 << 15: 3.8, 1 << 17: 15.1}
_LONGEST_MS = {1 << 15: 2.3, 1 << 17: 7.0}
_LONGEST_END_MS = 0.5
_LONGEST_LEASES_MS = 100


def targets(sections: dict[str, Row], _facts: Row) -> Iterator[Row]:
    section = sections.get("lookup", {})
    yield from (entry(target, section) for target in _targets())


def _targets() -> Iterator[Target]:
    for tokens, bound in _LONGEST_MS.items():
        of_this = f"{tokens >> 10} K tokens, every chunk shifted, 1 engine"
        yield at_most(f"lookup, {of_this}, p50 ms", bound, partial(_median, tokens=tokens, of="lookup"))
        yield at_most(f"ending it, {of_this}, p50 ms", _LONGEST_END_MS, partial(_median, tokens=tokens, of="end"))
    yield at_most("leases gone after the last end, slowest ms", _LONGEST_LEASES_MS, _slowest_leases)


def _median(section: Row, tokens: int, of: str) -> Any:
    if section["quick"]:
        raise LookupError("it was run small")
    return one(section["rows"], tokens=tokens, prompt=SHIFTED, engines=1)[of]["p50_ms"]


def _slowest_leases(section: Row) -> Any:
    if section["quick"]:
        raise LookupError("it was run small")
    return max(row["leases_gone_ms"] for row in section["rows"])


def table(console: Console, sections: dict[str, Row]) -> None:
    shown = Table(title="p50 ms", title_justify="left", box=None, pad_edge=False)
    for column in ("tokens", "prompt", "engines", "lookup", "p99", "peer", "end", "peer's end", "no-op"):
        shown.add_column(column, justify="left" if column == "prompt" else "right")
    for row in sections["lookup"]["rows"]:
        tokens, single = row["tokens"], row["engines"] == 1
        peer = PEER.get(row["prompt"], {}).get(tokens) if single else None
        peer_end = PEER_END.get(tokens) if single and row["prompt"] == SHIFTED else None
        shown.add_row(
            f"{tokens:,}",
            row["prompt"],
            str(row["engines"]),
            f"{row['lookup']['p50_ms']:.2f}",
            f"{row['lookup']['p99_ms']:.2f}",
            f"{peer:.2f}" if peer else "",
            f"{row['end']['p50_ms']:.2f}",
            f"{peer_end:.2f}" if peer_end else "",
            f"{row['no_op']['p50_ms']:.2f}",
        )
    console.print(shown)
