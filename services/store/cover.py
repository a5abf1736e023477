"""Which tokens of a prompt are served, and of each other one why not. The counts always add up."""

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from kvblend.v1 import common_pb2 as pb
from services.common.tokens import encode_u32
from services.store.objects import ChunkKey
from services.store.query import Piece


class Cover:
    """Reasons token by token; the last word on a token counts, a served token has none."""

    def __init__(self, tokens: int) -> None:
        self._reasons = np.zeros(tokens, np.int32)
        self._served = np.zeros(tokens, np.bool_)
        self._details: dict[int, str] = {}

    def serve(self, piece: Piece) -> None:
        self._served[piece.position : piece.end] = True

    def explain(self, first: int, end: int, reason: pb.Reason, detail: str = "") -> None:
        self._reasons[first:end] = reason
        if detail:
            self._details[reason] = detail

    def shortfalls(self, rest: Sequence[pb.Shortfall], default: pb.Reason, detail: str = "") -> list[pb.Shortfall]:
        """Of all tokens not served. Unexplained ones take the counts of `rest` in order, then the default."""
        counts: dict[tuple[int, str], int] = {}
        open_reasons = self._reasons[~self._served]
        numbers, found = np.unique(open_reasons, return_counts=True)
        unexplained = 0
        for reason, count in zip(numbers.tolist(), found.tolist(), strict=True):
            if reason == pb.REASON_UNSPECIFIED:
                unexplained = count
            else:
                counts[reason, self._details.get(reason, "")] = count
        for shortfall in rest:
            share = min(shortfall.tokens, unexplained)
            if share:
                name = (int(shortfall.reason), shortfall.detail)
                counts[name] = counts.get(name, 0) + share
                unexplained -= share
        if unexplained:
            counts[int(default), detail] = counts.get((int(default), detail), 0) + unexplained
        return [
            pb.Shortfall(reason=cast(pb.Reason, reason), tokens=count, detail=text)
            for (reason, text), count in counts.items()
        ]


def trim(pieces: Iterable[Piece], first: int, end: int) -> list[Piece]:
    """The parts of the pieces that lie in [first, end) of the prompt."""
    kept = []
    for piece in pieces:
        start, stop = max(piece.position, first), min(piece.end, end)
        if stop - start == piece.length:
            kept.append(piece)
        elif start < stop:
            skip = start - piece.position
            kept.append(Piece(start, piece.key, piece.offset + skip, stop - start, piece.stored_position + skip))
    return kept


def join_runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Runs of pieces that follow each other in the prompt and where they were stored.

    Each piece but a run's first begins with its chunk's first token.
    """
    runs: list[list[Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last and last.end == piece.position and _follows(last, piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _follows(last: Piece, piece: Piece) -> bool:
    return (
        piece.offset == 0
        and piece.key.domain == last.key.domain
        and piece.stored_position == last.stored_position + last.length
    )


def hashes_of(pieces: Iterable[Piece]) -> bytes:
    """N x 32."""
    return b"".join(piece.key.chain_hash for piece in pieces)


def lengths_of(pieces: Iterable[Piece]) -> bytes:
    """N little-endian u32."""
    return encode_u32([piece.length for piece in pieces])


def keys_of(pieces: Iterable[Piece]) -> list[ChunkKey]:
    """Each key once, in order."""
    return list(dict.fromkeys(piece.key for piece in pieces))
