"""The verbs of the service: deadlines, malformed requests, scores, and counters that add up."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from history import history_of
from matcher_kit import (
    CHUNK,
    EVERY_CLASS,
    SPACE,
    TIER,
    Added,
    Chunk,
    Cleared,
    Removed,
    ask,
    check_answer,
    document_chunks,
    page,
    segments_of,
    text,
    token_bytes,
)
from matcher_service_kit import CONTEXT, Matcher, running, service_of

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.errors import ERRORS, KvblendError
from services.matcher import service as service_module


@pytest.fixture
def matcher() -> Iterator[Matcher]:
    with running() as started:
        yield started


def test_at_least_waits_and_then_says_that_it_is_behind(matcher: Matcher) -> None:
    matcher.add(*document_chunks(text(1, 16)))
    matcher.settle()
    short: Any = SimpleNamespace(time_remaining=lambda: 0.05)
    for behind in (
        pb.StreamPosition(store="a", epoch=1, sequence=2),
        pb.StreamPosition(store="a", epoch=2, sequence=1),
        pb.StreamPosition(store="unknown", epoch=1, sequence=1),
    ):
        with pytest.raises(KvblendError) as caught:
            matcher.service.Match(ask(text(1, 16), at_least=[behind]), short)
        assert caught.value.reason == "NOT_CAUGHT_UP"
    reached = pb.StreamPosition(store="a", epoch=1, sequence=1)
    assert matcher.service.Match(ask(text(1, 16), at_least=[reached]), short).segments.lengths


def test_a_late_answer_says_how_far_it_got(matcher: Matcher) -> None:
    matcher.add(*document_chunks(text(1, 16)))
    none_left: Any = SimpleNamespace(time_remaining=lambda: 0.0)
    answer = matcher.match(ask(text(1, 16)), none_left)
    assert answer.scanned_tokens == 0
    assert [s.reason for s in answer.shortfalls] == [pb.REASON_DEADLINE]


def test_an_answer_that_ends_early_is_true_up_to_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is looked at between stretches of 65,536 positions."""
    document = text(1, 700)
    chunks = document_chunks(document, chunk_tokens=256)
    history = history_of(*chunks)
    query = [*document, *(7_000_000 + n for n in range(80_000)), *document, *document]
    looks = iter([False])
    monkeypatch.setattr(service_module, "_is_late", lambda deadline: lambda: next(looks, True))
    request = history.ask(query)
    answer = history.match(request)
    assert check_answer(request, answer, chunks) == set(range(700))
    assert answer.scanned_tokens == 1 << 16
    late = {s.reason: s.tokens for s in answer.shortfalls}
    assert late == {pb.REASON_DEADLINE: len(query) - (1 << 16), pb.REASON_UNKNOWN_TEXT: (1 << 16) - 700}


def test_scores_tell_what_each_store_could_serve(matcher: Matcher) -> None:
    prompt = text(1, 64)
    exact = document_chunks(prompt, domain=pb.DOMAIN_EXACT, context_class=pb.CONTEXT_CLASS_IN_PROMPT)
    segments = document_chunks(prompt[32:], "segment")
    matcher.add(*exact[:2], store="a")
    matcher.add(*segments, store="b")
    matcher.add(*document_chunks(prompt[:48], "segment", l2=TIER), store="b", first=3)
    matcher.add(*document_chunks(text(2, 64)), store="c")
    matcher.settle()
    request = matcher_pb2.ScoreRequest(
        space_id=SPACE,
        tokens=token_bytes(prompt),
        chain_hashes=b"".join(chunk.chain_hash for chunk in exact),
        chunk_tokens=CHUNK,
    )

    def scores() -> set[tuple[str, str, int, int]]:
        answer = matcher.service.Score(request, CONTEXT)
        return {(s.store, s.l2_id, s.prefix_tokens, s.anywhere_tokens) for s in answer.stores}

    assert scores() == {("a", "", 32, 32), ("b", "", 0, 32), ("", TIER, 0, 48)}
    # A store that has lost the first chunk has no prefix any more, however much is behind it.
    matcher.publish(Removed(exact[:1]), store="a", first=3)
    matcher.add(*segments[:1], store="a", epoch=2)
    matcher.settle()
    assert scores() == {("a", "", 0, 16), ("b", "", 0, 32), ("", TIER, 0, 48)}
    request.context_classes.extend(EVERY_CLASS)
    matcher.add(*exact, store="d")
    matcher.settle()
    assert ("d", "", 64, 64) in scores()
    request.space_id = b"t" * 16
    assert scores() == set()


