"""Which tokens of a prompt a retrieve writes, where, and what it says of them: beside a token by token definition."""

from itertools import accumulate, groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.errors import KvblendError
from services.gpu_agent.copying.parts import Parts
from services.gpu_agent.engines.layouts import Layout
from services.gpu_agent.lookup.plan import Chunks

TOKENS = 40
REASONS = (common.REASON_UNSPECIFIED, common.REASON_EVICTED, common.REASON_CHECKSUM_MISMATCH)

# (tokens before it that nobody has, its own tokens)
chunk_lists = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=6)
range_lists = st.lists(st.tuples(st.integers(0, TOKENS), st.integers(0, TOKENS)).map(sorted), max_size=4)


def chunks_of(spans: list[tuple[int, int]]) -> Chunks:
    firsts, lengths = (np.array(column, np.int64) for column in (zip(*spans, strict=True) if spans else ((), ())))
    return Chunks(firsts, firsts, np.zeros_like(firsts), lengths, np.arange(len(spans))[:, None])


def layout(block_tokens: int) -> Layout:
    return Layout(common.DTYPE_FLOAT32, 100, block_tokens, [], [])


def runs(said: list[int | None], reason: int) -> list[tuple[int, int]]:
    """The stretches of tokens of which this is said, as (first, length)."""
    stretches = [(value, len(list(same))) for value, same in groupby(said)]
    firsts = accumulate((length for _, length in stretches), initial=0)
    return [(first, length) for first, (value, length) in zip(firsts, stretches, strict=False) if value == reason]


@given(chunk_lists, range_lists, st.integers(0, TOKENS), st.sampled_from((1, 4, 64)), st.integers(0, 3), st.randoms())
@settings(max_examples=300, deadline=None)
def test_every_token_is_treated_as_it_was_asked_for(
    gaps: list[tuple[int, int]], ranges: list[list[int]], skip: int, block_tokens: int, first_slot: int, random: object
) -> None:
    begins = list(accumulate(gap + length for gap, length in gaps))
    spans = [(end - length, length) for end, (_, length) in zip(begins, gaps, strict=True) if end <= TOKENS]
    owner = {token: number for number, (first, length) in enumerate(spans) for token in range(first, first + length)}
    asked = {token for first, end in ranges for token in range(first, end)} if ranges else set(owner)
    asked = {token for token in asked if token >= skip}
    blocks = list(range(100))
    random.shuffle(blocks)
    request = pb.RetrieveRequest(skip_first_tokens=skip)
    request.slots.block_ids, request.slots.first_slot = np.array(blocks, "<u4").tobytes(), first_slot
    request.ranges.extend(pb.TokenRange(first=first, length=end - first) for first, end in ranges)
    parts = Parts(chunks_of(spans), TOKENS, request, layout(block_tokens))

    covered = [
        (token, chunk)
        for chunk, first, end in zip(parts.chunks, parts.firsts, parts.ends, strict=True)
        for token in range(first, end)
    ]
    assert covered == sorted((token, owner[token]) for token in asked if token in owner)
    for token in range(TOKENS):
        block, place = divmod(token + first_slot, block_tokens)
        assert parts.slots[token] == (
            blocks[block] * block_tokens + place if (token, owner.get(token)) in covered else -1
        )

    by_chunk = [random.choice(REASONS) for _ in spans]
    parts.judge(np.array(by_chunk, np.int64))
    said: list[int | None] = [None] * TOKENS
    for token in asked:
        said[token] = by_chunk[owner[token]] if token in owner else common.REASON_NOT_IN_ANSWER
    response, written, failed = parts.answer(7)
    assert [(item.first, item.length) for item in response.written] == runs(said, common.REASON_UNSPECIFIED)
    for reason in {*REASONS[1:], common.REASON_NOT_IN_ANSWER}:
        found = [(item.range.first, item.range.length) for item in response.failed if item.reason == reason]
        assert found == runs(said, reason)
    assert len(response.failed) == sum(len(runs(said, reason)) for reason in {*said} - {None, 0})
    assert (written, written + failed, response.bytes) == (said.count(0), len(asked), 7 * said.count(0))


def test_one_block_for_two_places_is_refused_only_where_both_are_written() -> None:
    request = pb.RetrieveRequest(slots=pb.SlotMap(block_ids=np.array([3, 5, 3], "<u4").tobytes()))
    Parts(chunks_of([(0, 8)]), 12, request, layout(4))
    with pytest.raises(KvblendError, match="twice"):
        Parts(chunks_of([(0, 3), (8, 4)]), 12, request, layout(4))
    # The same block, but not the same slots.
    Parts(chunks_of([(0, 2), (10, 2)]), 12, request, layout(4))
