"""What is found, what is not, and why: the table in this process."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matcher_kit import (
    CHUNK,
    L2_OWNER,
    SPACE,
    added,
    ask,
    check_answer,
    document_chunks,
    page,
    removed,
)
from reference_matcher import Chunk, reachable_tokens, worth_covering

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError
from services.common.lifecycle import Boot
from services.common.metrics import Latencies
from services.matcher import matching
from services.matcher.kernels import Text
from services.matcher.occurrences import Found, Interval, Occurrences
from services.matcher.service import MatcherService
from services.matcher.spaces import Spaces, random_hashing
from services.matcher.table import Table

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
CONTEXT: Any = SimpleNamespace(time_remaining=lambda: 60.0)
BOTH = [pb.CONTEXT_CLASS_ALONE, pb.CONTEXT_CLASS_SHARED_PREFIX, pb.CONTEXT_CLASS_IN_PROMPT]


def make_service(keep: int = (1 << 62) - 1) -> MatcherService:
    return MatcherService(Spaces(random_hashing(keep)), Boot("matcher"), Latencies())


@pytest.fixture(params=[(1 << 62) - 1, 0b11], ids=["full hash", "two bits"])
def service(request: pytest.FixtureRequest) -> MatcherService:
    """Everything must hold with a hash that nearly always collides, too."""
    return make_service(request.param)


def publish(service: MatcherService, *chunks: matcher_pb2.ChunkAdded, **where: Any) -> matcher_pb2.PublishResponse:
    return service.Publish(page(added(*chunks), **where), CONTEXT)


def covered(
    service: MatcherService, chunks: list[matcher_pb2.ChunkAdded], request: matcher_pb2.MatchRequest
) -> set[int]:
    return check_answer(request, service.Match(request, CONTEXT), chunks)


def reasons(service: MatcherService, request: matcher_pb2.MatchRequest) -> dict[str, int]:
    answer = service.Match(request, CONTEXT)
    return {pb.Reason.Name(s.reason).removeprefix("REASON_"): s.tokens for s in answer.shortfalls}


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


@pytest.mark.parametrize("offset", [0, 1, 7, 16, 33])
def test_a_document_is_found_whole_at_any_offset(service: MatcherService, offset: int) -> None:
    document = text(1, 70)
    chunks = document_chunks(document)
    publish(service, *chunks)
    query = text(2, offset) + document + text(3, 20)
    assert covered(service, chunks, ask(query)) == set(range(offset, offset + 70))
    assert len(service.Match(ask(query), CONTEXT).segments) == 1


def test_every_occurrence_of_a_repeated_document_is_found(service: MatcherService) -> None:
    document = text(1, 48)
    chunks = document_chunks(document)
    publish(service, *chunks)
    query = document + text(2, 5) + document + document
    assert len(covered(service, chunks, ask(query))) == 3 * 48


def test_case_35_documents_in_any_order_are_covered_to_their_last_token(service: MatcherService) -> None:
    documents = {f"d{n}": text(n, length) for n, length in enumerate((700, 333, 45, 17, 256))}
    chunks = [c for name, tokens in documents.items() for c in document_chunks(tokens, name)]
    publish(service, *chunks)
    query = [token for name in ("d3", "d0", "d4", "d2", "d1") for token in documents[name]]
    answer = service.Match(ask(query), CONTEXT)
    assert len(check_answer(ask(query), answer, chunks)) == len(query)
    assert [segment.document for segment in answer.segments] == ["d3", "d0", "d4", "d2", "d1"]


def test_a_run_goes_on_token_by_token_into_the_chunks_around(service: MatcherService) -> None:
    document = text(1, 64)
    chunks = document_chunks(document)
    publish(service, *chunks)
    query = text(2, 9) + document[11:41] + text(3, 9)
    # Chunk [16, 32) stands whole; five tokens before it and nine behind it agree too.
    assert covered(service, chunks, ask(query)) == set(range(9, 39))


def test_one_different_token_splits_a_run_and_is_not_covered(service: MatcherService) -> None:
    document = text(1, 96)
    chunks = document_chunks(document)
    publish(service, *chunks)
    query = list(document)
    query[40] += 1
    assert covered(service, chunks, ask(query)) == set(range(96)) - set(range(41, 48)) - {40} | set(range(41, 48))


def test_the_prefix_is_not_covered_twice(service: MatcherService) -> None:
    document = text(1, 64)
    chunks = document_chunks(document)
    publish(service, *chunks)
    assert covered(service, chunks, ask(document, skip_tokens=37)) == set(range(37, 64))


def test_segments_keep_away_from_opaque_spans(service: MatcherService) -> None:
    document = text(1, 96)
    chunks = document_chunks(document)
    publish(service, *chunks)
    span = pb.OpaqueSpan(offset=40, length=4, digest=b"x" * 32)
    request = ask(document, opaque_spans=[span])
    assert covered(service, chunks, request) == set(range(40)) | set(range(44, 96))
    assert reasons(service, request) == {"OPAQUE_SPAN": 4}


def test_what_is_not_matchable_or_blended_is_never_offered(service: MatcherService) -> None:
    document = text(1, 48)
    publish(
        service,
        *document_chunks(document, "image", matchable=False),
        *document_chunks(document, "blended", domain=pb.DOMAIN_BLENDED),
    )
    assert reasons(service, ask(document)) == {"UNKNOWN_TEXT": 48}


def test_case_67_every_way_to_find_nothing_has_its_reason(service: MatcherService) -> None:
    document = text(1, 48)
    assert reasons(service, ask(document)) == {"NOTHING_STORED": 48}
    publish(service, *document_chunks(document, context_class=pb.CONTEXT_CLASS_IN_PROMPT))
    assert reasons(service, ask(document)) == {"CONTEXT_CLASS_NOT_ALLOWED": 48}
    assert reasons(service, ask(document, context_classes=BOTH)) == {}
    assert reasons(service, ask(text(2, 40))) == {"UNKNOWN_TEXT": 40}
    assert reasons(service, ask(text(2, 15))) == {"TOO_SHORT": 15}
    assert reasons(service, ask(document, space_id=b"t" * 16)) == {"NOTHING_STORED": 48}


def test_case_39_only_what_the_asking_store_can_reach_is_returned(service: MatcherService) -> None:
    document = text(1, 48)
    here, elsewhere = document_chunks(document, "here"), document_chunks(document, "elsewhere")
    publish(service, *here, store="a")
    publish(service, *elsewhere, store="b")
    for store, name in (("a", "here"), ("b", "elsewhere")):
        segments = service.Match(ask(document, store=store), CONTEXT).segments
        assert [segment.document for segment in segments] == [name]
    assert reasons(service, ask(document, store="c")) == {"UNKNOWN_TEXT": 48}
    shared = document_chunks(document, "shared", owner=L2_OWNER)
    publish(service, *shared, store="b", first=4)
    assert covered(service, shared, ask(document, store="c", l2_id="redis")) == set(range(48))
    assert reasons(service, ask(document, store="c", l2_id="other")) == {"UNKNOWN_TEXT": 48}


def test_case_57_a_newer_epoch_voids_what_the_store_had(service: MatcherService) -> None:
    document = text(1, 48)
    chunks = document_chunks(document)
    publish(service, *chunks)
    publish(service, *chunks[:1], epoch=2)
    assert reasons(service, ask(document, epoch=1)) == {"UNKNOWN_TEXT": 48}
    assert covered(service, chunks, ask(document, epoch=2)) == set(range(16))
    with pytest.raises(KvblendError) as caught:
        publish(service, *chunks, epoch=1)
    assert caught.value.reason == "STALE_EPOCH"


def test_case_40_what_is_removed_is_gone_and_a_copy_elsewhere_stays(service: MatcherService) -> None:
    document = text(1, 32)
    one, two = document_chunks(document, "one"), document_chunks(document, "two")
    publish(service, *one, *two)
    service.Publish(page([removed(chunk) for chunk in one], first=5), CONTEXT)
    segments = service.Match(ask(document), CONTEXT).segments
    assert {segment.document for segment in segments} == {"two"}
    service.Publish(page([removed(chunk) for chunk in two], first=7), CONTEXT)
    assert reasons(service, ask(document)) == {"NOTHING_STORED": 32}
    assert service.GetMatcherStats(matcher_pb2.GetMatcherStatsRequest(), CONTEXT).spaces == []


def test_a_report_of_absence_does_not_remove_what_was_added_again(service: MatcherService) -> None:
    document = text(1, 16)
    (chunk,) = document_chunks(document)
    publish(service, chunk)
    publish(service, chunk, first=2)
    service.Publish(page([removed(chunk, seen_sequence=1)], first=3), CONTEXT)
    assert covered(service, [chunk], ask(document)) == set(range(16))
    service.Publish(page([removed(chunk, seen_sequence=2)], first=4), CONTEXT)
    assert reasons(service, ask(document)) == {"NOTHING_STORED": 16}


def test_repeats_are_ignored_and_a_gap_asks_for_a_reset(service: MatcherService) -> None:
    chunks = document_chunks(text(1, 64))
    assert publish(service, *chunks[:2]).applied_sequence == 2
    assert publish(service, *chunks[:3]).applied_sequence == 3
    gap = publish(service, chunks[3], first=9)
    assert (gap.needs_reset, gap.applied_sequence) == (True, 3)
    unknown = publish(service, chunks[0], store="new", first=5)
    assert unknown.needs_reset
    assert not publish(service, *chunks, first=100, reset=True).needs_reset
    assert service.Match(ask(text(1, 64)), CONTEXT).applied[0].sequence == 103


def test_at_least_waits_and_then_says_that_it_is_behind(service: MatcherService) -> None:
    publish(service, *document_chunks(text(1, 16)))
    short: Any = SimpleNamespace(time_remaining=lambda: 0.05)
    behind = pb.StreamPosition(store="a", epoch=1, sequence=2)
    with pytest.raises(KvblendError) as caught:
        service.Match(ask(text(1, 16), at_least=[behind]), short)
    assert caught.value.reason == "NOT_CAUGHT_UP"
    reached = pb.StreamPosition(store="a", epoch=1, sequence=1)
    assert service.Match(ask(text(1, 16), at_least=[reached]), short).segments


def test_a_late_answer_says_how_far_it_got(service: MatcherService) -> None:
    publish(service, *document_chunks(text(1, 16)))
    none_left: Any = SimpleNamespace(time_remaining=lambda: 0.0)
    answer = service.Match(ask(text(1, 16)), none_left)
    assert answer.scanned_tokens == 0
    assert [s.reason for s in answer.shortfalls] == [pb.REASON_DEADLINE]


def test_scores_tell_what_each_store_could_serve(service: MatcherService) -> None:
    prompt = text(1, 64)
    exact = document_chunks(prompt, domain=pb.DOMAIN_EXACT, context_class=pb.CONTEXT_CLASS_IN_PROMPT)
    segments = document_chunks(prompt[32:], "segment")
    publish(service, *exact[:2], store="a")
    publish(service, *segments, store="b")
    answer = service.Score(
        matcher_pb2.ScoreRequest(
            space_id=SPACE,
            tokens=ask(prompt).tokens,
            chain_hashes=b"".join(chunk.chain_hash for chunk in exact),
            chunk_tokens=CHUNK,
        ),
        CONTEXT,
    )
    assert [(s.store, s.prefix_tokens, s.anywhere_tokens) for s in answer.stores] == [("a", 32, 32), ("b", 0, 32)]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask([]), "EMPTY_PROMPT"),
        (matcher_pb2.MatchRequest(space_id=SPACE, tokens=b"12345"), "INVALID_TOKENS"),
        (ask(range(20), space_id=b"short"), "INVALID_ARGUMENT"),
        (ask(range(20), skip_tokens=21), "INVALID_ARGUMENT"),
        (ask(range(20), opaque_spans=[pb.OpaqueSpan(offset=19, length=5, digest=b"x" * 32)]), "INVALID_ARGUMENT"),
    ],
)
def test_bad_queries_are_typed_errors(service: MatcherService, request_: matcher_pb2.MatchRequest, reason: str) -> None:
    with pytest.raises(KvblendError) as caught:
        service.Match(request_, CONTEXT)
    assert caught.value.reason == reason


def test_a_bad_page_changes_nothing(service: MatcherService) -> None:
    good, bad = document_chunks(text(1, 32))
    bad.chain_hash = b"short"
    with pytest.raises(KvblendError):
        publish(service, good, bad)
    assert reasons(service, ask(text(1, 32))) == {"NOTHING_STORED": 32}


def thue_morse(length: int) -> list[int]:
    return [bin(n).count("1") & 1 for n in range(length)]


def test_algebraic_patterns_are_told_apart() -> None:
    service = make_service()
    pattern = thue_morse(1024)
    opposite = [1 - bit for bit in pattern]
    chunks = document_chunks(pattern, chunk_tokens=1024)
    publish(service, *chunks)
    assert reasons(service, ask(opposite)) == {"UNKNOWN_TEXT": 1024}
    assert len(covered(service, chunks, ask(pattern))) == 1024


def collision_pairs() -> Iterator[tuple[list[int], list[int]]]:
    data = json.loads((SHARED_DATA / "collision_pair.json").read_text())
    for value in data.values():
        if isinstance(value, dict):
            arrays = [v for v in value.values() if isinstance(v, list) and len(v) >= 16]
            if len(arrays) == 2:
                yield arrays[0], arrays[1]
    arrays = [v for v in data.values() if isinstance(v, list) and len(v) >= 16]
    if len(arrays) >= 2:
        yield arrays[0], arrays[1]


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the shared data folder is absent")
def test_chunks_that_collide_in_other_systems_are_told_apart(service: MatcherService) -> None:
    pairs = list(collision_pairs())
    assert pairs
    for number, (one, other) in enumerate(pairs):
        assert one != other
        size = 1 << (len(one).bit_length() - 1)
        first, second = (
            document_chunks(t[:size], f"{number}-{i}", chunk_tokens=size) for i, t in enumerate((one, other))
        )
        publish(service, *first, store=f"s{number}")
        assert not service.Match(ask(other[:size], store=f"s{number}"), CONTEXT).segments
        publish(service, *second, store=f"s{number}", first=2)
        for tokens, name in ((one, "0"), (other, "1")):
            (segment,) = service.Match(ask(tokens[:size], store=f"s{number}"), CONTEXT).segments
            assert segment.document == f"{number}-{name}"


# Few symbols and few documents: chunks repeat, overlap, share beginnings and collide.
texts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=60), min_size=1, max_size=4)
plans = st.tuples(
    texts, st.data(), st.integers(0, 40), st.sampled_from([(1 << 62) - 1, 0b1]), st.sets(st.integers(0, 15), max_size=6)
)


def compare_with_reference(plan: tuple[Any, ...]) -> None:
    documents, data, skip, keep, dropped = plan
    service = make_service(keep)
    chunks = [c for n, tokens in enumerate(documents) for c in document_chunks(tokens, f"d{n}")]
    publish(service, *chunks)
    gone = [chunks[n] for n in sorted(dropped) if n < len(chunks)]
    if gone:
        service.Publish(page([removed(chunk) for chunk in gone], first=len(chunks) + 1), CONTEXT)
    left = [chunk for chunk in chunks if chunk not in gone]
    parts = data.draw(st.lists(st.sampled_from([*documents, [2, 0, 1]]), min_size=1, max_size=5))
    query = [token for part in parts for token in part]
    skip = min(skip, len(query))
    request = ask(query, skip_tokens=skip)
    answer = service.Match(request, CONTEXT)
    got = check_answer(request, answer, left)
    stored = [
        Chunk(c.chain_hash, c.previous_hash, tuple(np.frombuffer(c.tokens, "<u4")), c.stored_position) for c in left
    ]
    want = worth_covering(reachable_tokens(query, stored, skip, CHUNK))
    assert got <= want
    # Short pieces between longer ones may be lost, never a piece that is worth a segment by itself.
    assert worth_covering(want - got) == set()


@given(plans)
def test_every_cover_is_true_and_complete(plan: tuple[Any, ...]) -> None:
    compare_with_reference(plan)


@pytest.mark.parametrize("fault", ["forgets a run", "shifts a run", "trusts the hash"])
def test_a_broken_matcher_fails_the_comparison(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    inner = matching.best_cover

    def broken(*args: Any) -> Any:
        return inner(*args)[1:]

    if fault == "forgets a run":
        monkeypatch.setattr(matching, "best_cover", broken)
    elif fault == "shifts a run":
        inner_segment = matching._segment

        def shifted(run: Any) -> pb.Segment:
            segment = inner_segment(run)
            segment.stored_position += 1
            return segment

        monkeypatch.setattr(matching, "_segment", shifted)
    else:
        monkeypatch.setattr(matching, "find_occurrences", _hash_only)
    documents = [[0, 1] * 30, [1] * 20]
    data: Any = SimpleNamespace(draw=lambda _: [documents[0], [0] * 20])
    with pytest.raises(AssertionError):
        compare_with_reference((documents, data, 0, 0b0, set()))


def _hash_only(table: Table, text: Text, intervals: list[Interval], reader: Any, is_late: Any) -> Found:
    """Every entry "occurs" wherever its (fully colliding) fingerprint does: everywhere."""
    del reader, is_late
    (low, high) = intervals[0]
    every = sorted(
        (at << 32 | entry.id, entry.length)
        for entry in table.by_id.values()
        for at in range(low, high - entry.length + 1)
        if entry.window
    )
    keys = np.array([key for key, _ in every], dtype=np.int64)
    agreed = np.array([length for _, length in every], dtype=np.int32)
    return Found([Occurrences(low, high, keys, agreed)], len(text.tokens), len(every), len(every))
