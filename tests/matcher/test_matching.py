"""What is found, what is not, and why: a whole matcher in this process."""

from collections.abc import Iterator

import pytest
from matcher_kit import (
    ALL_BITS,
    CHUNK,
    EVERY_CLASS,
    TIER,
    Cleared,
    Removed,
    ask,
    document_chunks,
    segments_of,
    text,
)
from matcher_service_kit import Matcher, running

from kvblend.v1 import common_pb2 as pb
from services.common.errors import KvblendError
from services.matcher.kernels.hashing import random_hashing


@pytest.fixture(params=[ALL_BITS, 0b11], ids=["full hash", "two bits"])
def matcher(request: pytest.FixtureRequest) -> Iterator[Matcher]:
    """Everything must hold with a hash that nearly always collides, too."""
    with running(hashing=random_hashing(request.param)) as started:
        yield started


@pytest.mark.parametrize("offset", [0, 1, 7, 16, 33])
def test_a_document_is_found_whole_at_any_offset(matcher: Matcher, offset: int) -> None:
    document = text(1, 70)
    chunks = document_chunks(document)
    matcher.add(*chunks)
    query = text(2, offset) + document + text(3, 20)
    assert matcher.covered(chunks, ask(query)) == set(range(offset, offset + 70))
    assert len(matcher.segments(ask(query))) == 1


def test_every_occurrence_of_a_repeated_document_is_found(matcher: Matcher) -> None:
    document = text(1, 48)
    chunks = document_chunks(document)
    matcher.add(*chunks)
    query = document + text(2, 5) + document + document
    assert len(matcher.covered(chunks, ask(query))) == 3 * 48


def test_a_run_goes_on_token_by_token_into_the_chunks_around(matcher: Matcher) -> None:
    document = text(1, 64)
    chunks = document_chunks(document)
    matcher.add(*chunks)
    query = text(2, 9) + document[11:41] + text(3, 9)
    # Chunk [16, 32) stands whole; five tokens before it and nine behind it agree too.
    assert matcher.covered(chunks, ask(query)) == set(range(9, 39))


def test_a_last_chunk_too_short_to_be_found_by_itself_is_found_behind_another(matcher: Matcher) -> None:
    document = text(1, 37)
    chunks = document_chunks(document)
    matcher.add(*chunks)
    assert matcher.covered(chunks, ask(text(2, 3) + document)) == set(range(3, 40))
    assert matcher.covered(chunks, ask(text(2, 3) + document[32:] + text(3, 20))) == set()


def test_one_different_token_splits_a_run_and_is_not_covered(matcher: Matcher) -> None:
    document = text(1, 96)
    chunks = document_chunks(document)
    matcher.add(*chunks)
    query = list(document)
    query[40] += 1
    # What is left of that chunk goes with its neighbours.
    assert matcher.covered(chunks, ask(query)) == set(range(96)) - {40}


def test_the_prefix_is_not_covered_twice(matcher: Matcher) -> None:
    document = text(1, 64)
    chunks = document_chunks(document)
    matcher.add(*chunks)
    assert matcher.covered(chunks, ask(document, skip_tokens=37)) == set(range(37, 64))


def test_segments_keep_away_from_opaque_spans(matcher: Matcher) -> None:
    document = text(1, 96)
    chunks = document_chunks(document)
    matcher.add(*chunks)
    span = pb.OpaqueSpan(offset=40, length=4, digest=b"x" * 32)
    request = ask(document, opaque_spans=[span])
    assert matcher.covered(chunks, request) == set(range(40)) | set(range(44, 96))
    assert matcher.reasons(request) == {"OPAQUE_SPAN": 4}


def test_what_is_not_matchable_or_blended_is_never_offered(matcher: Matcher) -> None:
    document = text(1, 48)
    matcher.add(
        *document_chunks(document, "image", matchable=False),
        *document_chunks(document, "blended", domain=pb.DOMAIN_BLENDED),
    )
    assert matcher.reasons(ask(document)) == {"UNKNOWN_TEXT": 48}


