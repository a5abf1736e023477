"""The wanted tokens of a prompt, cut where a chunk ends, and what became of each part."""

import numpy as np

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.columns import Numbers
from services.gpu_agent.copying.ranges import Mask, mask_of, parse_ranges, ranges_of
from services.gpu_agent.engines.layouts import Layout
from services.gpu_agent.engines.slots import Slots, SlotTable
from services.gpu_agent.lookup.plan import Chunks

_GOOD = common.REASON_UNSPECIFIED
_UNWANTED = -1


def first_bad(reasons: Numbers) -> Numbers:
    """[n, m] -> [n]: the first of each row that is not REASON_UNSPECIFIED."""
    return np.take_along_axis(reasons, (reasons != _GOOD).argmax(axis=1)[:, None], axis=1)[:, 0]


class Parts:
    """Part p is tokens [firsts[p], ends[p]) of the prompt, all of chunk chunks[p]; the parts ascend.

    `reasons` has why a part is not written; REASON_UNSPECIFIED: nothing stands in the way. `slots` has one entry for
    each token of the prompt, -1 where nothing is written.
    """

    def __init__(self, chunks: Chunks, tokens: int, request: pb.RetrieveRequest, layout: Layout) -> None:
        """`tokens` of the prompt.

        Raises:
            KvblendError: for a request that cannot be meant.
        """
        owner = np.full(tokens, -1, np.int64)
        positions, of = chunks.tokens()
        owner[positions] = of
        wanted = _wanted(request, owner >= 0)
        self._uncovered = wanted & (owner < 0)
        self._written = np.flatnonzero(wanted & (owner >= 0))
        self.slots: Slots = np.full(tokens, -1, np.int64)
        self.slots[self._written] = SlotTable(request.slots, layout).of(self._written)
        owner = owner[self._written]
        begins = np.flatnonzero((np.diff(owner, prepend=-1) != 0) | (np.diff(self._written, prepend=-2) != 1))
        self.chunks = owner[begins]
        self.firsts = self._written[begins]
        self._lengths = np.diff(begins, append=len(owner))
        self.ends = self.firsts + self._lengths
        self.reasons = np.full(len(begins), _GOOD, np.int64)

    def good(self) -> Numbers:
        """Which parts nothing stands in the way of."""
        return np.flatnonzero(self.reasons == _GOOD)

    def fail(self, reason: common.Reason) -> None:
        """Whatever was good so far is not."""
        self.reasons[self.good()] = reason

    def judge(self, by_chunk: Numbers) -> None:
        """`by_chunk`, [chunks], has a reason for what was good so far."""
        good = self.good()
        self.reasons[good] = by_chunk[self.chunks[good]]

    def judge_objects(self, chunks: Chunks, rows: Numbers, reasons: Numbers) -> None:
        """`reasons` has one for each of these objects; all other objects are good."""
        if (reasons != _GOOD).any() and len(rows):
            good = self.good()
            by_row = np.zeros(rows.max() + 1, np.int64)
            by_row[rows] = reasons
            self.reasons[good] = first_bad(by_row[chunks.objects[self.chunks[good]]])

    def answer(self, token_bytes: int) -> tuple[pb.RetrieveResponse, int, int]:
        """The answer, and how many tokens were written and how many not; `token_bytes` of one token's KV."""
        reasons = np.full(len(self.slots), _UNWANTED, np.int64)
        reasons[self._uncovered] = common.REASON_NOT_IN_ANSWER
        reasons[self._written] = np.repeat(self.reasons, self._lengths)
        good, bad = reasons == _GOOD, reasons > _GOOD
        response = pb.RetrieveResponse(written=[item.message() for item in ranges_of(good)])
        for reason in np.unique(reasons[bad]).tolist():
            response.failed.extend(
                pb.FailedRange(range=item.message(), reason=reason) for item in ranges_of(reasons == reason)
            )
        written = int(good.sum())
        response.bytes = written * token_bytes
        return response, written, int(bad.sum())


def _wanted(request: pb.RetrieveRequest, covered: Mask) -> Mask:
    """Flags of the tokens to write: the ranges named, or else all that was found."""
    tokens = len(covered)
    ranges = parse_ranges(request.ranges, tokens)
    wanted = mask_of(ranges, tokens) if ranges else covered.copy()
    wanted[: request.skip_first_tokens] = False
    return wanted
