"""Documents of any length in a random order: how much of them is found."""

from typing import Any

from benchmarks.common.processes import cores
from benchmarks.common.screen import Screen
from benchmarks.matcher.plan import Plan
from benchmarks.matcher.processes import contestants

_COLLECTIONS = ((700,), (100,), (100, 700))


def run(plan: Plan, screen: Screen) -> dict[str, Any]:
    """Section `coverage`: share of tokens covered, by contestant."""
    rows = []
    with contestants(cores()[-1], "ours", "local", "fleet") as workers:
        for lengths in _COLLECTIONS:
            row: dict[str, Any] = {"lengths": list(lengths)}
            # A prompt of at most 2^20 tokens.
            count = min(plan.documents, (1 << 20) // sum(lengths))
            with screen.working(f"coverage: documents of {' and '.join(map(str, lengths))} tokens"):
                for name, worker in workers.items():
                    answer = worker.ask("documents", lengths=list(lengths), count=count, number=1)
                    row[f"{name}_share"] = answer["covered"] / answer["tokens"]
            row["tokens"] = answer["tokens"]
            shares = "   ".join(f"{name} {row[f'{name}_share']:.1%}" for name in workers)
            screen.line(f"documents of {' and '.join(map(str, lengths))} tokens: {shares} covered")
            rows.append(row)
    return {"rows": rows}