def test_case_67_every_way_to_find_nothing_has_its_reason(matcher: Matcher) -> None:
    document = text(1, 48)
    assert matcher.reasons(ask(document)) == {"NOTHING_STORED": 48}
    matcher.add(*document_chunks(document, context_class=pb.CONTEXT_CLASS_IN_PROMPT))
    assert matcher.reasons(ask(document)) == {"CONTEXT_CLASS_NOT_ALLOWED": 48}
    assert matcher.reasons(ask(document, context_classes=EVERY_CLASS)) == {}
    assert matcher.reasons(ask(text(2, 40))) == {"UNKNOWN_TEXT": 40}
    assert matcher.reasons(ask(text(2, 15))) == {"TOO_SHORT": 15}
    assert matcher.reasons(ask(document, space_id=b"t" * 16)) == {"NOTHING_STORED": 48}


def test_a_segment_has_the_worst_class_of_the_chunks_that_it_is_made_of(matcher: Matcher) -> None:
    document = text(1, 64)
    chunks = document_chunks(document)
    worse = document_chunks(document, context_class=pb.CONTEXT_CLASS_IN_PROMPT)
    mixed = [*worse[:2], *chunks[2:]]
    matcher.add(*mixed)
    for skip, context_class in ((0, pb.CONTEXT_CLASS_IN_PROMPT), (32, pb.CONTEXT_CLASS_ALONE)):
        (segment,) = matcher.segments(ask(document, context_classes=EVERY_CLASS, skip_tokens=skip))
        assert segment.context_class == context_class
    # Another store has the same chunks from a better place: what is known of them gets better.
    matcher.add(*chunks, store="b")
    assert matcher.segments(ask(document))[0].context_class == pb.CONTEXT_CLASS_ALONE


def test_case_39_only_what_the_asking_store_can_reach_is_returned(matcher: Matcher) -> None:
    document = text(1, 48)
    here, elsewhere = document_chunks(document, "here"), document_chunks(document, "elsewhere")
    matcher.add(*here, store="a")
    matcher.add(*elsewhere, store="b")
    for store, name in (("a", "here"), ("b", "elsewhere")):
        assert [segment.document for segment in matcher.segments(ask(document, store=store))] == [name]
    assert matcher.reasons(ask(document, store="c")) == {"UNKNOWN_TEXT": 48}
    shared = document_chunks(document, "shared", l2=TIER)
    matcher.add(*shared, store="b", first=4)
    assert matcher.covered(shared, ask(document, store="c", l2_id=TIER)) == set(range(48))
    assert matcher.reasons(ask(document, store="c", l2_id="other")) == {"UNKNOWN_TEXT": 48}


def test_case_39_tenants_with_the_same_text_get_their_own_chunks_only(matcher: Matcher) -> None:
    document = text(1, 48)
    of_tenant = {
        tenant: document_chunks(document, tenant, space=tenant[0].encode() * 16, tenant=tenant)
        for tenant in ("first", "second")
    }
    for number, chunks in enumerate(of_tenant.values()):
        matcher.add(*chunks, first=1 + 3 * number)
    for tenant, chunks in of_tenant.items():
        request = ask(document, space_id=chunks[0].space)
        assert [segment.document for segment in matcher.segments(request)] == [tenant]
        assert matcher.covered(chunks, request) == set(range(48))


def test_case_57_a_newer_epoch_voids_what_the_store_had(matcher: Matcher) -> None:
    document = text(1, 48)
    chunks = document_chunks(document)
    matcher.add(*chunks)
    matcher.add(*chunks[:1], epoch=2)
    assert matcher.reasons(ask(document, epoch=1)) == {"UNKNOWN_TEXT": 48}
    assert matcher.covered(chunks, ask(document, epoch=2)) == set(range(16))
    with pytest.raises(KvblendError) as caught:
        matcher.add(*chunks, epoch=1)
    assert caught.value.reason == "STALE_EPOCH"


