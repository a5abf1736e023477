"""`kvblend bench eviction`: a request trace through the store's policies, beside general ones and the optimum."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cli.bench import cachesim
from cli.console import make_console
from services.store.eviction import DEFAULT_POLICY
from services.store.eviction import POLICIES as STORE_POLICIES
from services.store.eviction.replay import Cache, Optimum, PolicyCache, Trace, read_trace, replay

OPTIMUM = "belady"


@dataclass(frozen=True)
class Row:
    """Hit rates of the second half of a trace, with the cache warm; the first half's for choosing parameters."""

    trace: str
    # Of the trace's different blocks, and in blocks.
    percent: float
    capacity: int
    policy: str
    blocks: float
    prefix: float
    first_half_blocks: float
    first_half_prefix: float

    @property
    def is_general(self) -> bool:
        return self.policy not in (DEFAULT_POLICY, OPTIMUM)


def known_policies() -> list[str]:
    """The store's, libcachesim's (marked *) where it is installed, and the optimum."""
    others = list(cachesim.POLICIES) if cachesim.is_installed() else []
    return [*STORE_POLICIES, *others, OPTIMUM]


def measure(traces: Iterable[Trace], percents: Sequence[float], policies: Sequence[str]) -> Iterator[Row]:
    """One row for each trace, size and policy, as soon as it is there. The same every time."""
    for trace in traces:
        footprint = trace.footprint
        for percent in percents:
            capacity = max(1, int(footprint * percent / 100))
            for policy in policies:
                first, second = replay(_cache(policy, trace, capacity), trace)
                yield Row(trace.name, percent, capacity, policy, *second.rates, *first.rates)


def _cache(policy: str, trace: Trace, capacity: int) -> Cache:
    if policy == OPTIMUM:
        return Optimum(trace, capacity)
    if policy in STORE_POLICIES:
        return PolicyCache(policy, capacity)
    return cachesim.CachesimCache(policy, capacity)


def run(paths: Sequence[Path], sizes: str, policies: Sequence[str], as_json: bool) -> int:
    """Exit code: 0, or 2 for arguments that cannot be used."""
    errors = make_console(stderr=True)
    try:
        percents = _percents(sizes)
        unknown = set(policies) - set(known_policies())
        if unknown:
            raise ValueError(f"no such policy: {', '.join(sorted(unknown))}; there are {', '.join(known_policies())}")
        traces = [read_trace(path) for path in paths]
    except (OSError, ValueError) as error:
        errors.print(str(error), style="bold red")
        return 2
    chosen = list(policies) or known_policies()
    console = make_console()
    if as_json:
        rows = [asdict(row) for row in measure(traces, percents, chosen)]
        console.print_json(json.dumps(rows))
        return 0
    for trace in traces:
        with errors.status(f"{trace.name}: {len(trace.requests):,} requests, {trace.footprint:,} different blocks"):
            _show(console, trace, list(measure([trace], percents, chosen)), chosen)
    if not cachesim.is_installed():
        errors.print("libcachesim is not installed (pip install libcachesim): its policies are left out.", style="dim")
    return 0


def _percents(sizes: str) -> list[float]:
    try:
        percents = [float(size) for size in sizes.split(",")]
    except ValueError:
        percents = []
    if not percents or not all(0 < percent <= 100 for percent in percents):
        raise ValueError("sizes are percentages of a trace's different blocks, such as 1,5,10,25")
    return percents


def _show(console: Console, trace: Trace, rows: Sequence[Row], policies: Sequence[str]) -> None:
    title = f"{trace.name}: hit rate of the second half (blocks / unbroken prefix)"
    table = Table("policy", title=title, title_justify="left")
    percents = sorted({row.percent for row in rows})
    for percent in percents:
        table.add_column(f"{percent:g} %", justify="right")
    found = {(row.policy, row.percent): row for row in rows}
    online = [row for row in rows if row.policy != OPTIMUM]
    best = {percent: max((row.blocks for row in online if row.percent == percent), default=-1) for percent in percents}
    for policy in policies:
        cells = []
        for percent in percents:
            row = found[policy, percent]
            cell = f"{row.blocks:.4f} / {row.prefix:.4f}"
            cells.append(f"[bold]{cell}[/]" if row.blocks == best[percent] else cell)
        table.add_row(f"{policy} (default)" if policy == DEFAULT_POLICY else policy, *cells)
    console.print(table)
