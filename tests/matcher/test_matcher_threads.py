"""Readers in threads while a writer changes everything: no reader ever sees one chunk's tokens under another's name,
nor misses what was there all the time."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from history import History, history_of
from matcher_kit import (
    EVERY_CLASS,
    TIER,
    Added,
    Change,
    Chunk,
    Cleared,
    Removed,
    ask,
    check_segments,
    document_chunks,
    segments_of,
    text,
)
from matcher_service_kit import CONTEXT, service_of

from services.matcher import table as table_module
from services.matcher.kernels.texts import gather_tokens
from services.matcher.matching import Query, match
from services.matcher.pages import store_owner

READERS = 3
TURNS = 250
JOIN_SECONDS = 100.0
STABLE = [text(seed, length) for seed, length in enumerate((700, 100, 37, 256, 16))]


class Town:
    """Documents that stay, documents that come and go, and what each name's chunk is."""

    def __init__(self) -> None:
        self.history = History(limit=64 << 20)
        self.known: dict[tuple[int, bytes], Chunk] = {}
        self.random = random.Random(1)
        self.churn: list[list[Chunk]] = []
        # Owners that ever had a chunk: nobody else may be offered it.
        self.had: dict[bytes, set[str]] = {}
        for number, tokens in enumerate(STABLE):
            self.add("stable", document_chunks(tokens, f"stable {number}", chunk_tokens=64))

    def add(self, store: str, chunks: list[Chunk]) -> None:
        self.tell(store, chunks)
        self.history.publish(store, Added(chunks))

    def tell(self, store: str, chunks: list[Chunk]) -> None:
        """What is about to be published, said before any reader can see it."""
        self.known |= {(chunk.domain, chunk.chain_hash): chunk for chunk in chunks}
        for chunk in chunks:
            self.had.setdefault(chunk.chain_hash, set()).add(chunk.l2 or store)

    def turn(self, number: int) -> None:
        """Texts begin like those that stay, share them, or are new; they go one by one, by scopes, by epochs."""
        pick = self.random
        store = pick.choice(["x", "y"])
        stable = pick.choice(STABLE)
        tokens = [*stable[: pick.randrange(len(stable))], *text(number, pick.randrange(1, 200))]
        l2 = pick.choice(["", TIER])
        name = number % 7
        chunks = document_chunks(tokens, f"churn {name}", chunk_tokens=64, document=f"d{name % 3}", l2=l2)
        self.add(store, chunks)
        self.churn.append(chunks)
        if len(self.churn) > 6:
            gone = self.churn.pop(pick.randrange(len(self.churn)))
            for by in ("x", "y"):
                self.history.publish(by, Removed(gone))
        if number % 10 == 3:
            change: Change = pick.choice([Cleared(), Cleared(document="d1"), Cleared(TIER)])
            self.history.publish(store, change)
        if number % 10 == 6:
            self.tell(store, self.churn[-1][:1])
            self.history.restart(store, Added(self.churn[-1][:1]))
        if number % 25 == 12:
            # Indexes grow, and shrink again.
            many = document_chunks(text(number, 16 * 3000), f"many {number}", chunk_tokens=64)
            self.add(store, many)
            self.history.publish(store, Removed(many))
        for _ in range(pick.randrange(3)):
            self.history.table.sweep()


@contextmanager
def readers(read: Callable[[int], None], count: int = READERS) -> Iterator[None]:
    """Threads that read until the block is left; what one of them raises is raised here."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def go_on(seed: int) -> None:
        number = seed
        try:
            while not stop.is_set():
                read(number)
                number += READERS
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=go_on, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(JOIN_SECONDS)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def test_readers_see_whole_truths_while_everything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_AT_ONCE", 50)
    town = Town()
    service = service_of(town.history.fold)
    answers = 0

    def read(number: int) -> None:
        nonlocal answers
        pick = random.Random(number)
        parts = pick.sample(STABLE, 4)
        known_positions = []
        query: list[int] = []
        for part in parts:
            query += text(number, pick.randrange(1, 30))
            known_positions.append((len(query), len(part)))
            query += part
        stable = ask(query, "stable", 1, context_classes=EVERY_CLASS)
        covered = check_segments(stable, service.Match(stable, CONTEXT), town.known)
        for start, length in known_positions:
            assert covered >= set(range(start, start + length))
        store = pick.choice(["x", "y"])
        chunks = pick.choice(town.churn[:] or [[]])
        mixed = [*(token for chunk in chunks for token in chunk.tokens), *query]
        request = ask(mixed, store, town.history.epochs[store], l2_id=pick.choice(["", TIER]))
        answer = service.Match(request, CONTEXT)
        check_segments(request, answer, town.known)
        for segment in segments_of(answer):
            for chain_hash in segment.chain_hashes:
                assert town.had[chain_hash] & {store, request.l2_id}
        answers += 1

    with readers(read):
        for number in range(TURNS):
            town.turn(number)
    assert answers > READERS
    assert town.history.table.entries_begun <= 4 * 4096


def test_nothing_is_used_again_under_a_reader_that_stays() -> None:
    """It reads names and tokens of its match long after all of that has gone."""
    document = text(1, 500)
    chunks = document_chunks(document, chunk_tokens=64)
    history = history_of(*chunks, limit=16 << 20)
    table = history.table
    (space,) = table.spaces.values()
    query = Query(np.array(document, dtype=np.uint32), 0, frozenset([store_owner("a")]), frozenset([1]))
    with table.grace.reading():
        entries = match(table, space, query, lambda: False).cover.entries
        assert len(entries) == len(chunks)
        columns = table.columns
        history.publish("a", Removed(chunks))
        for number in range(60):
            other = document_chunks(text(100 + number, 500), "other", chunk_tokens=64)
            history.add(*other)
            history.publish("a", Cleared())
            history.restart("a", Added(other[:1]))
            table.sweep()
        assert columns.names[entries].tobytes() == b"".join(chunk.chain_hash for chunk in chunks)
        assert gather_tokens(entries, columns).tolist() == document
        pending = table.grace.pending
        assert pending >= 60
    table.sweep()
    while table.sweep():
        pass
    assert table.grace.pending == 0


def test_matching_beside_the_eviction_of_what_is_matched() -> None:
    """A table at its limit drops what readers look at; they get true answers, or none."""
    history = History(limit=1 << 20)
    service = service_of(history.fold)
    known: dict[tuple[int, bytes], Chunk] = {}
    documents = [text(seed, 640) for seed in range(60)]

    def read(number: int) -> None:
        request = ask(documents[number % len(documents)] + documents[(7 * number) % len(documents)], "a", 1)
        check_segments(request, service.Match(request, CONTEXT), known)

    with readers(read, 2):
        for turn in range(8):
            for number, tokens in enumerate(documents):
                chunks = document_chunks(tokens, f"{turn} {number}")
                known |= {(chunk.domain, chunk.chain_hash): chunk for chunk in chunks}
                history.add(*chunks)
                assert history.table.chunks > 0
    assert history.table.evicted > 5000
