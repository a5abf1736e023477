"""What is measured, at full size and quickly."""

from dataclasses import dataclass

from benchmarks.matcher import data

# Prompts are cut from the same texts as the matcher's bench: name -> percent of a prompt that is stored chunks.
SHIFTED, HALF, PREFIX = "all shifted", "half unknown", "all prefix"
COVERAGE = {SHIFTED: 100, HALF: 50, PREFIX: 0}
PROMPTS = (PREFIX, SHIFTED, HALF)


@dataclass(frozen=True)
class Plan:
    """Sizes in tokens. `chunks` of the library are stored beside the prompts; `calls` of a row: by all its engines."""

    quick: bool
    chunks: int
    sizes: tuple[int, ...]
    engines: tuple[int, ...]
    calls: int
    # Different prompts of each kind and size.
    prompts: int

    @property
    def stored_chunks(self) -> int:
        return self.chunks + sum(size // data.CHUNK_TOKENS for size in self.sizes) * self.prompts


# As many calls as a service keeps latencies of: its percentiles are then those of one row.
FULL = Plan(False, 100_352, (1 << 13, 1 << 15, 1 << 17), (1, 4), 640, 8)
QUICK = Plan(True, 2_048, (1 << 13, 1 << 15), (1, 2), 24, 2)
