"""`python -m benchmarks.lookup`: measures, writes build/bench/lookup.json, says what was reached."""

import sys

from benchmarks.common.command import Bench
from benchmarks.lookup import report, ways

BENCH = Bench(
    name="lookup",
    about="The whole way of a lookup, as an engine sees it, over real services; beside figures of lmcache's server.",
    sections={"lookup": ways.run},
    targets=report.targets,
    memory=(2 << 30, 0),
    tables=report.table,
)

if __name__ == "__main__":
    BENCH.main(sys.argv[1:])
