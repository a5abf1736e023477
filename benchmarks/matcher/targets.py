"""What must be reached, and whether it was: at the full sizes only."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.common.targets import Row, Target, at_least, at_most, entry, one
from benchmarks.matcher.plan import COVERAGES, FULL

Sections = dict[str, Row]
_QUERY = 1 << 17


def done_when(sections: Sections, cpus: int) -> list[Row]:
    """One entry a target."""
    return [entry(target, sections) for target in (*_matching(), *_service(), *_life(), *_replicas(cpus))]


def _full(sections: Sections, name: str, size: str, wanted: int) -> Row:
    section = sections[name]
    if section[size] != wanted:
        raise LookupError(f"{name} was run small")
    return section


def _matching() -> Iterator[Target]:
    for peer, bounds in (("local", (60, 60, 60)), ("fleet", (5, 8, 8))):
        for coverage, bound in zip(COVERAGES, bounds, strict=True):
            name = f"match, 800 K chunks, 128 K tokens, {coverage} %: times {peer}"
            yield at_least(name, bound, partial(_ratio, peer=peer, coverage=coverage))
    yield at_least("recall, lowest", 1.0, _recall)
    yield at_most("false matches", 0, _false_matches)
    yield at_most("each further window class, highest ms", 0.2, _class_cost)
    yield at_least("two threads over one", 1.7, _threads)
    for peer in ("local", "fleet"):
        yield Target(
            f"registration into the table: times {peer}",
            ">= 3 (median page)",
            partial(_registered, peer=peer),
            lambda value: value["median_page"] >= 3,
        )


def _ratio(sections: Sections, peer: str, coverage: int) -> Any:
    rows = sections["match"]["rows"]
    return one(rows, table=FULL.largest, tokens=_QUERY, coverage=coverage)[f"ratio_{peer}"]


def _registered(sections: Sections, peer: str) -> Any:
    row = one(sections["match"]["registration"], table=FULL.largest)
    if row[f"ratio_{peer}"] is None:
        raise LookupError(peer)
    return {"median_page": row[f"ratio_{peer}"], "all_time": row[f"whole_ratio_{peer}"]}


def _recall(sections: Sections) -> Any:
    rows = sections["match"]["rows"]
    return min(row[name] for row in rows for name in ("ours_recall", "mixed_recall") if row[name] is not None)


def _false_matches(sections: Sections) -> int:
    rows = sections["match"]["rows"]
    return sum(row[f"{name}_false_matches"] for row in rows for name in ("ours", "mixed"))


def _class_cost(sections: Sections) -> Any:
    section = sections["match"]
    one(section["rows"], table=FULL.largest)
    return max(row["added_ms"] for row in section["classes"])


def _threads(sections: Sections) -> Any:
    return one([sections["match"]["threads"]], table=FULL.largest)["two_over_one"]["ours"]


def _service() -> Iterator[Target]:
    for tokens, bound in ((1 << 17, 2.5), (1 << 15, 1.0)):
        yield Target(
            f"Match RPC, {tokens >> 10} K tokens, p50 ms",
            f"<= {bound}, or 3 x the no-op",
            partial(_rpc, tokens=tokens),
            partial(_rpc_passes, bound=bound),
        )


def _rpc(sections: Sections, tokens: int) -> Row:
    rows = _full(sections, "rpc", "chunks", FULL.rpc_chunks)["rows"]
    found = {
        call: one(rows, server="sync", transport="unix", tokens=tokens, clients=1, call=call)["p50_ms"]
        for call in ("match", "no-op")
    }
    return {"match_ms": found["match"], "no_op_ms": found["no-op"]}


def _rpc_passes(value: Row, bound: float) -> bool:
    fast: bool = value["match_ms"] <= max(bound, 3 * value["no_op_ms"])
    return fast


def _life() -> Iterator[Target]:
    yield at_most("ready after kill -9 with 1 M chunks, slowest s", 15, _ready)
    yield Target("the same matches after it", "yes", _same, bool)
    yield Target(
        "after 10 M cycles over before: ms and bytes",
        "<= 1.1 each",
        _churned,
        lambda value: all(ratio <= 1.1 for ratio in value.values()),
    )
    for length in (700, 100):
        yield at_least(f"documents of {length} tokens, share covered", 0.98, partial(_share, length=length))


def _ready(sections: Sections) -> Any:
    return max(row["seconds"] for row in _full(sections, "readiness", "chunks", FULL.ready_chunks)["rows"])


def _same(sections: Sections) -> bool:
    return all(row["same_matches"] for row in _full(sections, "readiness", "chunks", FULL.ready_chunks)["rows"])


def _churned(sections: Sections) -> Row:
    section = _full(sections, "churn", "cycles", FULL.churn_cycles)
    return {name: section["after"][name] / section["before"][name] for name in ("ms", "table_bytes")}


def _share(sections: Sections, length: int) -> Any:
    return one(sections["coverage"]["rows"], lengths=[length])["ours_share"]


def _replicas(cpus: int) -> Iterator[Target]:
    def replicas(sections: Sections) -> Row:
        return _full(sections, "replicas", "chunks", FULL.replica_chunks)

    def cpu(sections: Sections) -> Row:
        section = replicas(sections)
        return {
            "same_load_each": section["cpu"]["cpu_two_over_one"],
            "saturated": section["throughput"]["cpu_two_over_one"],
        }

    yield Target(
        "CPU of a match, two replicas over one",
        "<= 1.1 (same load each)",
        cpu,
        lambda value: value["same_load_each"] <= 1.1,
    )
    if cpus >= 8:
        yield at_least("throughput, two replicas over one", 1.8, lambda s: replicas(s)["throughput"]["two_over_one"])
    yield at_most(
        "visible on every replica, p99 ms",
        100,
        lambda s: replicas(s)["visibility"]["p99_ms"],
    )