def test_case_40_what_is_removed_is_gone_and_a_copy_elsewhere_stays(matcher: Matcher) -> None:
    document = text(1, 32)
    one, two = document_chunks(document, "one"), document_chunks(document, "two")
    matcher.add(*one, *two)
    matcher.publish(Removed(one), first=5)
    assert {segment.document for segment in matcher.segments(ask(document))} == {"two"}
    matcher.publish(Removed(two), first=7)
    answer = matcher.match(ask(document))
    assert (answer.candidates, segments_of(answer)) == (0, [])
    assert matcher.reasons(ask(document)) == {"NOTHING_STORED": 32}
    assert list(matcher.stats.spaces) == []
    matcher.add(*one, first=9)
    assert matcher.covered(one, ask(document)) == set(range(32))


@pytest.mark.parametrize(
    "scope",
    [{}, {"space": b"s" * 16}, {"tenant": "t"}, {"tenant": "t", "document": "doc"}, {"document": "doc"}],
    ids=["all", "space", "tenant", "tenant's document", "document"],
)
def test_case_40_what_is_cleared_has_no_candidates_and_the_rest_is_still_there(
    matcher: Matcher, scope: dict[str, object]
) -> None:
    document, other = text(1, 48), text(2, 48)
    cleared = document_chunks(document, "doc", tenant="t")
    kept = document_chunks(other, "kept", space=b"u" * 16, tenant="u")
    matcher.add(*cleared, *kept)
    matcher.add(*document_chunks(document, "doc", tenant="t"), store="b")
    matcher.publish(Cleared(**scope), first=7)
    assert matcher.segments(ask(document)) == []
    assert matcher.covered(cleared, ask(document, store="b")) == set(range(48))
    assert len(matcher.segments(ask(other, space_id=b"u" * 16))) == (1 if scope else 0)
    matcher.publish(Cleared(**scope), store="b", first=4)
    answer = matcher.match(ask(document, store="b"))
    assert (answer.candidates, answer.verified) == (0, 0)
    assert matcher.stats.refused == matcher.stats.candidates - matcher.stats.verified


def test_a_report_of_absence_does_not_remove_what_was_claimed_again(matcher: Matcher) -> None:
    document = text(1, 16)
    (chunk,) = document_chunks(document, l2=TIER)
    matcher.add(chunk)
    seen = matcher.match(ask(document, l2_id=TIER)).log_position
    matcher.add(chunk, first=2)
    matcher.publish(Removed([chunk], seen=seen), store="b")
    assert matcher.covered([chunk], ask(document, l2_id=TIER)) == set(range(16))
    seen = matcher.match(ask(document, l2_id=TIER)).log_position
    matcher.publish(Removed([chunk], seen=seen), first=2, store="b")
    assert matcher.reasons(ask(document, l2_id=TIER)) == {"NOTHING_STORED": 16}


def test_repeats_and_pages_behind_a_gap_change_nothing(matcher: Matcher) -> None:
    chunks = document_chunks(text(1, 64))
    assert matcher.add(*chunks[:2]).durable_sequence == 2
    assert matcher.add(*chunks[:2]).durable_sequence == 2
    # Overlaps, and leaves something out.
    assert matcher.add(*chunks[:3]).durable_sequence == 2
    assert matcher.add(chunks[3], first=4).durable_sequence == 2
    assert matcher.add(chunks[0], store="new", first=5).durable_sequence == 0
    assert matcher.covered(chunks[:2], ask(text(1, 64))) == set(range(32))
    assert matcher.add(*chunks, first=100, reset=True).durable_sequence == 103
    assert matcher.covered(chunks, ask(text(1, 64))) == set(range(64))
    assert [(p.store, p.epoch, p.sequence) for p in matcher.stats.applied] == [("a", 1, 103)]


def test_neighbours_find_each_other_whichever_comes_first(matcher: Matcher) -> None:
    document = text(1, 5 * CHUNK)
    chunks = document_chunks(document)
    sequence = 1
    for order in ([4, 2, 0, 3, 1], [1, 0, 2, 4, 3]):
        matcher.add(*(chunks[number] for number in order), first=sequence)
        assert len(matcher.segments(ask(document))) == 1
        # The middle one goes and comes back.
        matcher.publish(Removed(chunks[2:3]), first=sequence + 5)
        assert len(matcher.segments(ask(document))) == 2
        matcher.add(chunks[2], first=sequence + 6)
        assert len(matcher.segments(ask(document))) == 1
        matcher.publish(Cleared(), first=sequence + 7)
        sequence += 8
