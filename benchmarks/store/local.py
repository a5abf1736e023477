"""Bytes of KV into and out of the arena, beside memcpy between the same kinds of memory in the same turns.

A write is Reserve, copy with checksum, Commit; a read is Lookup, BeginCopy, copy, the check that the blocks are still
the same, EndCopy. The store is a process of its own; all calls are inside the time.
"""

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from benchmarks.common.screen import Screen
from benchmarks.common.targets import Row, Target, at_least, one
from benchmarks.store.client import LAYER_BYTES, BenchClient, fresh_tokens, places_of, store_process
from services.common.checksums import Bytes, copy_with_checksum

_MIB = 1 << 20
_OBJECTS_MIB = (1, 8, 32)
# (arena, bytes of one turn, turns)
_FULL = (2048 * _MIB, 512 * _MIB, 9)
_QUICK = (256 * _MIB, 64 * _MIB, 3)


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    arena_bytes, turn_bytes, turns = _QUICK if quick else _FULL
    rows = []
    with store_process(arena_bytes) as (target, directory), _shared(turn_bytes) as shared:
        private = np.ones(turn_bytes, np.uint8)
        for mib in _OBJECTS_MIB:
            with screen.working(f"objects of {mib} MiB"), closing(BenchClient(target, directory, mib)) as client:
                rows.append(_measure(client, mib, private, shared, turns))
            screen.line(_line(rows[-1]))
    return {"quick": quick, "turn_bytes": turn_bytes, "rows": rows}


def targets(section: dict[str, Any]) -> list[Target]:
    def figure(name: str, mib: int) -> Callable[[Row], Any]:
        return lambda section: None if section["quick"] else one(section["rows"], object_mib=mib)[name]

    del section
    return [
        at_least(f"{text}, objects of {mib} MiB, of memcpy", bound, figure(name, mib))
        for name, text, bound in (
            ("write_of_memcpy", "reserve + copy + checksum + commit", 0.6),
            ("read_of_memcpy", "lease + read", 0.85),
        )
        for mib in _OBJECTS_MIB
    ]


def _line(row: Row) -> str:
    return (
        f"{row['object_mib']:>2} MiB: write {row['write_gb_s']:.1f} GB/s ({row['write_of_memcpy']:.2f} of memcpy), "
        f"read {row['read_gb_s']:.1f} GB/s ({row['read_of_memcpy']:.2f}); memcpy in {row['memcpy_in_gb_s']:.1f}, "
        f"out {row['memcpy_out_gb_s']:.1f} GB/s"
    )


@contextmanager
def _shared(size: int) -> Iterator[Bytes]:
    """Memory like the arena's: a file on its file system, mapped and touched."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        memory[:] = 1
        yield memory


def _measure(client: BenchClient, mib: int, private: Bytes, shared: Bytes, turns: int) -> Row:
    """Each turn does everything once, so that a slow moment of the machine meets all of it."""
    size = mib * LAYER_BYTES
    sources = [private[first : first + size] for first in range(0, len(private), size)]
    targets = [shared[first : first + size] for first in range(0, len(private), size)]
    seconds: dict[str, list[float]] = {"memcpy_in": [], "write": [], "memcpy_out": [], "read": []}
    for turn in range(turns + 1):
        private[::4096] = turn
        tokens = fresh_tokens(len(sources))
        times = {"memcpy_in": _timed(lambda: _copy(targets, sources))}
        start = time.perf_counter()
        places = _write(client, tokens, sources)
        times["write"] = time.perf_counter() - start
        times["memcpy_out"] = _timed(lambda: _copy(sources, targets))
        start = time.perf_counter()
        _read(client, tokens, places, sources)
        times["read"] = time.perf_counter() - start
        if turn:
            # The first one touches what the others find touched.
            for name, value in times.items():
                seconds[name].append(value)
    rates = {name: len(private) / statistics.median(values) / 1e9 for name, values in seconds.items()}
    return {
        "object_mib": mib,
        **{f"{name}_gb_s": rate for name, rate in rates.items()},
        "write_of_memcpy": _ratio(seconds["memcpy_in"], seconds["write"]),
        "read_of_memcpy": _ratio(seconds["memcpy_out"], seconds["read"]),
    }


def _ratio(ceiling: Sequence[float], ours: Sequence[float]) -> float:
    """Median over the turns of one's time over the other's in the same turn."""
    return statistics.median(limit / own for limit, own in zip(ceiling, ours, strict=True))


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _copy(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def _write(client: BenchClient, tokens: bytes, sources: Sequence[Bytes]) -> list[Any]:
    reserved = client.reserve(tokens)
    places = places_of(reserved)
    if len(places) != len(sources):
        raise RuntimeError("the store did not take every chunk")
    checksums = [copy_with_checksum(client.block(place), source) for place, source in zip(places, sources, strict=True)]
    client.commit(reserved.reservation_id, places, checksums)
    return places


def _read(client: BenchClient, tokens: bytes, places: Sequence[Any], targets: Sequence[Bytes]) -> None:
    key = client.lookup(tokens)
    client.begin(key, places)
    _copy(targets, [client.block(place) for place in places])
    if not all(client.is_current(place) for place in places):
        raise RuntimeError("a block that was leased has changed")
    client.end(key, places)
