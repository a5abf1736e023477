"""Bits for owners, numbers for documents, indexes of windows: given again only when nothing is left of them."""

from typing import Any

import numpy as np
import pytest
from history import History, history_of
from hypothesis import given, settings
from hypothesis import strategies as st
from matcher_kit import Removed, document_chunks, segments_of, text

from services.common.errors import KvblendError
from services.matcher.documents import Documents
from services.matcher.grace import Grace
from services.matcher.owners import PLANES, OwnerName, Owners
from services.matcher.window_index import WindowIndex

MOST = 32 * PLANES


def store(number: int) -> OwnerName:
    return OwnerName(1, f"s{number}")


@given(st.lists(st.tuples(st.sampled_from(["take", "take", "void", "clear", "free"]), st.integers(0, 40)), max_size=80))
def test_an_owners_bit_is_its_own_until_nothing_is_set_under_it(plan: list[tuple[str, int]]) -> None:
    owners = Owners()
    bits: dict[OwnerName, Any] = {}
    void: list[Any] = []
    waiting: list[tuple[Any, Any]] = []
    for step, number in plan:
        if step == "take":
            bit = owners.take(store(number))
            assert bits.setdefault(store(number), bit) == bit
        elif step == "void":
            owners.void(store(number))
            if store(number) in bits:
                void.append(bits.pop(store(number)))
        elif step == "clear" and void:
            assert owners.next_void() == void[0]
            waiting.append((void.pop(0), owners.cleared()))
        elif step == "free" and waiting:
            waiting.pop(0)[1]()
        assert owners.next_void() == (void[0] if void else None)
        assert dict(owners.items()) == bits
        assert owners.find(store(number)) == bits.get(store(number))
        taken = [*bits.values(), *void, *(bit for bit, _ in waiting)]
        assert len(set(taken)) == len(taken)
        live = owners.live()
        assert len(live) == owners.planes
        assert [(n, b) for n in range(len(live)) for b in range(32) if int(live[n]) >> b & 1] == sorted(
            (bit.plane, int(bit.mask).bit_length() - 1) for bit in bits.values()
        )


def test_there_are_bits_for_4096_owners_and_no_more() -> None:
    owners = Owners()
    bits = [owners.take(store(number)) for number in range(MOST)]
    assert len(set(bits)) == MOST
    with pytest.raises(KvblendError, match="OVERLOADED"):
        owners.take(store(MOST))
    owners.void(store(7))
    with pytest.raises(KvblendError, match="OVERLOADED"):
        owners.take(store(MOST))
    owners.cleared()()
    assert owners.take(store(MOST)) == bits[7]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-3, 3)), max_size=60))
def test_a_documents_number_is_its_own_as_long_as_entries_have_it(plan: list[tuple[int, int]]) -> None:
    documents = Documents()
    counts: dict[str, int] = {}
    for which, more in plan:
        name = "" if which == 0 else f"document {which}"
        held = counts.get(name, 0)
        if more > 0:
            number = documents.take(name, more)
            assert documents.names[number] == name
            counts[name] = held + more
        elif held and name:
            gone = min(held, 1 - more)
            found = documents.find(name)
            documents.drop(np.full(gone, found, dtype=np.int32))
            counts[name] = held - gone
        for other, count in counts.items():
            assert (documents.find(other) is not None) == (count > 0 or not other)
        named = [other for other, count in counts.items() if count and other]
        assert len({documents.find(other) for other in named}) == len(named)
        assert documents.bytes == sum(2 * len(other) for other in named)
        assert len(documents.names) <= 7


class IndexModel:
    """A window index beside the list of the nodes that are taken."""

    def __init__(self) -> None:
        self.grace = Grace()
        self.index = WindowIndex(self.grace)
        self.columns: Any = history_of(*document_chunks(text(1, 16))).table.columns
        self.taken: list[int] = []


@given(st.lists(st.integers(-30, 30), max_size=30))
@settings(deadline=None, max_examples=50)
def test_nodes_that_are_reserved_and_not_used_are_free_again(plan: list[int]) -> None:
    """What is linked, grows and shrinks through the table itself is told by the tests of the table."""
    model = IndexModel()
    for count in plan:
        nodes = model.index.reserve(abs(count), model.columns)
        assert len(set(nodes.tolist())) == abs(count)
        assert nodes.max(initial=-1) < len(model.index.buckets.nodes)
        model.index.unused(nodes)
        assert model.index.count == 0


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60))
@settings(deadline=None, max_examples=50)
def test_an_index_counts_distinct_texts_whatever_comes_and_goes(plan: list[tuple[int, bool]]) -> None:
    """Two documents have the same text: one node."""
    texts = {number: text(number // 2, 16) for number in range(8)}
    history = History()
    history.add(*document_chunks(text(99, 16), "stays"))
    held: set[int] = set()
    for number, comes in plan:
        chunks = document_chunks(texts[number], f"{number}")
        if comes:
            history.add(*chunks)
            held.add(number)
        else:
            history.publish("a", Removed(chunks))
            held.discard(number)
        (space,) = history.table.spaces.values()
        assert space.indexes[-1] is not None
        assert space.indexes[-1].count == 1 + len({number // 2 for number in held})
    for number in range(8):
        found = segments_of(history.match(history.ask(texts[number])))
        assert bool(found) == bool({number, number ^ 1} & held)
