"""Engine-side blending, for any decoder-only model: which reused tokens to recompute, and the prefill that does it.

Needs torch; the rest of the client does not.
"""

from kvblend.blend.decoder import Decoder
from kvblend.blend.prefill import Prefill, Source, Sources, blended_prefill
from kvblend.blend.rows import Rows
from kvblend.blend.select import ByAttention, ByDeviation, ByInfluence, Candidates, SegmentStarts, Selector

__all__ = [
    "ByAttention",
    "ByDeviation",
    "ByInfluence",
    "Candidates",
    "Decoder",
    "Prefill",
    "Rows",
    "SegmentStarts",
    "Selector",
    "Source",
    "Sources",
    "blended_prefill",
]