BAD_QUERIES = {
    "no tokens": (ask([]), "EMPTY_PROMPT"),
    "half a token": (matcher_pb2.MatchRequest(space_id=SPACE, tokens=b"12345"), "INVALID_TOKENS"),
    "space": (ask(range(20), space_id=b"short"), "INVALID_ARGUMENT"),
    "skip": (ask(range(20), skip_tokens=21), "INVALID_ARGUMENT"),
    "span": (ask(range(20), opaque_spans=[pb.OpaqueSpan(offset=19, length=5, digest=b"x" * 32)]), "INVALID_ARGUMENT"),
    "no class": (ask(range(20), context_classes=[0]), "INVALID_ARGUMENT"),
    "unknown class": (ask(range(20), context_classes=[1, 65]), "INVALID_ARGUMENT"),
    "negative class": (ask(range(20), context_classes=[-1]), "INVALID_ARGUMENT"),
}


@pytest.mark.parametrize("name", BAD_QUERIES)
def test_bad_queries_are_typed_errors(name: str) -> None:
    request, reason = BAD_QUERIES[name]
    service = service_of(history_of(*document_chunks(text(1, 32))).fold)
    with pytest.raises(KvblendError) as caught:
        service.Match(request, CONTEXT)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_tokens": 17},
        {"chain_hashes": b"x"},
        {"space_id": b""},
        {"tokens": b""},
        {"tokens": b"123"},
        {"context_classes": [77]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_bad_score_requests_are_typed_errors(changes: dict[str, Any]) -> None:
    service = service_of(history_of(*document_chunks(text(1, 32))).fold)
    fields = {"space_id": SPACE, "tokens": token_bytes(text(1, 32)), "chunk_tokens": CHUNK} | changes
    with pytest.raises(KvblendError) as caught:
        service.Score(matcher_pb2.ScoreRequest(**fields), CONTEXT)
    assert ERRORS[caught.value.reason].code == grpc.StatusCode.INVALID_ARGUMENT


Spoil = Callable[[matcher_pb2.ChunksAdded], None]


def set_field(name: str, value: Any) -> Spoil:
    return lambda added: setattr(added, name, value)


BAD_ADDITIONS: dict[str, Spoil] = {
    "space": set_field("space_id", b"short"),
    "no owner": lambda added: added.ClearField("owner"),
    "unknown owner": lambda added: setattr(added.owner, "kind", 9),
    "nameless tier": lambda added: setattr(added.owner, "kind", matcher_pb2.OWNER_KIND_L2),
    "long tier": lambda added: added.owner.MergeFrom(matcher_pb2.Owner(kind=2, l2_id="x" * 257)),
    "chunk size 0": set_field("chunk_tokens", 0),
    "chunk size 24": set_field("chunk_tokens", 24),
    "chunk size 2048": set_field("chunk_tokens", 2048),
    "no domain": set_field("domain", 0),
    "unknown domain": set_field("domain", 300),
    "negative domain": set_field("domain", -2),
    "no class": set_field("context_class", 0),
    "unknown class": set_field("context_class", 65),
    "class of two bytes": set_field("context_class", 257),
    "long document": set_field("document", "x" * 257),
    "long tenant": set_field("tenant", "x" * 257),
    "half a hash": set_field("chain_hashes", b"x" * 40),
    "half a previous hash": set_field("previous_hashes", b"x" * 63),
    "fewer hashes": set_field("chain_hashes", b"x" * 32),
    "fewer previous hashes": set_field("previous_hashes", b"x" * 32),
    "fewer positions": set_field("stored_positions", token_bytes([0])),
    "fewer lengths": set_field("lengths", token_bytes([16])),
    "half a length": set_field("lengths", b"x" * 7),
    "length 0": set_field("lengths", token_bytes([16, 0])),
    "too long": set_field("lengths", token_bytes([17, 15])),
    "huge length": set_field("lengths", token_bytes([16, 0xFFFF_FFFF])),
    "huge position": set_field("stored_positions", token_bytes([0, 1 << 31])),
    "fewer tokens": set_field("tokens", token_bytes(range(31))),
    "more tokens": set_field("tokens", token_bytes(range(33))),
    "half a token": set_field("tokens", b"x" * 127),
    "no tokens": set_field("tokens", b""),
}


def refused(matcher: Matcher, request: matcher_pb2.PublishRequest) -> None:
    """With INVALID_ARGUMENT, and nothing of it is in the log."""
    before = matcher.replica.log.end(10.0)
    with pytest.raises(KvblendError) as caught:
        matcher.service.Publish(request, CONTEXT)
    assert ERRORS[caught.value.reason].code == grpc.StatusCode.INVALID_ARGUMENT
    assert matcher.replica.log.end(10.0) == before


def test_a_page_with_a_malformed_addition_changes_nothing(matcher: Matcher) -> None:
    good = document_chunks(text(1, 32))
    for spoil in BAD_ADDITIONS.values():
        request = page([Added(good), Added(document_chunks(text(2, 32)))])
        spoil(request.batches[1].added)
        refused(matcher, request)
    assert matcher.reasons(ask(text(1, 32))) == {"NOTHING_STORED": 32}
    matcher.add(*good)
    assert matcher.covered(good, ask(text(1, 32))) == set(range(32))


def test_a_page_with_a_malformed_removal_or_scope_changes_nothing(matcher: Matcher) -> None:
    good = document_chunks(text(1, 32))
    spoils: list[Callable[[matcher_pb2.PublishRequest], Any]] = [
        lambda request: setattr(request.batches[1].removed, "space_id", b""),
        lambda request: setattr(request.batches[1].removed, "domain", 0),
        lambda request: setattr(request.batches[1].removed, "domain", 99),
        lambda request: setattr(request.batches[1].removed, "chain_hashes", b"x" * 31),
        lambda request: request.batches[1].removed.ClearField("owner"),
        lambda request: setattr(request.batches[2].cleared, "space_id", b"short"),
        lambda request: request.batches[2].cleared.ClearField("owner"),
        lambda request: request.batches.add(),
        lambda request: setattr(request, "store", ""),
        lambda request: setattr(request, "store", "x" * 257),
        lambda request: setattr(request, "epoch", 0),
        lambda request: setattr(request, "first_sequence", 0),
        lambda request: request.MergeFrom(matcher_pb2.PublishRequest(first_sequence=(1 << 64) - 2, reset=True)),
    ]
    for spoil in spoils:
        request = page([Added(good), Removed(good[:1]), Cleared()])
        spoil(request)
        refused(matcher, request)
    # The follower lives on.
    matcher.add(*good)
    assert matcher.covered(good, ask(text(1, 32))) == set(range(32))


def test_the_largest_numbers_that_a_page_may_have_are_no_trouble(matcher: Matcher) -> None:
    (chunk,) = document_chunks(text(1, 16), l2=TIER)
    chunk = replace(chunk, stored_position=(1 << 31) - 1)
    matcher.add(chunk, epoch=(1 << 64) - 1)
    (segment,) = matcher.segments(ask(text(1, 16), epoch=(1 << 64) - 1, l2_id=TIER))
    assert segment.stored_position == (1 << 31) - 1
    matcher.publish(Removed([chunk], seen=(1 << 64) - 1), epoch=(1 << 64) - 1, first=2)
    assert matcher.reasons(ask(text(1, 16), l2_id=TIER)) == {"NOTHING_STORED": 16}
    assert matcher.stats.applied[0].epoch == (1 << 64) - 1


def test_an_empty_page_asks_for_the_position_only(matcher: Matcher) -> None:
    assert matcher.publish().durable_sequence == 0
    matcher.add(*document_chunks(text(1, 64)))
    assert matcher.publish(first=77).durable_sequence == 4
    assert matcher.publish(store="other").durable_sequence == 0
    assert matcher.publish().log_position == 1


def test_case_56_counters_add_up(matcher: Matcher) -> None:
    """What a known series of queries looks like in the statistics."""
    document = text(1, 64)
    chunks = document_chunks(document)
    matcher.add(*chunks)
    matcher.settle()
    spaces = {(s.space_id, s.chunks, s.tokens) for s in matcher.stats.spaces}
    candidates = verified = 0
    for number in range(10):
        answer = matcher.match(ask(text(2, 10) + document[: 16 * (number % 4)] + text(3, 10)))
        candidates += answer.candidates
        verified += answer.verified
        assert answer.verified == number % 4
    stats = matcher.stats
    assert (stats.matches, stats.candidates, stats.verified) == (10, candidates, verified)
    assert stats.verified == sum(number % 4 for number in range(10))
    assert stats.refused == candidates - verified
    assert spaces == {(SPACE, 4, 64)}
    assert 0 < stats.table_bytes < stats.memory_limit_bytes
    assert len(stats.state_digest) == 16
    assert (stats.log.kind, stats.log.applied_position, stats.log.end_position) == ("memory", 1, 1)
    plain = matcher.service.GetMatcherStats(matcher_pb2.GetMatcherStatsRequest(), CONTEXT)
    assert plain.state_digest == b""


def test_an_answer_tells_up_to_where_it_knows(matcher: Matcher) -> None:
    chunks: list[Chunk] = document_chunks(text(1, 64))
    for number, chunk in enumerate(chunks, 1):
        matcher.add(chunk, first=number)
        answer = matcher.match(ask(text(1, 64)))
        assert answer.log_position == number
        assert answer.scanned_tokens == 64
    assert len(segments_of(answer)) == 1
