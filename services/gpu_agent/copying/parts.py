"""The wanted tokens of a prompt, cut where a chunk ends, and what became of each part."""

import numpy as np

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.columns import Numbers
from services.gpu_agent.copying.ranges import NO_RANGES, Range, Ranges, parse_ranges
from services.gpu_agent.engines.layouts import Layout
from services.gpu_agent.engines.slots import Slots, SlotTable
from services.gpu_agent.lookup.plan import Chunks

_GOOD = common.REASON_UNSPECIFIED


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
        wanted = _wanted(request, tokens)
        begins, stops = chunks.query_positions, chunks.query_positions + chunks.lengths
        # The wanted ranges low to high - 1 have tokens of a chunk.
        low = np.searchsorted(wanted.ends, begins, "right")
        counts = np.maximum(np.searchsorted(wanted.firsts, stops, "left") - low, 0)
        of = np.repeat(np.arange(len(chunks)), counts)
        ranges = low[of] + np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        firsts, ends = np.maximum(begins[of], wanted.firsts[ranges]), np.minimum(stops[of], wanted.ends[ranges])
        some = firsts < ends
        self.chunks, self.firsts, self.ends = of[some], firsts[some], ends[some]
        self.reasons = np.full(len(self.chunks), _GOOD, np.int64)
        # All that was found was wanted, or what was not found has to be told.
        self._uncovered = wanted.without(self.firsts, self.ends) if request.ranges else NO_RANGES
        positions = _each(self.firsts, self.ends)
        self.slots: Slots = np.full(tokens, -1, np.int64)
        self.slots[positions] = SlotTable(request.slots, layout).of(positions)

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
        firsts = np.append(self.firsts, self._uncovered.firsts)
        ends = np.append(self.ends, self._uncovered.ends)
        missing = np.full(len(self._uncovered.firsts), common.REASON_NOT_IN_ANSWER)
        reasons = np.append(self.reasons, missing)
        response, counts = pb.RetrieveResponse(), [0, 0]
        for reason in np.unique(reasons).tolist():
            told = Ranges.joined(firsts[reasons == reason], ends[reasons == reason])
            messages = told.messages()
            if reason == _GOOD:
                response.written.extend(messages)
            else:
                response.failed.extend(pb.FailedRange(range=message, reason=reason) for message in messages)
            counts[reason != _GOOD] += told.tokens
        response.bytes = counts[0] * token_bytes
        return response, counts[0], counts[1]


def _wanted(request: pb.RetrieveRequest, tokens: int) -> Ranges:
    """The tokens to write, if they are found: the ranges named, or else all."""
    named = parse_ranges(request.ranges, tokens) or [Range(0, tokens)]
    firsts, ends = (
        np.array(column, np.int64) for column in zip(*((item.first, item.end) for item in named), strict=True)
    )
    return Ranges.joined(np.maximum(firsts, request.skip_first_tokens), ends)


def _each(firsts: Numbers, ends: Numbers) -> Numbers:
    """The numbers of all ranges [first, end), one after the other."""
    lengths = ends - firsts
    before = np.cumsum(lengths) - lengths
    return np.repeat(firsts - before, lengths) + np.arange(lengths.sum())
