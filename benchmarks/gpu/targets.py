"""What the GPU's path must reach, at the full sizes only."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.common.targets import Row, Target, at_least, at_most, entry, one

_BOUNDS = {8: 0.95, 32: 0.98, 128: 0.98}
_STEPS = 0.80
_RPC_MS = 1.5
_FREE_SECONDS = 0.5


def targets(sections: dict[str, Row], _facts: Row) -> list[Row]:
    return [entry(target, sections) for target in (*_link(), *_steps(), *_kernels(), *_calls(), _life())]


def _link() -> Iterator[Target]:
    for chunks, bound in _BOUNDS.items():
        for what in ("retrieve shifted", "store"):
            yield at_least(f"{what}, {chunks} chunks, of the link", bound, partial(_fraction, chunks=chunks, what=what))


def _fraction(sections: dict[str, Row], chunks: int, what: str) -> Any:
    """The worse of the two arrangements."""
    rows = sections["copies"]["rows"]
    return min(
        one(rows, chunks=chunks, what=what, arrangement=arrangement)["fraction_of_link"]
        for arrangement in ("paged_nhd", "contiguous")
    )


def _steps() -> Iterator[Target]:
    """From 1 MiB a piece on."""
    for chunks in _BOUNDS:
        yield at_least(f"layer by layer, {chunks} chunks, of the link", _STEPS, partial(_stepped, chunks=chunks))


def _stepped(sections: dict[str, Row], chunks: int) -> Any:
    rows = [row for row in sections["copies"]["steps"] if row["chunks"] == chunks]
    return min(row["fraction_of_link"] for row in rows)


def _kernels() -> Iterator[Target]:
    for what in ("scatter", "scatter and rotate", "scatter, rotate and verify", "gather"):
        yield at_least(f"{what}, paged, of device copy", 0.7, partial(_of_copy, what=what))


def _of_copy(sections: dict[str, Row], what: str) -> Any:
    return sections["kernel"][f"{what}, paged_nhd"]["of_device_copy"]


def _calls() -> Iterator[Target]:
    for what in ("retrieve", "store"):
        yield at_most(f"{what} over RPC, 8 chunks, ms more than the copy", _RPC_MS, partial(_added, what=what))


def _added(sections: dict[str, Row], what: str) -> Any:
    copied = one(sections["copies"]["rows"], chunks=8, what=what, arrangement="paged_nhd")
    called = one(sections["calls"]["rows"], chunks=8)
    return called[f"{what}_ms"] - 8 * sections["copies"]["chunk_bytes"] / copied["gbs"] / 1e6


def _life() -> Target:
    return at_most(
        "the memory of a killed engine is free, worst, s", _FREE_SECONDS, lambda sections: sections["life"]["worst_s"]
    )
