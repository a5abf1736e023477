"""What a lookup of text that is all in the arena costs: counted in calls, never in time."""

import cProfile
import pstats
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from store_kit import CHUNK, SESSION, FakeMatcher, LocalStore, Segment, Waiting, text

from kvblend.v1 import store_pb2
from services.common.tokens import encode_u32
from services.store.leasing.leases import HolderKey
from services.store.lookup.query import make_query

SMALL, LARGE = 32, 128


@pytest.fixture
def matcher() -> FakeMatcher:
    return FakeMatcher()


@pytest.fixture
def store(shm_dir: Path, matcher: FakeMatcher) -> Iterator[LocalStore]:
    store = LocalStore(shm_dir, pages=1024, matcher=matcher)
    yield store
    store.close()


def calls(work: Callable[[], object]) -> int:
    """Python and C functions called meanwhile."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def shuffled(store: LocalStore, matcher: FakeMatcher, chunks: int) -> list[int]:
    """A prompt of so many documents, each a segment of its own."""
    space = store.space()
    prompt = text(7, 3)
    matcher.segments = []
    for seed in range(chunks):
        document = text(1000 + seed, CHUNK)
        granted = store.put(space, document, document=f"d{seed}")
        name = granted.chunks[0].chain_hash
        matcher.segments.append(
            Segment(len(prompt), 0, CHUNK, chain_hashes=name, chunk_lengths=encode_u32([CHUNK]), document=f"d{seed}")
        )
        prompt += document
    return [*prompt, 1]


def prefix(store: LocalStore, matcher: FakeMatcher, chunks: int) -> list[int]:
    matcher.segments = []
    prompt = text(1, chunks * CHUNK)
    store.put(store.space(), prompt)
    return [*prompt, 1]


def ask(store: LocalStore, prompt: list[int], request: str, *, want_segments: bool) -> store_pb2.LookupSummary:
    message = store_pb2.LookupRequest(tokens=encode_u32(prompt), want_segments=want_segments)
    query = make_query(message, store.space())
    *_, last = store.lookups.run(query, HolderKey(SESSION, request, 1, 0), [], 5.0, Waiting())
    return last.summary


@pytest.mark.parametrize("make", [shuffled, prefix])
def test_a_lookup_and_its_end_cost_at_most_in_proportion_to_their_chunks(
    store: LocalStore, matcher: FakeMatcher, make: Callable[[LocalStore, FakeMatcher, int], list[int]]
) -> None:
    of_lookups, of_ends = [], []
    for chunks in (SMALL, LARGE):
        prompt, request = make(store, matcher, chunks), str(chunks)
        of_lookups.append(calls(partial(ask, store, prompt, request, want_segments=True)))
        assert store.state.leases.held_count == chunks
        of_ends.append(calls(partial(store.lookups.end_request, SESSION, request)))
        assert store.state.leases.held_count == 0
    for small, large in (of_lookups, of_ends):
        assert small <= large <= small * LARGE / SMALL


def test_a_matcher_is_asked_once_and_not_at_all_for_what_is_prefix(store: LocalStore, matcher: FakeMatcher) -> None:
    ask(store, shuffled(store, matcher, 4), "a", want_segments=True)
    assert len(matcher.requests) == 1
    matcher.requests.clear()
    known = prefix(store, matcher, 4)
    assert ask(store, known[:-1], "b", want_segments=True).prefix_tokens == 4 * CHUNK - 1
    assert not matcher.requests


def test_text_behind_the_first_unknown_chunk_is_not_hashed(store: LocalStore) -> None:
    store.put(store.space(), text(1, CHUNK))
    small, large = (
        calls(partial(ask, store, text(2, chunks * CHUNK), str(chunks), want_segments=False))
        for chunks in (SMALL, LARGE)
    )
    assert large <= small
