"""Matching in memory: kvblend beside both peers, on one core, in turns.

Every round asks every contestant the same new queries, one contestant after another, and each round begins with another
one: a noisy neighbour hits them all.
"""

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.common.processes import Piped, cores
from benchmarks.common.screen import Screen
from benchmarks.matcher.plan import COVERAGES, Plan
from benchmarks.matcher.processes import PEERS, contestants
from benchmarks.matcher.registration import FilledTables

# A document of so many tokens is found through the window class before it.
SHORT_DOCUMENTS = {128: 200, 64: 100, 32: 40, 16: 24}
# Ids of short documents lie behind those of every library chunk.
_SHORT_IDS = 1 << 32
_SHORT_IDS_OF_A_CLASS = 1 << 24

Row = dict[str, Any]


def run(plan: Plan, screen: Screen) -> Row:
    """Section `match`, with registration into the tables on the way."""
    numbers = itertools.count(1)
    with contestants(cores()[-1], "ours", "mixed", "local", "fleet") as workers:
        tables = FilledTables(workers, screen)
        rows: list[Row] = []
        for table in plan.tables:
            tables.grow(table)
            _add_short_documents(workers["mixed"], table)
            rows += _rows(plan, screen, workers, table, numbers)
        section: Row = {
            "contestants": list(workers),
            "rows": rows,
            "registration": tables.rows,
            "resident_bytes_per_chunk": tables.bytes_per_chunk(),
            "threads": _threads(plan, screen, workers, numbers),
        }
        section["classes"] = list(_class_by_class(plan, screen, workers["ours"], numbers))
    return section


def _add_short_documents(worker: Piped, table: int) -> None:
    """One percent of the entries, the same number for each of the four classes."""
    for window, length in SHORT_DOCUMENTS.items():
        worker.ask("grow_collection", length=length, count=table // 400, first_id=_first_id(window))


def _first_id(window: int) -> int:
    return _SHORT_IDS + window * _SHORT_IDS_OF_A_CLASS


def _rows(plan: Plan, screen: Screen, workers: dict[str, Piped], table: int, numbers: Iterator[int]) -> Iterator[Row]:
    for tokens, (rounds, each) in plan.queries.items():
        for coverage in COVERAGES:
            with screen.working(f"match: {table:,} chunks, queries of {tokens:,} tokens, {coverage} % covered"):
                answers = _in_turns(workers, tokens, coverage, rounds, each, numbers)
            row = {"table": table, "tokens": tokens, "coverage": coverage, **_summary(answers)}
            screen.line(_words(row))
            yield row


def _in_turns(
    workers: dict[str, Piped], tokens: int, coverage: int, rounds: int, each: int, numbers: Iterator[int]
) -> dict[str, list[Row]]:
    """Answers of every contestant, one a round."""
    answers: dict[str, list[Row]] = {name: [] for name in workers}
    names = list(workers)
    for turn in range(rounds):
        asked = list(itertools.islice(numbers, each + 1))
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            answers[name].append(workers[name].ask("match", tokens=tokens, coverage=coverage, numbers=asked))
    return answers


def _summary(answers: dict[str, list[Row]]) -> Row:
    row: Row = {}
    for name, rounds in answers.items():
        milliseconds = sorted(itertools.chain.from_iterable(answer["ms"] for answer in rounds))
        row[f"{name}_ms"] = statistics.median(milliseconds)
        row[f"{name}_quartiles_ms"] = statistics.quantiles(milliseconds, n=4)[::2]
        planted = sum(answer["planted"] for answer in rounds)
        row[f"{name}_recall"] = sum(answer["covered"] for answer in rounds) / planted if planted else None
        row[f"{name}_false_matches"] = sum(answer["false_matches"] for answer in rounds)
    row["queries"] = len(milliseconds)
    for peer in PEERS:
        row[f"ratio_{peer}"] = row[f"{peer}_ms"] / row["ours_ms"] if peer in answers else None
    row["recall"] = row["ours_recall"]
    row["false_matches"] = row["ours_false_matches"]
    return row


def _words(row: Row) -> str:
    words = f"{row['table']:>9,} {row['tokens']:>9,} {row['coverage']:>4} %   ours {row['ours_ms']:.3f} ms"
    words += f"   all classes {row['mixed_ms']:.3f}"
    for peer in PEERS:
        if row[f"ratio_{peer}"]:
            words += f"   {peer} {row[f'{peer}_ms']:.3f} ({row[f'ratio_{peer}']:.1f}x)"
    return words


def _threads(plan: Plan, screen: Screen, workers: dict[str, Piped], numbers: Iterator[int]) -> Row | None:
    """Throughput of two threads on two cores over one thread on one.

    Rounds in which something else had a core for long say nothing of threads: the third of them counts in which threads
    waited least for one.
    """
    if len(cores()) < 2:
        return None
    rounds: dict[str, list[Row]] = {name: [] for name in workers}
    tokens = 1 << 17
    with screen.working("match: two threads on two cores"):
        for _ in range(plan.thread_rounds):
            asked = list(itertools.islice(numbers, 128))
            for name, worker in workers.items():
                # A slow peer needs fewer queries for the same time.
                few = asked if name in ("ours", "mixed") else asked[:8]
                answer = worker.ask("threads", tokens=tokens, coverage=50, numbers=few, cores=cores()[-2:])
                rounds[name].append({"ratio": answer["two"] / answer["one"], "waited": answer["waited"]})
    medians, waited = {}, {}
    for name, answers in rounds.items():
        quiet = sorted(answers, key=lambda answer: answer["waited"])[: -(-len(answers) // 3)]
        medians[name] = statistics.median(answer["ratio"] for answer in quiet)
        waited[name] = max(answer["waited"] for answer in quiet)
    words = [f"{name} {ratio:.2f} (waited {waited[name]:.0%})" for name, ratio in medians.items()]
    screen.line("threads: two over one " + "   ".join(words))
    return {
        "table": plan.largest,
        "tokens": tokens,
        "coverage": 50,
        "two_over_one": medians,
        "waited_for_a_core": waited,
        "rounds": rounds,
    }


def _class_by_class(plan: Plan, screen: Screen, worker: Piped, numbers: Iterator[int]) -> Iterator[Row]:
    """What each further class costs, at the largest table: added to the table that has none, and taken away again."""
    collections = [(length, _first_id(window)) for window, length in SHORT_DOCUMENTS.items()]
    tokens = 1 << 17
    rounds, each = plan.queries[tokens]
    for coverage in COVERAGES:
        steps = []
        with screen.working(f"match: class by class, {coverage} % covered"):
            for _ in range(rounds):
                asked = list(itertools.islice(numbers, (2 * len(collections) + 2) * (each + 1)))
                answer = worker.ask(
                    "class_steps",
                    collections=collections,
                    count=plan.largest // 400,
                    tokens=tokens,
                    coverage=coverage,
                    numbers=asked,
                )
                steps.append(answer["ms"])
        for step, window in enumerate(SHORT_DOCUMENTS, start=1):
            added = statistics.median(ms[step] - ms[step - 1] for ms in steps)
            screen.line(f"class {window:>3}, {coverage:>3} %: {added:+.3f} ms")
            yield {"window": window, "coverage": coverage, "added_ms": added}
