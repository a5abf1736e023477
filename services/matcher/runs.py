"""From occurrences of chunks to runs of neighbouring chunks, extended token by token at both ends, and their cover."""

from dataclasses import dataclass

import numpy as np

from services.common.tokens import TokenArray, encode_u32
from services.matcher.cover import SHORTEST_SEGMENT, best_ranges
from services.matcher.kernels import Links, RawRuns, Reader, Text, link_occurrences, longest_runs, trace
from services.matcher.occurrences import Interval, Occurrences
from services.matcher.table import Entry, Table


@dataclass(frozen=True)
class Run:
    """Query positions [start, end), stored in neighbouring chunks. `skip`: tokens of the first that lie before it.

    lengths: tokens that each entry contributes. context_class: the worst of the whole run's.
    """

    start: int
    end: int
    context_class: int
    entries: list[Entry]
    lengths: TokenArray
    skip: int

    @property
    def chain_hashes(self) -> bytes:
        return b"".join(entry.name.chain_hash for entry in self.entries)

    @property
    def chunk_lengths(self) -> bytes:
        return encode_u32(self.lengths)


def best_runs(table: Table, text: Text, part: Occurrences, reader: Reader, skip: int) -> list[Run]:
    """The best cover of query[max(low, skip):high] by what the reader may have."""
    links, runs = _raw_runs(table, text, part, reader)
    starts = np.maximum(runs.starts, skip)
    kept = np.flatnonzero(runs.ends - starts >= SHORTEST_SEGMENT)
    chosen = best_ranges(starts[kept], runs.ends[kept], runs.classes[kept])
    if not chosen:
        return []
    firsts, lasts, indices = np.array(chosen, dtype=np.int64).T
    served = kept[indices]
    ids, lengths, counts, skips = trace(
        np.ascontiguousarray(firsts),
        np.ascontiguousarray(lasts),
        runs.leaves[served],
        runs.tails[served],
        part.keys,
        links,
        table.columns,
    )
    entries = [table.by_id[identifier] for identifier in ids.tolist()]
    pieces = []
    end = 0
    for (first, last, _), count, before, class_ in zip(
        chosen, counts.tolist(), skips.tolist(), runs.classes[served].tolist(), strict=True
    ):
        begin, end = end, end + count
        pieces.append(Run(first, last, class_, entries[begin:end], lengths[begin:end], before))
    return pieces


def run_ranges(table: Table, text: Text, part: Occurrences, reader: Reader) -> list[Interval]:
    """Query ranges of the longest runs, uncut, perhaps overlapping."""
    _, runs = _raw_runs(table, text, part, reader)
    return list(zip(runs.starts.tolist(), runs.ends.tolist(), strict=True))


def _raw_runs(table: Table, text: Text, part: Occurrences, reader: Reader) -> tuple[Links, RawRuns]:
    columns = table.columns
    links = link_occurrences(text, part.low, part.keys, part.agreed, columns, reader)
    return links, longest_runs(text, part.high, part.keys, part.agreed, links, columns, reader)
