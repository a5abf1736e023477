"""`python -m benchmarks.gpu`: measures one GPU's path, writes build/bench/gpu.json, says what was reached.

Needs an NVIDIA GPU, a CUDA build of torch, and Triton.
"""

import sys

from benchmarks.common.command import Bench
from benchmarks.gpu import calls, ceilings, copies, kernel, life, methods
from benchmarks.gpu.targets import targets

BENCH = Bench(
    name="gpu",
    about="KV between an engine's GPU memory and the arena, beside the ceilings of the machine.",
    sections={
        "ceilings": ceilings.run,
        "kernel": kernel.run,
        "copies": copies.run,
        "methods": methods.run,
        "calls": calls.run,
        "life": life.run,
    },
    targets=targets,
)

if __name__ == "__main__":
    BENCH.main(sys.argv[1:])
