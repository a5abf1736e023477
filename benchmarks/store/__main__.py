"""`python -m benchmarks.store`: measures, writes build/bench/store.json, says what was reached.

Some sections again: --only local,redis.
"""

import sys
from collections.abc import Iterator
from types import ModuleType

from benchmarks.common.command import Bench
from benchmarks.common.targets import Row, entry
from benchmarks.store import aborted, control, eviction, local, redis, sustained, throttled

# Each has `run(quick, screen)`, its figures, and `targets(section)`, what they must reach.
SECTIONS: dict[str, ModuleType] = {
    "local": local,
    "control": control,
    "redis": redis,
    "throttled": throttled,
    "aborted": aborted,
    "eviction": eviction,
    "sustained": sustained,
}


def _targets(sections: dict[str, Row], _facts: Row) -> Iterator[Row]:
    for name, module in SECTIONS.items():
        section = sections.get(name, {})
        yield from (entry(target, section) for target in module.targets(section))


BENCH = Bench(
    name="store",
    about="The store beside memcpy, Redis clients, eviction policies and Belady's optimum.",
    sections={name: module.run for name, module in SECTIONS.items()},
    targets=_targets,
    memory=(4 << 30, 0),
)

if __name__ == "__main__":
    BENCH.main(sys.argv[1:])
