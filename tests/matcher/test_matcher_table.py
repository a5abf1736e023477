"""Without an end: the table grows and shrinks, uses places again, forgets exactly, and stays within its memory."""

import threading
from typing import Any

import numpy as np
import pytest
from history import LIMIT, History, history_of
from matcher_kit import (
    ALL_BITS,
    CHUNK,
    SPACE,
    TIER,
    Added,
    Cleared,
    Removed,
    check_answer,
    document_chunks,
    segments_of,
    text,
)

from services.matcher import service as service_module
from services.matcher import table as table_module
from services.matcher.kernels.hashing import random_hashing
from services.matcher.kernels.types import U64
from services.matcher.owners import PLANES, OwnerName
from services.matcher.pages import store_owner
from services.matcher.table import Batch, Table

MIB = 1 << 20
keeps = pytest.mark.parametrize("keep", [ALL_BITS, 0b11], ids=["full hash", "two bits"])


def names(first: int, count: int) -> U64:
    hashes = np.zeros((count, 4), dtype=np.uint64)
    hashes[:, 0] = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashes[:, 3] = np.arange(first, first + count, dtype=np.uint64)
    return hashes


def batch(first: int, count: int, length: int = 16, tokens: Any = None, **facts: Any) -> Batch:
    """Chunks of new texts, none of which continues another."""
    if tokens is None:
        tokens = np.arange(count * length, dtype=np.uint32) + np.uint32(first * length)
    columns = {
        "space_id": SPACE,
        "chunk_tokens": 1024,
        "tenant": "",
        "names": names(first, count),
        "previous": names(first + (1 << 40), count),
        "positions": np.zeros(count, dtype=np.uint32),
        "lengths": np.full(count, length, dtype=np.uint32),
        "tokens": tokens,
        "domains": np.full(count, 2, dtype=np.uint8),
        "classes": np.full(count, 1, dtype=np.uint8),
        "matchable": np.ones(count, dtype=np.uint8),
        "documents": "doc",
    }
    return Batch(**(columns | facts))


OWNER = store_owner("a")


def found(table: Table, first: int, count: int) -> int:
    """How many of these chunks the table has, by name."""
    space = table.spaces.get(SPACE)
    with table.lock:
        return 0 if space is None else int((table.find(space, 2, names(first, count)) >= 0).sum())


@keeps
def test_no_chunk_is_lost_while_the_table_grows_and_none_is_left_when_it_shrinks(keep: int) -> None:
    documents = [text(seed, 160) for seed in range(100)]
    chunks = [document_chunks(tokens, f"d{n}") for n, tokens in enumerate(documents)]
    history = history_of(*(chunk for document in chunks for chunk in document), hashing=random_hashing(keep))
    for tokens, document in zip(documents, chunks, strict=True):
        assert len(history.covered(history.ask(tokens), document)) == 160
    history.publish("a", Removed([chunk for document in chunks[1:] for chunk in document]))
    assert not segments_of(history.match(history.ask(documents[1])))
    assert len(history.covered(history.ask(documents[0]), chunks[0])) == 160


