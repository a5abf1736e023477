"""Lookups in one process: what answers what, what adds up, and who never answers whom."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from store_kit import CHUNK, OTHER_SESSION, SESSION, FakeMatcher, LocalStore, Segment, Waiting, model_space, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, store_pb2
from services.common.errors import KvblendError
from services.common.identity import chain_chunks, chain_start, context_hash
from services.common.tokens import encode_u32
from services.store.lookup.query import make_query
from services.store.spaces import ResolvedSpace

PRESENT, GRANTED, DECLINED = (
    store_pb2.CHUNK_OUTCOME_PRESENT,
    store_pb2.CHUNK_OUTCOME_GRANTED,
    store_pb2.CHUNK_OUTCOME_DECLINED,
)


@pytest.fixture
def store(shm_dir: Path) -> Iterator[LocalStore]:
    store = LocalStore(shm_dir)
    yield store
    store.close()


def segment_of(space: ResolvedSpace, document: list[int], at: int, context: Sequence[int] = ()) -> Segment:
    """What a matcher would say of a document that was stored whole and occurs at `at`."""
    before = context_hash(space.root, np.array(context, np.uint32), CHUNK)
    chunks = chain_chunks(chain_start(space.root, before), np.array(document, np.uint32), CHUNK)
    return Segment(
        query_position=at,
        stored_position=len(context),
        length=len(document),
        domain=pb.DOMAIN_SEGMENT,
        context_class=pb.CONTEXT_CLASS_SHARED_PREFIX if context else pb.CONTEXT_CLASS_ALONE,
        chain_hashes=b"".join(chunk.chain_hash for chunk in chunks),
        chunk_lengths=encode_u32([chunk.tokens for chunk in chunks]),
    )


def test_a_stored_prompt_is_the_prefix_of_its_continuation(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, 3 * CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, prompt + text(2, 10))
    assert found.prefix == 3 * CHUNK
    assert len(found.objects) == 3
    assert found.summary.l1_chunks == 3


def test_the_last_token_is_always_computed(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, 2 * CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, prompt)
    assert found.prefix == 2 * CHUNK - 1
    assert found.summary.prefix_lengths == encode_u32([CHUNK, CHUNK - 1])
    assert found.reasons() == {pb.REASON_LAST_TOKEN: 1}
    assert store.lookup(space, prompt[:1], request="one").prefix == 0


def test_case_20_both_chunks_of_a_prompt_of_exactly_two_are_stored(store: LocalStore) -> None:
    granted = store.put(store.space(), text(1, 2 * CHUNK))
    assert granted.outcomes() == [GRANTED, GRANTED]


def test_a_partial_chunk_continues_the_chain(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK + 5)
    store.put(space, prompt)
    assert store.lookup(space, prompt + text(2, 40)).prefix == CHUNK + 5


def test_prompts_that_part_inside_a_chunk_share_its_beginning(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, 2 * CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, prompt[: CHUNK + 7] + text(2, 30))
    assert found.prefix == CHUNK + 7
    assert found.summary.prefix_lengths == encode_u32([CHUNK, 7])


@pytest.mark.parametrize("other", ["tenant", "adapter", "epoch", "salt"])
def test_case_43_44_other_identities_never_answer(store: LocalStore, other: str) -> None:
    prompt = text(1, 2 * CHUNK)
    identity, _ = store.parts.spaces.register(model_space())
    later, _ = store.parts.spaces.register(model_space(epoch=1))
    space = store.parts.spaces.resolve(pb.Space(model_space_id=identity), "a")
    stranger = {
        "tenant": store.parts.spaces.resolve(pb.Space(model_space_id=identity), "b"),
        "adapter": store.parts.spaces.resolve(pb.Space(model_space_id=identity, adapter_digest=bytes(32)), "a"),
        "epoch": store.parts.spaces.resolve(pb.Space(model_space_id=later), "a"),
        "salt": store.parts.spaces.resolve(pb.Space(model_space_id=identity, cache_salt=b"x"), "a"),
    }[other]
    store.put(space, prompt)
    store.put(space, prompt, document="d")
    found = store.lookup(stranger, prompt)
    assert found.prefix == 0
    assert found.objects == []
    assert set(found.reasons()) == {pb.REASON_NOTHING_STORED, pb.REASON_LAST_TOKEN}
    assert store.lookup(space, prompt, request="own").prefix == 2 * CHUNK - 1


def test_a_document_stored_alone_is_no_exact_prefix_behind_a_context(store: LocalStore) -> None:
    space, document, bos = store.space(), text(1, 2 * CHUNK), [7]
    store.put(space, document, document="alone")
    store.put(space, document, document="behind", context=bos)
    assert store.lookup(space, document).prefix == 0
    assert store.lookup(space, bos + document, request="bos").prefix == 0
    assert len(store.state.catalog) == 4


def test_segments_are_served_only_as_far_as_their_chunks_are_here(shm_dir: Path) -> None:
    matcher = FakeMatcher()
    store = LocalStore(shm_dir, matcher=matcher)
    space, document = store.space(), text(1, 3 * CHUNK)
    granted = store.put(space, document, document="d")
    query = text(2, 8) + document + text(3, 9)
    matcher.segments = [segment_of(space, document, 8)]
    found = store.lookup(space, query, want_segments=True)
    assert [(item.query_position, item.length) for item in found.segments] == [(8, 3 * CHUNK)]
    middle = next(chunk for chunk in store.state.catalog if chunk.key.chain_hash == granted.chunks[1].chain_hash)
    with store.state.lock:
        store.state.remove(middle, pb.REASON_EVICTED)
    before = len(store.outbox.changes)
    found = store.lookup(space, query, request="again", want_segments=True)
    assert [(item.query_position, item.stored_position, item.length) for item in found.segments] == [
        (8, 0, CHUNK),
        (8 + 2 * CHUNK, 2 * CHUNK, CHUNK),
    ]
    assert found.reasons()[pb.REASON_EVICTED] == CHUNK
    assert [change.key.chain_hash for change in store.outbox.changes[before:]] == [granted.chunks[1].chain_hash]
    store.close()


def test_a_matcher_that_claims_other_tokens_is_not_believed(shm_dir: Path) -> None:
    matcher = FakeMatcher()
    store = LocalStore(shm_dir, matcher=matcher)
    space, document = store.space(), text(1, 2 * CHUNK)
    store.put(space, document, document="d")
    other = [*document[:20], document[20] + 1, *document[21:]]
    matcher.segments = [segment_of(space, document, 0)]
    found = store.lookup(space, [*other, 1, 2], want_segments=True)
    assert found.segment_tokens == CHUNK
    assert store.state.stats.get("false_claims") == 1
    store.close()


def test_a_matcher_that_claims_text_where_an_image_is_is_not_believed(shm_dir: Path) -> None:
    """The tokens that stand for an image are the same for every image."""
    matcher = FakeMatcher()
    store = LocalStore(shm_dir, matcher=matcher)
    space, document = store.space(), text(1, 3 * CHUNK)
    store.put(space, document, document="d")
    matcher.segments = [segment_of(space, document, 2)]
    # From the first chunk's last token to the second one's first but one.
    span = pb.OpaqueSpan(offset=2 + CHUNK - 1, length=3, digest=bytes(32))
    found = store.lookup(space, [8, 9, *document, 1], want_segments=True, spans=[span])
    assert [(item.query_position, item.length) for item in found.segments] == [(2 + 2 * CHUNK, CHUNK)]
    assert found.reasons()[pb.REASON_OPAQUE_SPAN] == 2 * CHUNK
    store.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        {"chain_hashes": b"short"},
        {"query_position": 10_000},
        {"chunk_lengths": b"odd"},
        {"length": 3},
        {"domain": pb.DOMAIN_BLENDED},
    ],
)
def test_nonsense_from_a_matcher_is_ignored(shm_dir: Path, nonsense: dict[str, object]) -> None:
    matcher = FakeMatcher()
    store = LocalStore(shm_dir, matcher=matcher)
    space, document = store.space(), text(1, 2 * CHUNK)
    store.put(space, document, document="d")
    segment = segment_of(space, document, 0)
    for name, value in nonsense.items():
        setattr(segment, name, value)
    matcher.segments = [segment]
    assert store.lookup(space, [*document, 1], want_segments=True).segment_tokens == 0
    store.close()


def test_a_lookup_asks_for_all_that_the_log_has_of_this_store(shm_dir: Path) -> None:
    matcher = FakeMatcher()
    store = LocalStore(shm_dir, matcher=matcher)
    space = store.space()
    store.lookup(space, text(1, 9), want_segments=True)
    assert not matcher.requests[0].at_least, "there is nothing to wait for"
    store.put(space, text(1, 2 * CHUNK))
    other = pb.StreamPosition(store="other", epoch=7, sequence=5)
    own = pb.StreamPosition(store="test", epoch=1, sequence=2)
    ahead = pb.StreamPosition(store="test", epoch=1, sequence=9)
    store.lookup(space, text(2, 9), request="b", want_segments=True, at_least=[ahead, other])
    assert list(matcher.requests[1].at_least) == [other, own], "of its own no more than the log has"
    store.close()


def test_case_38_a_matcher_that_lags_is_asked_again_for_what_it_knows(shm_dir: Path) -> None:
    matcher = FakeMatcher(behind=KvblendError("NOT_CAUGHT_UP", "the log is away"))
    store = LocalStore(shm_dir, matcher=matcher)
    space, document = store.space(), text(1, 2 * CHUNK)
    store.put(space, document, document="d")
    matcher.segments = [segment_of(space, document, 3)]
    assert store.lookup(space, [*text(2, 3), *document, 1], want_segments=True).segment_tokens == 2 * CHUNK
    assert [bool(request.at_least) for request in matcher.requests] == [True, False]
    assert matcher.requests[0].tokens == matcher.requests[1].tokens
    store.close()


def test_a_question_that_is_refused_is_not_asked_again(shm_dir: Path) -> None:
    matcher = FakeMatcher(behind=KvblendError("INVALID_TOKENS", "no"))
    store = LocalStore(shm_dir, matcher=matcher)
    store.put(store.space(), text(1, CHUNK))
    found = store.lookup(store.space(), text(2, 9), want_segments=True)
    assert found.reasons()[pb.REASON_MATCHER_UNAVAILABLE] == 8
    assert len(matcher.requests) == 1
    store.close()


def test_context_classes_are_the_requests_choice(shm_dir: Path) -> None:
    matcher = FakeMatcher()
    store = LocalStore(shm_dir, matcher=matcher)
    space, document, head = store.space(), text(1, CHUNK), text(5, 4)
    store.put(space, document, document="d", context=head)
    matcher.segments = [segment_of(space, document, 3, head)]
    query = [*text(2, 3), *document, 9]
    allowed = store.lookup(space, query, want_segments=True)
    assert (allowed.segment_tokens, allowed.segments[0].stored_position) == (CHUNK, 4)
    alone = store.lookup(space, query, request="alone", want_segments=True, classes=[pb.CONTEXT_CLASS_ALONE])
    assert alone.reasons()[pb.REASON_CONTEXT_CLASS_NOT_ALLOWED] == CHUNK
    store.close()


def test_case_67_every_way_to_get_nothing_has_a_reason(shm_dir: Path) -> None:
    matcher = FakeMatcher()
    store = LocalStore(shm_dir, matcher=matcher)
    space, prompt = store.space(), text(1, 40)

    def reason(**options: object) -> set[int]:
        found = store.lookup(space, prompt, request=str(options), **options)  # type: ignore[arg-type]
        return set(found.reasons()) - {pb.REASON_LAST_TOKEN}

    assert reason(want_segments=True) == {pb.REASON_NOTHING_STORED}
    store.put(space, text(9, CHUNK))
    assert reason() == {pb.REASON_BLENDING_OFF}
    matcher.error = KvblendError("MATCHER_UNAVAILABLE", "down")
    assert reason(want_segments=True, attempt=2) == {pb.REASON_MATCHER_UNAVAILABLE}
    space = store.space(model_space(style=pb.ROPE_STYLE_NOT_RELATIVE))
    store.put(space, text(9, CHUNK))
    assert reason(want_segments=True, attempt=3) == {pb.REASON_PREFIX_ONLY_SPACE}
    store.close()


def test_the_prefix_is_served_while_the_matcher_is_down(shm_dir: Path) -> None:
    matcher = FakeMatcher(error=KvblendError("MATCHER_UNAVAILABLE", "down"))
    store = LocalStore(shm_dir, matcher=matcher)
    space, prompt = store.space(), text(1, 2 * CHUNK)
    store.put(space, prompt)
    found = store.lookup(space, prompt + text(2, 9), want_segments=True)
    assert found.prefix == 2 * CHUNK
    assert found.reasons() == {pb.REASON_MATCHER_UNAVAILABLE: 8, pb.REASON_LAST_TOKEN: 1}
    store.close()


def test_blended_chunks_answer_only_who_accepts_them(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, 3 * CHUNK)
    granted = store.put(space, prompt, exact=CHUNK + 3)
    assert [chunk.domain for chunk in granted.chunks] == [pb.DOMAIN_EXACT, pb.DOMAIN_BLENDED, pb.DOMAIN_BLENDED]
    query = prompt + text(2, 5)
    assert store.lookup(space, query).prefix == CHUNK
    blended = store.lookup(space, query, request="blend", accept_blended=True)
    assert (blended.prefix, blended.summary.blended_tokens) == (3 * CHUNK, 2 * CHUNK)
    store.put(space, prompt)
    assert store.lookup(space, query, request="exact", accept_blended=True).summary.blended_tokens == 0
    assert store.put(space, prompt, exact=0).outcomes() == [PRESENT] * 3


def test_blended_chunks_are_stored_only_where_allowed(store: LocalStore) -> None:
    granted = store.reserve(store.space(), text(1, 2 * CHUNK), exact=CHUNK, allow_blended=False)
    assert granted.outcomes() == [GRANTED, DECLINED]
    assert granted.reasons()[1] == pb.REASON_BLENDED_NOT_ALLOWED


def test_case_34_known_text_in_a_new_order_is_kept_only_when_it_returns(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, 2 * CHUNK)
    once = store.reserve(space, prompt, exact=0, segment_tokens=[CHUNK, 3])
    assert once.reasons() == [pb.REASON_ADMISSION, 0]
    store.writes.abort(SESSION, once.number)
    assert store.reserve(space, prompt, exact=0, segment_tokens=[CHUNK, 3]).outcomes() == [GRANTED, GRANTED]


def test_a_chunk_counts_only_with_every_rank_and_group(shm_dir: Path) -> None:
    store = LocalStore(shm_dir)
    space, prompt = store.space(model_space(parallel=2, groups=2)), text(1, CHUNK)
    first = store.reserve(space, prompt, rank=0)
    store.write(first)
    store.commit(first)
    half = store.lookup(space, [*prompt, 1])
    assert (half.prefix, half.reasons()[pb.REASON_INCOMPLETE_RANKS]) == (0, CHUNK)
    assert not store.outbox.changes
    second = store.reserve(space, prompt, rank=1)
    store.write(second)
    store.commit(second)
    assert len(store.outbox.changes) == 1
    for rank in (0, 1):
        session = (SESSION, OTHER_SESSION)[rank]
        found = store.lookup(space, [*prompt, 1], request="r2", rank=rank, session=session)
        assert (found.prefix, len(found.objects)) == (CHUNK, 2)
    store.close()


def test_ranks_never_mix_kv_of_different_positions(shm_dir: Path) -> None:
    store = LocalStore(shm_dir)
    space, document = store.space(model_space(parallel=2)), text(1, CHUNK)
    near = store.reserve(space, document, document="d", rank=0, first_position=0)
    far = store.reserve(space, document, document="d", rank=1, first_position=100)
    for granted in (near, far):
        store.write(granted)
    assert store.commit(near) == [0]
    assert store.commit(far) == [pb.REASON_SUPERSEDED]
    again = store.reserve(space, document, document="d", rank=1, first_position=0)
    assert again.outcomes() == [GRANTED]
    store.close()


def test_case_50_ranks_read_one_answer(shm_dir: Path) -> None:
    store = LocalStore(shm_dir)
    space, prompt = store.space(model_space(parallel=2)), text(1, 3 * CHUNK)
    store.put(space, prompt[: 2 * CHUNK])
    first = store.lookup(space, prompt, rank=0)
    store.put(space, prompt)
    second = store.lookup(space, prompt, rank=1, session=OTHER_SESSION)
    assert second.summary == first.summary
    assert store.lookup(space, prompt, rank=1, session=OTHER_SESSION, attempt=2).prefix == 3 * CHUNK - 1
    store.close()


def test_other_tokens_or_a_newer_attempt_supersede(store: LocalStore) -> None:
    space, one, two = store.space(), text(1, CHUNK), text(2, CHUNK)
    store.put(space, one)
    store.put(space, two)
    store.lookup(space, [*one, 1])
    assert store.state.leases.held_count == 1
    store.lookup(space, [*two, 1])
    assert store.state.leases.held_count == 1
    store.lookup(space, [*two, 1], attempt=3)
    assert store.state.leases.held_count == 1
    with pytest.raises(KvblendError, match="SUPERSEDED"):
        store.lookup(space, [*two, 1], attempt=2)


def test_a_lookup_that_comes_after_its_end_takes_nothing(store: LocalStore) -> None:
    """Its caller gave it up and ended the request; the end came first."""

    class Gone(Waiting):
        def gone(self) -> bool:
            return True

    space, prompt = store.space(), text(1, CHUNK + 1)
    store.put(space, prompt[:CHUNK])
    store.lookups.end_request(SESSION, "r")
    with pytest.raises(KvblendError, match="SUPERSEDED"):
        store.lookup(space, prompt, request="r", caller=Gone())
    assert store.state.leases.held_count == 0
    assert store.lookup(space, prompt, request="r").prefix == CHUNK


def test_opaque_spans_are_part_of_the_identity(store: LocalStore) -> None:
    space, prompt = store.space(), text(1, CHUNK)
    span = pb.OpaqueSpan(offset=2, length=4, digest=bytes(32))
    plain = store_pb2.LookupRequest(tokens=encode_u32(prompt))
    image = store_pb2.LookupRequest(tokens=encode_u32(prompt), opaque_spans=[span])
    assert make_query(plain, space).chain[0].chain_hash != make_query(image, space).chain[0].chain_hash
    assert make_query(plain, space).digest != make_query(image, space).digest


def test_case_56_counters_add_up_on_a_known_trace(store: LocalStore) -> None:
    space = store.space()
    prompts = [text(seed, 4 * CHUNK + 1) for seed in range(10)]
    for prompt in prompts[:6]:
        store.put(space, prompt[: 4 * CHUNK])
    found = [store.lookup(space, prompt, request=str(number)) for number, prompt in enumerate(prompts)]
    assert sum(item.summary.l1_chunks for item in found) == 24
    assert store.state.stats.get("lookups") == 10
    assert store.state.stats.get("requested_tokens") == 10 * (4 * CHUNK + 1)
    assert store.state.stats.get("prefix_hit_tokens") == 24 * CHUNK


def test_a_block_that_is_taken_from_an_answer_in_the_making_is_not_given_out_as_the_old_text(shm_dir: Path) -> None:
    """While a matcher is asked, the prefix's chunk leaves and its very block takes the text that the matcher names."""
    matcher = FakeMatcher()
    store = LocalStore(shm_dir, pages=256, matcher=matcher)
    space, prompt, document = store.space(), text(1, CHUNK), text(2, CHUNK)
    block = store.put(space, prompt).places()[0][1]
    answer = matcher.match

    def replaced(request: matcher_pb2.MatchRequest, timeout: float) -> matcher_pb2.MatchResponse:
        with store.state.lock:
            (chunk,) = store.state.catalog
            store.state.remove(chunk, pb.REASON_CLEARED)
        stored = store.put(space, document, document="d")
        assert stored.places()[0][1].header == block.header
        hashes = stored.chunks[0].chain_hash
        matcher.segments = [Segment(CHUNK, 0, CHUNK, chain_hashes=hashes, chunk_lengths=CHUNK.to_bytes(4, "little"))]
        return answer(request, timeout)

    matcher.match = replaced  # type: ignore[method-assign]
    found = store.lookup(space, [*prompt, *document, 1], want_segments=True)
    assert [item.domain for item in found.objects] == [pb.DOMAIN_SEGMENT], "the prompt's chunk is there no more"
    assert store.begin(found, found.objects[0]) == 0
    store.close()


def test_what_has_left_before_its_use_is_counted_is_not_used(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, prompt = store.space(), text(1, 2 * CHUNK)
    store.put(space, prompt)
    gone, stays = store.state.catalog
    with store.state.lock:
        store.state.remove(gone, pb.REASON_CLEARED)
    told: list[object] = []
    monkeypatch.setattr(store.state.policy, "used", lambda chunks, _now: told.extend(chunks))
    with store.state.lock:
        store.state.touch([gone, stays])
    assert told == [stays]


def test_questions_differ_wherever_their_tokens_end(store: LocalStore) -> None:
    """The same bytes, once as a span and once as tokens."""
    space = store.space()
    spans = [pb.OpaqueSpan(offset=offset, length=128, digest=bytes(32)) for offset in (128, 256)]
    tokens, more = encode_u32(range(400)), spans[0].SerializeToString(deterministic=True)
    assert len(more) % 4 == 0
    one = make_query(store_pb2.LookupRequest(tokens=tokens, opaque_spans=spans), space)
    other = make_query(store_pb2.LookupRequest(tokens=tokens + more, opaque_spans=spans[1:]), space)
    assert one.digest != other.digest
