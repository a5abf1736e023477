"""Any order of what stores can publish: answers equal those of the slow model, to the token. And a snapshot of it,
written while things go on, leads another fold to the same."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import pytest
from history import History, space_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from matcher_kit import ALL_BITS, EVERY_CLASS, TIER, Chunk, Cleared, Removed, document_chunks
from ownership_model import Held

from kvblend.v1 import common_pb2 as pb
from services.matcher import capture, occurrences, table
from services.matcher.fold import Fold
from services.matcher.kernels.hashing import random_hashing
from services.matcher.log.base import Position
from services.matcher.snapshot import parts_of, restore

# Two window classes, so that last chunks of 16 to 31 tokens are found by themselves, shorter ones only behind another.
CHUNK = 32
DOMAINS = [pb.DOMAIN_SEGMENT, pb.DOMAIN_SEGMENT, pb.DOMAIN_SEGMENT, pb.DOMAIN_EXACT]
DOCUMENTS = ["", "one", "two"]
# Each space has one tenant; a tenant may have several spaces.
SPACES = {space_of("s"): "left", space_of("t"): "right", space_of("u"): "right"}
# One base for each: examples must behave the same when they run again.
HASHINGS = {keep: random_hashing(keep) for keep in (ALL_BITS, 0b1, 0b0)}
# (positions between two looks at the clock, positions hashed at a time): borders where short queries meet them.
STEPS = [(1 << 16, 4096), (24, 8), (16, 16), (7, 3)]

stores = st.sampled_from(["a", "b", "c"])
tiers = st.sampled_from(["", "", TIER, "disk"])
spaces = st.sampled_from([*[space_of("s")] * 5, *SPACES])
# Long stretches of one of two tokens: chunks repeat, overlap, share beginnings and go on differently.
texts = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), min_size=2, max_size=5).map(
    lambda stretches: [token for token, count in stretches for _ in range(count)][:100]
)
class_sets = st.sampled_from([*[EVERY_CLASS] * 4, EVERY_CLASS[:2], EVERY_CLASS[:1], EVERY_CLASS[2:]])
# Nobody ever has this chunk.
NOTHING = Chunk(b"\xff" * 32, b"\xff" * 32, (1,), 0)
# What empties the table is rarer than what fills it.
rarely = st.integers(0, 3).map(lambda number: number == 3)


class FoldMachine(RuleBasedStateMachine):
    """`fault` may spoil the matcher, to see that this is noticed."""

    fault: Callable[[], AbstractContextManager[Any]] | None = None

    @initialize(keep=st.sampled_from([ALL_BITS, ALL_BITS, *HASHINGS]), steps=st.sampled_from(STEPS))
    def start(self, keep: int, steps: tuple[int, int]) -> None:
        self.stack = ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(occurrences, "_STRETCH", steps[0])
        patch.setattr(occurrences, "BLOCK", steps[1])
        patch.setattr(table, "_AT_ONCE", 3)
        patch.setattr(capture, "_ENTRIES", 2)
        patch.setattr(capture, "_LOOK_AT", 8)
        if self.fault is not None:
            self.stack.enter_context(self.fault())
        self.history = History(hashing=HASHINGS[keep])
        self.texts: list[list[int]] = []
        # Of a chunk, the text that it came with.
        self.origins: dict[tuple[Any, ...], list[int]] = {}
        self.chunks: list[Chunk] = []
        self.readers: list[ExitStack] = []
        one, other = ([0] * 20 + [1] * 30) * 2, ([1] * 20 + [0] * 30) * 2
        self.tell("a", one)
        self.tell("b", other, context_class=pb.CONTEXT_CLASS_IN_PROMPT)
        self.tell("b", other, l2=TIER, document="one")
        self.tell("a", one, name="copy", document="two")
        self.tell("a", one, space=space_of("t"), tenant="right", document="one")

    def tell(self, store: str, tokens: list[int], name: str = "text", left_out: int = -1, **facts: Any) -> None:
        """The same text has the same names in a space, whatever else is said of it; and maybe a copy has others."""
        self.texts.append(tokens)
        facts = {"space": space_of("s"), "tenant": "left", "chunk_tokens": CHUNK, "document": ""} | facts
        chunks = document_chunks(tokens, name, **facts)
        chunks = [chunk for number, chunk in enumerate(chunks) if number != left_out]
        self.chunks += chunks
        self.origins |= {chunk.key: tokens for chunk in chunks}
        if chunks:
            self.history.add(*chunks, store=store)

    @rule(
        store=stores,
        tokens=texts,
        known=st.integers(0, 3).map(bool),
        data=st.data(),
        facts=st.fixed_dictionaries(
            {
                "l2": tiers,
                "name": st.sampled_from(["text", "text", "copy"]),
                "left_out": st.integers(0, 9),
                "space": spaces,
                "context_class": st.sampled_from(EVERY_CLASS),
                "domain": st.sampled_from(DOMAINS),
                "document": st.sampled_from(DOCUMENTS),
                "matchable": st.integers(0, 9).map(bool),
            }
        ),
    )
    def add(self, store: str, tokens: list[int], known: bool, data: st.DataObject, facts: dict[str, Any]) -> None:
        if known:
            tokens = data.draw(st.sampled_from(self.texts))[: data.draw(st.integers(16, 100))]
        self.tell(store, tokens, tenant=SPACES[facts["space"]], **facts)
        self.ask(data, tokens, [store], facts["l2"], facts["space"])

    @precondition(lambda self: self.can_remove())
    @rule(store=stores, data=st.data(), count=st.integers(1, 3), later=st.sampled_from([-1, 0, 1, None]))
    def remove(self, store: str, data: st.DataObject, count: int, later: int | None) -> None:
        """By an owner that has it, or by another one; or reported by somebody who looked before or behind its claim."""
        held = list(self.history.model.held.values())
        for _ in range(count):
            one = data.draw(st.sampled_from(held))
            by, l2 = self.owner_of(data, one, store)
            seen = max(0, one.claimed + later) if l2 and later is not None else 0
            self.history.publish(by, Removed([replace(one.chunk, l2=l2)], seen))
        self.ask(data, self.origins[one.chunk.key], [by], l2, one.chunk.space)

    @precondition(lambda self: self.can_remove())
    @rule(store=stores, data=st.data(), tokens=texts)
    def swap(self, store: str, data: st.DataObject, tokens: list[int]) -> None:
        """A chunk loses all its owners, and something else takes its place."""
        one = data.draw(st.sampled_from(list(self.history.model.held.values())))
        for owner in sorted(one.owners):
            kind, _, name = owner.partition(":")
            by, l2 = (store, name) if kind == "l2" else (name, "")
            self.history.publish(by, Removed([replace(one.chunk, l2=l2)]))
        self.tell(by, tokens, space=one.chunk.space, tenant=one.chunk.tenant, domain=one.chunk.domain, l2=l2)
        self.ask(data, self.origins[one.chunk.key], [by], l2, one.chunk.space)

    @precondition(lambda self: self.can_remove())
    @rule(store=stores, data=st.data(), parts=st.lists(st.booleans(), min_size=3, max_size=3), other=st.booleans())
    def clear(self, store: str, data: st.DataObject, parts: list[bool], other: bool) -> None:
        """A scope that something is in, or nothing."""
        one = data.draw(st.sampled_from(list(self.history.model.held.values())))
        by, l2 = self.owner_of(data, one, store)
        facts = [one.chunk.space, one.chunk.tenant, "two" if other else one.chunk.document]
        scope = [fact if part else type(fact)() for fact, part in zip(facts, parts, strict=True)]
        self.history.publish(by, Cleared(l2, *scope))
        self.ask(data, self.origins[one.chunk.key], [by], l2, one.chunk.space)
        self.look(data)

    def can_remove(self) -> bool:
        return hasattr(self, "history") and bool(self.history.model.held)

    def owner_of(self, data: st.DataObject, held: Held, store: str) -> tuple[str, str]:
        """(store that speaks, tier that it speaks of) of one of those who have the chunk, or of somebody else."""
        kind, _, owner = data.draw(st.sampled_from([*sorted(held.owners), f"store:{store}"])).partition(":")
        return (store, owner) if kind == "l2" else (owner, "")

    @rule(store=stores, data=st.data(), context_class=st.sampled_from(EVERY_CLASS))
    def come_back(self, store: str, data: st.DataObject, context_class: pb.ContextClass) -> None:
        """One chunk of a text, whose neighbours may be there, as may be the chunk itself."""
        chunk = replace(data.draw(st.sampled_from(self.chunks)), context_class=context_class)
        self.history.add(chunk, store=store)
        self.ask(data, self.origins[chunk.key], [store], chunk.l2, chunk.space)

    @rule(store=stores, ahead=st.none() | st.integers(0, 5), really=rarely, data=st.data())
    def begin_again(self, store: str, ahead: int | None, really: bool, data: st.DataObject) -> None:
        """A new epoch, or a reset."""
        if not really or not self.can_remove():
            return
        if ahead is None:
            self.history.restart(store, Removed([NOTHING]))
        else:
            self.history.publish(store, Removed([NOTHING]), reset=True, ahead=ahead)
        self.ask(data, data.draw(st.sampled_from(self.texts)), [store], "", space_of("s"))

    @rule(store=stores, other=stores, l2=tiers, data=st.data(), context_class=st.sampled_from(EVERY_CLASS),
          document=st.sampled_from(DOCUMENTS))  # fmt: skip
    def replace(
        self, store: str, other: str, l2: str, data: st.DataObject, context_class: pb.ContextClass, document: str
    ) -> None:
        """Goes, and comes back from elsewhere."""
        if self.can_remove():
            self.history.publish(store, Cleared(document=data.draw(st.sampled_from(DOCUMENTS))))
            tokens = data.draw(st.sampled_from(self.texts))
            self.tell(other, tokens, l2=l2, context_class=context_class, document=document)

    @rule(most=st.integers(1, 5))
    def sweep(self, most: int) -> None:
        for _ in range(most):
            self.history.table.sweep()

    @rule(really=rarely)
    def enter(self, really: bool) -> None:
        """A reader that stays: what it might see is not used again."""
        if really:
            reader = ExitStack()
            reader.enter_context(self.history.table.grace.reading())
            self.readers.append(reader)

    @precondition(lambda self: getattr(self, "readers", None))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1))).close()

    @precondition(lambda self: hasattr(self, "history") and bool(self.history.model.held))
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """For what somebody should have."""
        held = list(self.history.model.held.values())
        if held:
            one = data.draw(st.sampled_from(held))
            by, l2 = self.owner_of(data, one, "c")
            self.ask(data, self.origins[one.chunk.key], [by], l2, one.chunk.space)

    @rule(data=st.data(), space=spaces, classes=class_sets)
    def score(self, data: st.DataObject, space: bytes, classes: list[pb.ContextClass]) -> None:
        tokens = data.draw(st.sampled_from(self.texts))
        full = document_chunks(tokens, "text", chunk_tokens=CHUNK)[: len(tokens) // CHUNK]
        assert self.history.scores(tokens, space, full, classes) == self.history.expected_scores(
            tokens, space, full, classes
        )

    def ask(self, data: st.DataObject, known: list[int], askers: list[str], l2: str, space: bytes) -> None:
        """With a prompt of known and perhaps of new text."""
        tokens = [*data.draw(st.just([]) | texts), *known, *data.draw(st.just([]) | st.sampled_from(self.texts))]
        tokens = tokens[data.draw(st.just(0) | st.integers(0, 15)) :] or [0]
        spans = []
        if len(tokens) > 40 and data.draw(st.integers(0, 3)) == 3:
            spans = [pb.OpaqueSpan(offset=data.draw(st.integers(0, len(tokens) - 5)), length=3, digest=b"x" * 32)]
        request = self.history.ask(
            tokens,
            data.draw(st.sampled_from(askers)),
            space_id=space,
            l2_id=l2,
            context_classes=data.draw(class_sets),
            skip_tokens=data.draw(st.just(0) | st.integers(0, len(tokens))),
            opaque_spans=spans,
        )
        self.history.check(request, self.history.match(request), CHUNK)

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "history"):
            return
        held, found = self.history.model.held, self.history.table
        # What voided owners had may not be swept yet.
        assert found.chunks == len(held) or (found.chunks > len(held) and found.owners.next_void())
        assert found.chunks == sum(space.chunks for space in found.spaces.values())
        assert not found.evicted

    def teardown(self) -> None:
        for reader in getattr(self, "readers", []):
            reader.close()
        if hasattr(self, "stack"):
            self.stack.close()


class SnapshotMachine(FoldMachine):
    """And a second fold, from a snapshot whose parts are taken one by one between other changes."""

    @initialize()
    def no_snapshot(self) -> None:
        self.parts: Iterator[bytes] | None = None
        self.taken: list[bytes] = []
        self.at: Position | None = None
        self.digest = b""

    @precondition(lambda self: getattr(self, "parts", None) is None)
    @rule()
    def begin(self) -> None:
        fold = self.history.fold
        self.at, self.taken, self.digest = self.history.position, [], fold.digest()
        self.parts = parts_of(fold, fold.applied())
        self.taken.append(next(self.parts))

    @precondition(lambda self: getattr(self, "parts", None) is not None)
    @rule(all_of_it=rarely)
    def take_part(self, all_of_it: bool) -> None:
        assert self.parts is not None
        part = next(self.parts, None)
        while part is not None:
            self.taken.append(part)
            part = next(self.parts, None) if all_of_it else None
        if all_of_it:
            self.compare()
            self.parts = None

    def compare(self) -> None:
        assert self.at is not None
        history = self.history
        other = restore(self.taken, self.at, table.Table(history.table.memory_limit_bytes, HASHINGS[ALL_BITS]))
        assert other.digest() == self.digest
        history.replay(other, behind=self.at.number)
        assert other.applied() == history.fold.applied()
        assert other.digest() == history.fold.digest()
        self.same_matches(other)

    def same_matches(self, other: Fold) -> None:
        tokens = [token for part in self.texts[-4:] for token in part]
        for store in ("a", "b"):
            request = self.history.ask(tokens, store, space_id=space_of("s"), l2_id=TIER, context_classes=EVERY_CLASS)
            answers = [self.history.match(request, fold) for fold in (self.history.fold, other)]
            assert len({sum(memoryview(answer.segments.lengths).cast("I")) for answer in answers}) == 1
            self.history.check(request, answers[1], CHUNK)
