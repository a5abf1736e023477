"""What a table promises beside its answers: it grows, shrinks, reuses, and does a bounded amount of work at a time."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matcher_kit import CHUNK, L2_OWNER, added, ask, check_answer, document_chunks, page, removed

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError
from services.common.lifecycle import Boot
from services.common.metrics import Latencies
from services.matcher import spaces as spaces_module
from services.matcher.kernels import Buckets, Output, find_windows
from services.matcher.locks import ReadWriteLock
from services.matcher.occurrences import hash_query
from services.matcher.service import MatcherService
from services.matcher.spaces import Spaces, random_hashing

CONTEXT: Any = SimpleNamespace(time_remaining=lambda: 60.0)


@pytest.fixture(params=[(1 << 62) - 1, 0b11], ids=["full hash", "two bits"])
def service(request: pytest.FixtureRequest) -> MatcherService:
    return MatcherService(Spaces(random_hashing(request.param)), Boot("matcher"), Latencies())


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


def table_bytes(service: MatcherService) -> int:
    return int(service.GetMatcherStats(matcher_pb2.GetMatcherStatsRequest(), CONTEXT).table_bytes)


def test_no_chunk_is_lost_while_the_table_grows_and_none_is_left_when_it_shrinks(service: MatcherService) -> None:
    documents = [text(seed, 160) for seed in range(100)]
    chunks = [document_chunks(tokens, f"d{n}") for n, tokens in enumerate(documents)]
    service.Publish(page(added(*[chunk for document in chunks for chunk in document])), CONTEXT)
    for tokens, document in zip(documents, chunks, strict=True):
        assert len(check_answer(ask(tokens), service.Match(ask(tokens), CONTEXT), document)) == 160
    gone = [removed(chunk) for document in chunks[1:] for chunk in document]
    service.Publish(page(gone, first=1001), CONTEXT)
    assert not service.Match(ask(documents[1]), CONTEXT).segments
    assert len(check_answer(ask(documents[0]), service.Match(ask(documents[0]), CONTEXT), chunks[0])) == 160


def test_what_was_removed_makes_room_for_what_comes(service: MatcherService) -> None:
    sequence = 1
    sizes = []
    for turn in range(6):
        chunks = document_chunks(text(turn, 100 * CHUNK + 5))
        service.Publish(page(added(*chunks), first=sequence), CONTEXT)
        sizes.append(table_bytes(service))
        # One chunk stays, so that the space does.
        service.Publish(page([removed(c) for c in chunks[1:]], first=sequence + len(chunks)), CONTEXT)
        sequence += 2 * len(chunks) - 1
    assert len(set(sizes)) == 1


def test_copies_of_one_text_under_many_names_go_one_by_one(service: MatcherService) -> None:
    tokens = text(1, CHUNK)
    copies = [document_chunks(tokens, f"copy{n}")[0] for n in range(300)]
    service.Publish(page(added(*copies)), CONTEXT)
    for number, copy in enumerate(copies[:-1]):
        service.Publish(page([removed(copy)], first=301 + number), CONTEXT)
    (segment,) = service.Match(ask(tokens), CONTEXT).segments
    assert segment.chain_hashes == copies[-1].chain_hash


def test_more_owners_than_bits_in_a_word_are_told_apart(service: MatcherService) -> None:
    documents = {f"s{n}": text(n, 2 * CHUNK) for n in range(150)}
    shared = document_chunks(text(999, CHUNK), "shared")
    for store, tokens in documents.items():
        service.Publish(page(added(*document_chunks(tokens), *shared), store=store), CONTEXT)
    for store, tokens in documents.items():
        assert service.Match(ask(tokens, store=store), CONTEXT).segments[0].length == 2 * CHUNK
        other = "s1" if store == "s0" else "s0"
        assert not service.Match(ask(tokens, store=other), CONTEXT).segments
        assert service.Match(ask(text(999, CHUNK), store=store), CONTEXT).segments
    for store in documents:
        service.Publish(page([], store=store, epoch=2), CONTEXT)
    assert not service.GetMatcherStats(matcher_pb2.GetMatcherStatsRequest(), CONTEXT).spaces


def test_case_57_a_store_loses_all_it_had_however_much_it_was(
    service: MatcherService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spaces_module, "_VOIDED_AT_ONCE", 4)
    tokens = text(1, 33 * CHUNK)
    service.Publish(page(added(*document_chunks(tokens)), store="a"), CONTEXT)
    service.Publish(page(added(*document_chunks(tokens)), store="b"), CONTEXT)
    service.Publish(page([], store="a", epoch=2), CONTEXT)
    for epoch in (1, 2):
        assert not service.Match(ask(tokens, store="a", epoch=epoch), CONTEXT).segments
    assert service.Match(ask(tokens, store="b"), CONTEXT).segments[0].length == len(tokens)


def test_another_store_or_a_later_epoch_can_report_that_l2_lost_a_chunk(service: MatcherService) -> None:
    """Sequences of different streams say nothing about each other."""
    others = [document_chunks(text(n, CHUNK))[0] for n in range(20)]
    one, two = (document_chunks(text(seed, CHUNK), owner=L2_OWNER)[0] for seed in (100, 101))
    service.Publish(page(added(*others, one, two), store="a"), CONTEXT)
    service.Publish(page([removed(one, seen_sequence=1)], store="b"), CONTEXT)
    assert not service.Match(ask(text(100, CHUNK), store="b", l2_id="redis"), CONTEXT).segments
    service.Publish(page([removed(two, seen_sequence=1)], store="a", epoch=2), CONTEXT)
    assert not service.Match(ask(text(101, CHUNK), store="b", l2_id="redis"), CONTEXT).segments


def test_scanning_looks_at_the_clock_even_where_everything_matches(service: MatcherService) -> None:
    """One repeated token over many copies: a call of the kernel ends after a bounded number of comparisons."""
    copies = [document_chunks([7] * 1024, f"copy{n}", chunk_tokens=1024)[0] for n in range(200)]
    service.Publish(page(added(*copies)), CONTEXT)
    with service._spaces.reading(copies[0].space_id, 1.0) as table:
        assert table is not None
        query = np.full(9000, 7, dtype=np.uint32)
        out = Output(np.empty(1 << 20, np.int64), np.empty(1 << 20, np.int32), np.zeros(2, np.int64))
        reached = find_windows(
            hash_query(query, table.hashing),
            0,
            len(query) - 1023,
            len(query),
            1024,
            table.hashing.bases,
            table.hashing.keep,
            Buckets(*table.windows[1024].buckets),
            table.columns,
            table.reader(table.owners, [pb.CONTEXT_CLASS_ALONE]),
            out,
        )
    assert 0 < reached < 100
    late = iter([0.05, 0.05, 0.05])
    context: Any = SimpleNamespace(time_remaining=lambda: next(late, 0.0))
    answer = service.Match(ask(query.tolist()), context)
    assert answer.scanned_tokens < len(query)
    assert pb.REASON_DEADLINE in {shortfall.reason for shortfall in answer.shortfalls}


def test_waiting_for_the_table_ends_with_the_callers_time() -> None:
    lock = ReadWriteLock()
    with lock.writing(0.0):
        with pytest.raises(KvblendError, match="DEADLINE_EXCEEDED"):
            with lock.reading(0.01):
                pass
    with lock.reading(0.0):
        with pytest.raises(KvblendError, match="DEADLINE_EXCEEDED"):
            with lock.writing(0.01):
                pass
        # A writer that gave up keeps nobody out.
        with lock.reading(0.0):
            pass
