"""Compiled loops over the columns of a lookup's answers, which have a few hundred rows: in numpy each would be a dozen
operations, whose overhead is far more than the work. Nothing here looks whether columns fit each other."""

import numpy as np
import numpy.typing as npt
from numba import njit, types

from kvblend.v1 import common_pb2 as pb
from services.common.columns import Numbers

Bytes = npt.NDArray[np.uint8]

_READ = types.Array(types.int64, 1, "C", readonly=True)
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_EXACT, _SEGMENT = int(pb.DOMAIN_EXACT), int(pb.DOMAIN_SEGMENT)


@njit([types.int64[:, ::1](*[_READ] * 6, _BYTES, types.int64)], cache=True)
def chunks_of_segments(
    starts: Numbers,
    stored: Numbers,
    lengths: Numbers,
    skips: Numbers,
    counts: Numbers,
    chunk_lengths: Numbers,
    domains: Bytes,
    tokens: int,
) -> Numbers:
    """[6, n]: of each chunk of sound segments that has tokens its position in the prompt, offset in the chunk, length,
    stored position, number among all chunks, and domain.

    Sound is a segment whose chunks add up to it, that lies in the prompt of `tokens` and behind all before it, and that
    may serve. The columns of segments have one length; `counts` add up to the number of chunks.
    """
    found = np.empty((6, chunk_lengths.size), np.int64)
    kept = first = covered = 0
    for segment in range(counts.size):
        chunks = range(first, first + counts[segment])
        first += counts[segment]
        total = 0
        for chunk in chunks:
            total += chunk_lengths[chunk]
        position, end, domain = starts[segment], starts[segment] + lengths[segment], domains[segment]
        if total != lengths[segment] or end > tokens or domain not in (_EXACT, _SEGMENT):
            continue
        is_behind = position >= covered
        covered = max(covered, end)
        if not is_behind:
            continue
        offset, place = skips[segment], stored[segment]
        for chunk in chunks:
            length = chunk_lengths[chunk]
            if length:
                found[0, kept], found[1, kept], found[2, kept] = position, offset, length
                found[3, kept], found[4, kept], found[5, kept] = place, chunk, domain
                kept += 1
            position, place, offset = position + length, place + length, 0
    return found[:, :kept].copy()


@njit([types.int64[:, ::1](*[_READ] * 4, _BYTES)], cache=True)
def runs_of_pieces(positions: Numbers, offsets: Numbers, lengths: Numbers, stored: Numbers, domains: Bytes) -> Numbers:
    """[3, n]: of each run of pieces that follow each other, in the prompt and where they were stored, the number of its
    first piece, its tokens, and its pieces."""
    runs = np.zeros((3, positions.size), np.int64)
    run = -1
    for piece in range(positions.size):
        before = piece - 1
        if (
            run < 0
            or offsets[piece]
            or domains[piece] != domains[before]
            or positions[piece] != positions[before] + lengths[before]
            or stored[piece] != stored[before] + lengths[before]
        ):
            run += 1
            runs[0, run] = piece
        runs[1, run] += lengths[piece]
        runs[2, run] += 1
    return runs[:, : run + 1].copy()