@keeps
def test_what_was_removed_makes_room_for_what_comes(keep: int) -> None:
    history = History(hashing=random_hashing(keep))
    sizes = []
    for turn in range(6):
        chunks = document_chunks(text(turn, 100 * CHUNK + 5))
        history.add(*chunks)
        sizes.append(history.table.size)
        # One chunk stays, so that the space does.
        history.publish("a", Removed(chunks[1:]))
    assert max(sizes) - sizes[0] < 10 * (LIMIT // 1000)
    assert history.table.entries_begun == 4096


def test_a_table_that_was_full_and_is_empty_is_as_small_as_a_new_one() -> None:
    table = Table(128 * MIB)
    table.add(batch(0, 1), OWNER, 1)
    small = table.size
    for first in range(1, 200_001, 20_000):
        table.add(batch(first, 20_000), OWNER, 1)
    assert table.size > 50 * small
    assert table.chunks == 200_001
    for first in range(1, 200_001, 50_000):
        table.remove(SPACE, 2, names(first, 50_000), OWNER)
    table.remove(SPACE, 2, names(0, 1), OWNER)
    table.add(batch(0, 1), OWNER, 1)
    assert table.chunks == 1
    # What is left: the allocators' own lists, 8 KiB for a slab of 4,096 ids or of 65,536 tokens.
    assert table.size < small + 2 * MIB
    assert [len(index.buckets.heads) for index in table.spaces[SPACE].indexes if index] == [16]


def test_registering_and_removing_without_an_end_leaves_the_table_as_new() -> None:
    """200,000 chunks come and go beside 500 that stay; ids, nodes and slots are the same ones again and again."""
    table = Table(64 * MIB)
    table.add(batch(0, 500), OWNER, 1)
    sizes, places = [], []
    for turn in range(100):
        first = 1000 + 2000 * turn
        table.add(batch(first, 2000, length=16 + turn % 3 * 16), OWNER, 1)
        table.remove(SPACE, 2, names(first, 2000), OWNER)
        sizes.append(table.size)
        places.append(table.entries_begun)
    assert found(table, 0, 500) == table.chunks == 500
    assert max(sizes[10:]) <= max(sizes[:10])
    assert places[-1] == places[10]
    assert table.grace.pending == 0
    for index in filter(None, table.spaces[SPACE].indexes):
        # The filter is made anew now and then: it does not fill up with what is gone.
        assert np.unpackbits(index.buckets.bits.view(np.uint8)).mean() < 0.35


def test_the_text_of_many_copies_is_stored_once() -> None:
    history = history_of(*document_chunks(text(1, 1024), "first", chunk_tokens=1024))
    before = history.table.size
    for number in range(100):
        history.add(*document_chunks(text(1, 1024), f"copy {number}", chunk_tokens=1024))
    # Each takes an entry, none 4 KiB of tokens.
    assert history.table.size - before < 100 * 400
    assert history.table.chunks == 101


@keeps
def test_copies_of_one_text_under_many_names_go_one_by_one(keep: int) -> None:
    tokens = text(1, CHUNK)
    copies = [document_chunks(tokens, f"copy{n}")[0] for n in range(300)]
    history = history_of(*copies, hashing=random_hashing(keep))
    order = np.random.default_rng(1).permutation(300).tolist()
    for number in order[:-1]:
        history.publish("a", Removed([copies[number]]))
        assert len(history.covered(history.ask(tokens), copies)) == CHUNK
    (segment,) = segments_of(history.match(history.ask(tokens)))
    assert segment.chain_hashes == [copies[order[-1]].chain_hash]


def test_one_of_two_copies_removed_leaves_the_other_and_can_come_again() -> None:
    tokens = text(1, 40)
    one, two = document_chunks(tokens, "one"), document_chunks(tokens, "two")
    for first, second in ((one, two), (two, one)):
        history = history_of(*one, *two)
        for _ in range(3):
            history.publish("a", Removed(first))
            assert {s.document for s in segments_of(history.match(history.ask(tokens)))} == {second[0].document}
            history.add(*first)
            assert len(history.covered(history.ask(tokens), [*one, *two])) == 40


def test_over_its_limit_the_table_drops_what_was_matched_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(Table, "now", property(lambda self: now))
    history = History(limit=MIB)
    kept = document_chunks(text(1, 200), "kept")
    history.add(*document_chunks(text(2, 200), "idle"), *kept)
    for turn in range(40):
        # Long after the last change: what is matched now is newer than all that.
        now += 10
        assert len(history.covered(history.ask(text(1, 200)), kept)) == 200
        now += 10
        history.add(*document_chunks(text(10 + turn, 3000), f"filler {turn}"))
        assert history.table.size <= MIB
    assert history.table.evicted > 1000
    assert len(history.covered(history.ask(text(1, 200)), kept)) == 200
    assert not segments_of(history.match(history.ask(text(2, 200))))
    # What was dropped here can be said again.
    history.add(*document_chunks(text(2, 200), "idle"))
    assert len(segments_of(history.match(history.ask(text(2, 200))))) == 1


def test_the_limit_holds_for_texts_of_all_lengths_and_many_spaces() -> None:
    table = Table(8 * MIB)
    random = np.random.default_rng(5)
    for turn in range(300):
        length = int(random.integers(1, 1025))
        count = int(random.integers(1, 200))
        table.add(batch(turn * 1000, count, length, space_id=bytes([turn % 7]) * 16), OWNER, 1)
        assert table.size <= 8 * MIB
    assert table.evicted > 0
    assert table.chunks == sum(space.chunks for space in table.spaces.values())


def test_without_room_chunks_are_left_out_and_counted_and_everything_else_goes_on() -> None:
    """A reader that stays keeps memory from being used again; what does not fit then is left out."""
    table = Table(MIB)
    with table.grace.reading():
        for turn in range(40):
            table.add(batch(turn * 1000, 1000), OWNER, 1)
            assert table.chunks == sum(space.chunks for space in table.spaces.values())
        assert table.chunks + table.evicted == 40_000
        known = [turn for turn in range(40) if found(table, turn * 1000, 1000)]
        table.remove(SPACE, 2, names(known[-1] * 1000, 1000), OWNER)
    table.sweep()
    table.add(batch(90_000, 100), OWNER, 1)
    assert found(table, 90_000, 100) == 100
    assert table.grace.pending == 0


def test_more_owners_than_bits_in_a_word_are_told_apart() -> None:
    documents = {f"s{n}": text(n, 2 * CHUNK) for n in range(150)}
    chunks = {store: document_chunks(tokens, "own") for store, tokens in documents.items()}
    shared = document_chunks(text(999, CHUNK), "shared")
    history = History()
    for store in documents:
        history.publish(store, Added([*chunks[store], *shared]))
    for store, tokens in documents.items():
        assert len(history.covered(history.ask(tokens, store), chunks[store])) == 2 * CHUNK
        other = "s1" if store == "s0" else "s0"
        assert not segments_of(history.match(history.ask(tokens, other)))
        assert segments_of(history.match(history.ask(text(999, CHUNK), store)))
    gone = [document_chunks(text(1000, CHUNK), "gone")[0]]
    for store in documents:
        history.restart(store, Removed(gone))
    while history.table.sweep():
        pass
    assert not history.table.spaces
    assert history.table.chunks == 0


def test_a_store_over_the_most_is_left_out_and_comes_in_when_another_has_gone() -> None:
    history = History(limit=32 * MIB)
    shared = document_chunks(text(1, CHUNK), "shared")
    for number in range(32 * PLANES):
        history.add(*shared, store=f"s{number}")
    history.add(*shared, *document_chunks(text(2, CHUNK)), store="one too many")
    asked = history.ask(text(1, CHUNK), "one too many")
    assert not segments_of(history.match(asked))
    for number in (0, 31, 32, 63, 64, 2000, 32 * PLANES - 1):
        assert len(segments_of(history.match(history.ask(text(1, CHUNK), f"s{number}")))) == 1
    history.restart("s7", Cleared())
    while history.table.sweep():
        pass
    history.add(*shared, store="one too many")
    assert len(segments_of(history.match(asked))) == 1
    assert not segments_of(history.match(history.ask(text(1, CHUNK), "s7")))


def test_case_57_restarts_by_the_thousand_leave_nothing_behind_however_fast_they_come() -> None:
    """A replica that catches up applies them without a pause to sweep: it must know the same as one that had time."""
    history = History()
    chunks = document_chunks(text(1, CHUNK))
    for _ in range(32 * PLANES + 10):
        history.restart("a", Added(chunks))
    assert len(history.covered(history.ask(text(1, CHUNK)), chunks)) == CHUNK
    assert history.table.chunks == 1


def test_case_57_a_store_loses_all_it_had_however_much_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_AT_ONCE", 4)
    tokens = text(1, 33 * CHUNK)
    chunks = document_chunks(tokens)
    history = history_of(*chunks)
    history.add(*chunks, store="b")
    history.restart("a", Removed(document_chunks(text(2, CHUNK))))
    for epoch in (1, 2):
        request = history.ask(tokens)
        request.epoch = epoch
        assert not segments_of(history.match(request))
    assert len(history.covered(history.ask(tokens, "b"), chunks)) == len(tokens)
    while history.table.sweep():
        assert len(history.covered(history.ask(tokens, "b"), chunks)) == len(tokens)


def test_a_tiers_claims_of_different_stores_are_one() -> None:
    """Who reports that it lost a chunk need not be who said that it has it."""
    (one,), (two,) = (document_chunks(text(seed, CHUNK), l2=TIER) for seed in (100, 101))
    history = history_of(one, two)
    seen = history.position.number
    history.publish("b", Removed([one], seen=seen))
    history.publish("a", Added([two]))
    history.publish("b", Removed([two], seen=seen))
    assert not segments_of(history.match(history.ask(one.tokens, "c", l2_id=TIER)))
    assert segments_of(history.match(history.ask(two.tokens, "c", l2_id=TIER)))


def test_names_of_documents_go_with_their_last_chunk() -> None:
    history = History()
    for turn in range(50):
        chunks = document_chunks(text(turn, 64), f"document {turn}")
        history.add(*chunks)
        # Chunks that are known already bring no new name.
        history.add(*(type(c)(**(vars(c) | {"document": f"alias {turn}"})) for c in chunks))
        history.publish("a", Cleared(document=f"document {turn}"))
    assert history.table.documents.bytes == 0
    assert len(history.table.documents.names) <= 3


def test_an_empty_batch_leaves_nothing_behind() -> None:
    table = Table(LIMIT)
    for number in range(100):
        table.add(batch(0, 0, documents=f"nothing {number}"), OWNER, 1)
    assert table.documents.bytes == 0
    assert not table.spaces


def test_scanning_looks_at_the_clock_even_where_everything_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One repeated token over many copies: the answer is partial, and says how far it got."""
    copies = [document_chunks([7] * 1024, f"copy{n}", chunk_tokens=1024)[0] for n in range(200)]
    history = history_of(*copies, limit=8 * MIB)
    request = history.ask([7] * 9000)
    looks = iter([False] * 12)
    monkeypatch.setattr(service_module, "_is_late", lambda deadline: lambda: next(looks, True))
    answer = history.match(request)
    assert 0 < answer.scanned_tokens < 9000
    assert len(check_answer(request, answer, copies)) <= answer.scanned_tokens + 1024


def test_changes_wait_for_no_reader() -> None:
    """A thread stays inside; everything a writer does goes on, and is used again when it has left."""
    table = Table(64 * MIB)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with table.grace.reading():
            inside.set()
            leave.wait(60)

    reader = threading.Thread(target=stay)
    reader.start()
    assert inside.wait(60)
    for turn in range(20):
        table.add(batch(turn * 1000, 1000), OWNER, 1)
        table.remove(SPACE, 2, names(turn * 1000, 1000), OWNER)
        table.void(OwnerName(1, "a"))
    pinned = table.entries_begun
    assert pinned >= 20_000
    leave.set()
    reader.join(60)
    while table.sweep():
        pass
    for turn in range(20):
        table.add(batch(turn * 1000, 1000), OWNER, 1)
        table.remove(SPACE, 2, names(turn * 1000, 1000), OWNER)
    assert table.entries_begun == pinned
    assert table.grace.pending == 0
