"""Which tokens of a prompt are served, and of each other one why not. The counts always add up."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import cast

import numpy as np

from kvblend.v1 import common_pb2 as pb
from services.common.tokens import encode_u32
from services.store.objects import ChunkKey
from services.store.query import Piece


class Cover:
    """Reasons token by token; the last word on a token counts, a served token has none."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._served: Sequence[Piece] = ()
        # (first, end, reason)
        self._reasons: list[tuple[int, int, pb.Reason]] = []

    def serve(self, pieces: Sequence[Piece]) -> None:
        """These, which do not overlap, and no others."""
        self._served = pieces

    def explain(self, first: int, end: int, reason: pb.Reason) -> None:
        self._reasons.append((first, end, reason))

    def shortfalls(self, rest: Sequence[pb.Shortfall], default: pb.Reason, detail: str = "") -> list[pb.Shortfall]:
        """Of all tokens not served. Unexplained ones take the counts of `rest` in order, then the default."""
        explained = self._explained()
        counts = {(reason, ""): count for reason, count in explained.items()}
        unexplained = self._tokens - sum(piece.length for piece in self._served) - sum(explained.values())
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

    def _explained(self) -> dict[int, int]:
        """Tokens by reason."""
        if len(self._reasons) == 1 and not self._is_served(*self._reasons[0][:2]):
            # By far the commonest: the last token alone.
            first, end, reason = self._reasons[0]
            return {int(reason): end - first}
        reasons = np.zeros(self._tokens, np.uint8)
        for first, end, reason in self._reasons:
            reasons[first:end] = reason
        for piece in self._served:
            reasons[piece.position : piece.end] = pb.REASON_UNSPECIFIED
        counts = np.bincount(reasons)
        return {reason: int(counts[reason]) for reason in np.flatnonzero(counts).tolist() if reason}

    def _is_served(self, first: int, end: int) -> bool:
        return any(piece.position < end and piece.end > first for piece in self._served)


def trim(pieces: Sequence[Piece], first: int, end: int) -> Sequence[Piece]:
    """The parts of the pieces, which are ascending and do not overlap, that lie in [first, end) of the prompt."""
    low = bisect_right(pieces, first, key=attrgetter("end"))
    high = bisect_left(pieces, end, low, key=attrgetter("position"))
    kept = list(pieces[low:high])
    if kept:
        kept[0] = _inside(kept[0], first, end)
        kept[-1] = _inside(kept[-1], first, end)
    return kept


def _inside(piece: Piece, first: int, end: int) -> Piece:
    start, stop = max(piece.position, first), min(piece.end, end)
    skip = start - piece.position
    return Piece(start, piece.key, piece.offset + skip, stop - start, piece.stored_position + skip)


def hashes_of(pieces: Iterable[Piece]) -> bytes:
    """N x 32."""
    return b"".join([piece.key.chain_hash for piece in pieces])


def lengths_of(pieces: Iterable[Piece]) -> bytes:
    """N little-endian u32."""
    return encode_u32([piece.length for piece in pieces])


def keys_of(pieces: Iterable[Piece]) -> list[ChunkKey]:
    """Each key once, in order."""
    return list(dict.fromkeys([piece.key for piece in pieces]))
