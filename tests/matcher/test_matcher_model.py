"""Any order of additions, removals, epochs and resets: answers equal those of a slow model, to the token."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from matcher_kit import L2_OWNER, STORE_OWNER, added, ask, check_answer, document_chunks, page, removed
from ownership_model import OwnershipModel, Stored, most_tokens

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.lifecycle import Boot
from services.common.metrics import Latencies
from services.matcher.cover import SHORTEST_SEGMENT, best_ranges
from services.matcher.service import MatcherService
from services.matcher.spaces import Spaces, random_hashing

CONTEXT: Any = SimpleNamespace(time_remaining=lambda: 60.0)
# Two window classes, so that last chunks of 16 to 31 tokens are found by themselves, shorter ones only behind another.
CHUNK = 32
ALL_BITS = (1 << 62) - 1
CLASSES = [pb.CONTEXT_CLASS_ALONE, pb.CONTEXT_CLASS_SHARED_PREFIX, pb.CONTEXT_CLASS_IN_PROMPT]
DOMAINS = [pb.DOMAIN_EXACT, pb.DOMAIN_SEGMENT]

stores = st.sampled_from(["a", "b"])
owners = st.sampled_from([STORE_OWNER, L2_OWNER])
# Long stretches of one of two tokens: chunks repeat, overlap, share beginnings and go on differently.
texts = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), min_size=2, max_size=5).map(
    lambda stretches: [token for token, count in stretches for _ in range(count)][:100]
)
class_sets = st.sampled_from([CLASSES, CLASSES, CLASSES[:2], CLASSES[:1], CLASSES[2:]])
# What empties the table is rarer than what fills it.
rarely = st.integers(0, 3).map(lambda number: number == 3)


def make_service(keep: int) -> MatcherService:
    return MatcherService(Spaces(random_hashing(keep)), Boot("matcher"), Latencies())


def owner_name(store: str, owner: matcher_pb2.Owner) -> str:
    return f"l2:{owner.l2_id}" if owner.l2_id else f"store:{store}"


class MatcherMachine(RuleBasedStateMachine):
    """One service and one model are told the same; `broken` may spoil the answers to see that this is noticed."""

    broken: Callable[[matcher_pb2.MatchResponse], None] | None = None

    @initialize(keep=st.sampled_from([ALL_BITS, 0b1]))
    def start(self, keep: int) -> None:
        self.service = make_service(keep)
        self.model = OwnershipModel()
        self.epochs = {"a": 1, "b": 1}
        self.sequences = {"a": 0, "b": 0}
        self.streams = {"a": 1, "b": 2}
        self.texts: list[list[int]] = []
        self.chunks: dict[tuple[int, bytes], matcher_pb2.ChunkAdded] = {}
        for store, first in (("a", 0), ("b", 1)):
            self.tell(
                store, STORE_OWNER, ([first] * 20 + [1 - first] * 30) * 2, CLASSES[0], pb.DOMAIN_SEGMENT, lambda: True
            )

    def publish(self, store: str, events: list[matcher_pb2.ChangeEvent], reset: bool = False) -> None:
        request = page(events, self.sequences[store] + 1, store, self.epochs[store], reset)
        answer = self.service.Publish(request, CONTEXT)
        self.sequences[store] += len(events)
        assert not answer.needs_reset
        assert answer.applied_sequence == self.sequences[store]

    def start_stream(self, store: str) -> None:
        self.streams[store] = max(self.streams.values()) + 1
        self.model.void(f"store:{store}")

    @rule(
        store=stores,
        owner=owners,
        tokens=texts,
        context_class=st.sampled_from(CLASSES),
        domain=st.sampled_from(DOMAINS),
        known=st.booleans(),
        data=st.data(),
    )
    def add(
        self,
        store: str,
        owner: matcher_pb2.Owner,
        tokens: list[int],
        context_class: pb.ContextClass,
        domain: pb.Domain,
        known: bool,
        data: st.DataObject,
    ) -> None:
        if known:
            tokens = data.draw(st.sampled_from(self.texts))[: data.draw(st.integers(16, 100))]
        self.tell(store, owner, tokens, context_class, domain, lambda: data.draw(st.integers(0, 9)) > 0)

    def tell(
        self,
        store: str,
        owner: matcher_pb2.Owner,
        tokens: list[int],
        context_class: pb.ContextClass,
        domain: pb.Domain,
        keep: Callable[[], bool],
    ) -> None:
        self.texts.append(tokens)
        chunks = document_chunks(tokens, domain=domain, context_class=context_class, owner=owner, chunk_tokens=CHUNK)
        chunks = [chunk for chunk in chunks if keep()]
        before = self.sequences[store]
        self.publish(store, added(*chunks))
        for number, chunk in enumerate(chunks, start=before + 1):
            self.chunks[chunk.domain, chunk.chain_hash] = chunk
            stored = Stored(
                chunk.domain,
                chunk.chain_hash,
                chunk.previous_hash,
                tuple(np.frombuffer(chunk.tokens, "<u4").tolist()),
                chunk.stored_position,
            )
            self.model.add(stored, context_class, owner_name(store, owner), (self.streams[store], number))

    @rule(store=stores, owner=owners, data=st.data(), seen=st.integers(0, 12))
    def remove(self, store: str, owner: matcher_pb2.Owner, data: st.DataObject, seen: int) -> None:
        if not self.chunks:
            return
        chunk = matcher_pb2.ChunkAdded()
        chunk.CopyFrom(data.draw(st.sampled_from(list(self.chunks.values()))))
        chunk.owner.CopyFrom(owner)
        self.publish(store, [removed(chunk, seen)])
        self.model.remove((chunk.domain, chunk.chain_hash), owner_name(store, owner), self.streams[store], seen)

    @rule(store=stores, really=rarely)
    def restart(self, store: str, really: bool) -> None:
        if not really:
            return
        self.epochs[store] += 1
        self.sequences[store] = 0
        self.start_stream(store)
        self.publish(store, [])

    @rule(store=stores, ahead=st.integers(0, 5), really=rarely)
    def reset(self, store: str, ahead: int, really: bool) -> None:
        if not really:
            return
        self.sequences[store] += ahead
        self.start_stream(store)
        self.publish(store, [], reset=True)

    @rule(store=stores, l2=st.booleans(), classes=class_sets, data=st.data())
    def query(self, store: str, l2: bool, classes: list[pb.ContextClass], data: st.DataObject) -> None:
        parts = data.draw(st.lists(st.sampled_from(self.texts) | texts, min_size=1, max_size=3))
        tokens = [token for part in parts for token in part][data.draw(st.integers(0, 20)) :] or [0]
        skip = data.draw(st.just(0) | st.integers(0, len(tokens)))
        spans = []
        if len(tokens) > 40 and data.draw(st.booleans()):
            spans = [pb.OpaqueSpan(offset=data.draw(st.integers(0, len(tokens) - 5)), length=3, digest=b"x" * 32)]
        request = ask(
            tokens,
            store,
            self.epochs[store],
            l2_id="redis" if l2 else "",
            context_classes=classes,
            skip_tokens=skip,
            opaque_spans=spans,
        )
        answer = self.service.Match(request, CONTEXT)
        if self.broken:
            self.broken(answer)
        names = [f"store:{store}", *(["l2:redis"] if l2 else [])]
        reachable = self.model.reachable(names, classes)
        covered = check_answer(request, answer, [self.chunks[chunk.key] for chunk in reachable])
        opaque = {at for span in spans for at in range(span.offset, span.offset + span.length)}
        assert not covered & opaque
        assert {segment.context_class for segment in answer.segments} <= set(classes)
        assert len(covered) == most_tokens(tokens, reachable, skip, spans, CHUNK)


LIMITS = settings(max_examples=60, stateful_step_count=12, deadline=None)
MatcherMachine.TestCase.settings = LIMITS
TestMatcherAgainstTheModel = MatcherMachine.TestCase


def forget_the_last(answer: matcher_pb2.MatchResponse) -> None:
    if answer.segments:
        gone = answer.segments.pop()
        answer.shortfalls.add(reason=pb.REASON_UNKNOWN_TEXT, tokens=gone.length)


def shorten_by_one(answer: matcher_pb2.MatchResponse) -> None:
    if answer.segments and answer.segments[0].length > SHORTEST_SEGMENT:
        segment = answer.segments[0]
        lengths = np.frombuffer(segment.chunk_lengths, "<u4").copy()
        lengths[-1] -= 1
        segment.chunk_lengths = lengths.tobytes()
        segment.length -= 1
        answer.shortfalls.add(reason=pb.REASON_UNKNOWN_TEXT, tokens=1)


def shift_by_one(answer: matcher_pb2.MatchResponse) -> None:
    for segment in answer.segments:
        segment.skip_tokens += 1


@pytest.mark.parametrize("fault", [forget_the_last, shorten_by_one, shift_by_one])
def test_the_model_notices_a_broken_matcher(fault: Callable[[matcher_pb2.MatchResponse], None]) -> None:
    class Broken(MatcherMachine):
        broken = staticmethod(fault)

    limits = settings(LIMITS, max_examples=300, derandomize=True, database=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=limits)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(16, 50), st.integers(1, 3)), max_size=8))
@settings(deadline=None)
def test_the_cover_has_most_tokens_then_fewest_pieces(runs: list[tuple[int, int, int]]) -> None:
    starts = np.array([start for start, _, _ in runs], dtype=np.int64)
    ends = np.array([start + length for start, length, _ in runs], dtype=np.int64)
    chosen = best_ranges(starts, ends, np.array([c for _, _, c in runs], dtype=np.uint8))
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, 111):
        options = [best[end - 1]]
        for first, length, _ in runs:
            if first + length >= end:
                options += [
                    (best[start][0] + end - start, best[start][1] - 1)
                    for start in range(first, end - SHORTEST_SEGMENT + 1)
                ]
        best.append(max(options))
    assert (sum(end - start for start, end, _ in chosen), -len(chosen)) == best[-1]
    for start, end, run in chosen:
        assert starts[run] <= start <= end - SHORTEST_SEGMENT < end <= ends[run]
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(chosen))
