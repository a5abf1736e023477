"""What `kvblend explain` shows, whoever found it out."""

from collections.abc import Sequence
from dataclasses import dataclass

from cli.report.model import SegmentPlace, Shortfall


@dataclass(frozen=True)
class Explained:
    """The agent's answer to the lookup of one prompt.

    `recomputed`: query positions that the engine computed again; None where no model ran.
    """

    prefix_tokens: int
    segments: list[SegmentPlace]
    shortfalls: list[Shortfall]
    recomputed: Sequence[int] | None = None
