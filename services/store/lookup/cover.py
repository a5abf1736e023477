"""Which tokens of a prompt are served, and of each other one why not. The counts always add up."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from kvblend.v1 import common_pb2 as pb
from services.store.catalog import Chunk
from services.store.lookup.pieces import Pieces


class Cover:
    """Reasons token by token; the last word on a token counts, a served token has none."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._served: Pieces[Chunk] = Pieces.none()
        # (first, end, reason)
        self._reasons: list[tuple[int, int, pb.Reason]] = []

    def serve(self, pieces: Pieces[Chunk]) -> None:
        """These and no others."""
        self._served = pieces

    def explain(self, first: int, end: int, reason: pb.Reason) -> None:
        self._reasons.append((first, end, reason))

    def shortfalls(self, rest: Sequence[pb.Shortfall], default: pb.Reason, detail: str = "") -> list[pb.Shortfall]:
        """Of all tokens not served. Unexplained ones take the counts of `rest` in order, then the default."""
        explained = self._explained()
        counts = {(reason, ""): count for reason, count in explained.items()}
        unexplained = self._tokens - self._served.tokens - sum(explained.values())
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
        served = self._served
        return bool(((served.positions < end) & (served.ends > first)).any())
