"""Texts that are looked for at few positions are found at all of them, whatever their tokens are."""

import numpy as np
import pytest
from fold_machine import HASHINGS, STEPS
from history import History, history_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matcher_kit import ALL_BITS, EVERY_CLASS, SPACE, document_chunks, text

from services.matcher import occurrences
from services.matcher.kernels.anchors import anchor_of, anchors_of, double_span, key_places, span_of, width_of
from services.matcher.kernels.hashing import BLOCK
from services.matcher.kernels.texts import gather_tokens
from services.matcher.kernels.types import OWNERS
from services.matcher.matching import as_kernel_tokens

SPANS = [1, 2, 8, 32, 128]
# Long stretches of one of three tokens: stretches without a least token, and chunks that repeat and overlap.
of_few_tokens = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), min_size=2, max_size=8).map(
    lambda stretches: [token for token, count in stretches for _ in range(count)][:300]
)
of_many_tokens = st.integers(1, 9).map(lambda seed: text(seed, 100 + 25 * seed))
texts = of_few_tokens | of_many_tokens


def anchors(tokens: np.ndarray, span: int) -> list[int]:
    """Of every stretch of `span` tokens, as a scan finds them."""
    least = np.empty(len(tokens), dtype=np.uint32)
    key_places(tokens, least)
    done = 1
    while done < span:
        doubled = np.empty(len(least) - done, dtype=np.uint32)
        double_span(least, done, doubled)
        least, done = doubled, 2 * done
    places = np.empty(len(least), dtype=np.int32)
    return places[: anchors_of(least, places)].tolist()


@given(st.lists(st.integers(0, 3), min_size=128, max_size=400) | texts.filter(lambda tokens: len(tokens) >= 128))
@settings(deadline=None)
@pytest.mark.parametrize("span", SPANS)
def test_a_scan_looks_where_each_text_has_its_anchor(span: int, tokens: list[int]) -> None:
    column = np.array(tokens, dtype=np.uint32)
    of_texts = [start + anchor_of(column, start, span) for start in range(len(tokens) - span + 1)]
    assert all(start <= anchor < start + span for start, anchor in enumerate(of_texts))
    assert anchors(column, span) == sorted(set(of_texts))


@pytest.mark.parametrize("span", SPANS[1:])
def test_a_scan_looks_at_few_positions_of_usual_text_and_at_all_of_one_token(span: int) -> None:
    usual = np.array(text(1, 4000), dtype=np.uint32)
    assert len(anchors(usual, span)) < 2.5 / (span + 1) * len(usual)
    assert len(anchors(np.full(4000, 7, dtype=np.uint32), span)) == 4000 - span + 1


@pytest.mark.parametrize("window", [16, 32, 64, 128, 256, 512, 1024])
def test_what_is_looked_up_lies_in_the_first_tokens_of_a_text_wherever_its_anchor_is(window: int) -> None:
    assert span_of(window) - 1 + width_of(window) == window
    assert span_of(window).bit_count() == 1


def occurrences_in(history: History, query: list[int]) -> list[int]:
    """Position << 32 | entry of each, in the order in which a scan finds them."""
    table = history.table
    with table.grace.reading():
        reader = table.reader(history.fold.owners_for("a", 1, ""), EVERY_CLASS)
        tokens = as_kernel_tokens(np.array(query, dtype=np.uint32))
        found = occurrences.find_occurrences(
            table, table.spaces[SPACE], tokens, [(0, len(query))], reader, lambda: False
        )
    return [key for part in found.parts for key in part.keys.tolist()]


def expected_occurrences(history: History, query: list[int]) -> list[int]:
    """Wherever the query has the first tokens of an entry: as many as its window class has."""
    columns = history.table.columns
    beginnings = [
        (entry, gather_tokens(np.array([entry]), columns)[: columns.windows[entry]].tolist())
        for entry in range(history.table.entries_begun)
        if columns.windows[entry] and columns.rows[entry, OWNERS]
    ]
    return sorted(
        at << 32 | entry
        for entry, tokens in beginnings
        for at in range(len(query) - len(tokens) + 1)
        if query[at : at + len(tokens)] == tokens
    )


of_long_chunks = given(
    st.lists(texts, min_size=1, max_size=3),
    st.data(),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([ALL_BITS, *HASHINGS]),
    st.sampled_from(STEPS),
)


@of_long_chunks
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_every_occurrence_is_found_once_wherever_a_scan_stops(
    documents: list[list[int]], data: st.DataObject, chunk_tokens: int, keep: int, steps: tuple[int, int]
) -> None:
    chunks = [chunk for tokens in documents for chunk in document_chunks(tokens, chunk_tokens=chunk_tokens)]
    history = history_of(*chunks, hashing=HASHINGS[keep])
    query = [token for part in data.draw(st.lists(st.sampled_from(documents), max_size=2)) for token in part]
    query += data.draw(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(occurrences, "_STRETCH", steps[0])
        patch.setattr(occurrences, "BLOCK", steps[1])
        assert occurrences_in(history, query) == expected_occurrences(history, query)


@of_long_chunks
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_every_cover_of_long_chunks_is_true_and_complete(
    documents: list[list[int]], data: st.DataObject, chunk_tokens: int, keep: int, steps: tuple[int, int]
) -> None:
    chunks = [
        chunk
        for number, tokens in enumerate(documents)
        for chunk in document_chunks(tokens, f"d{number}", chunk_tokens=chunk_tokens)
    ]
    history = history_of(*chunks, hashing=HASHINGS[keep])
    parts = data.draw(st.lists(st.sampled_from(documents) | texts, min_size=1, max_size=3))
    query = [token for part in parts for token in part][data.draw(st.integers(0, 40)) :] or [0]
    request = history.ask(query, context_classes=EVERY_CLASS, skip_tokens=data.draw(st.integers(0, len(query))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(occurrences, "_STRETCH", steps[0])
        patch.setattr(occurrences, "BLOCK", steps[1])
        history.check(request, history.match(request), chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", [64, 128, 256, 1024])
def test_a_long_chunk_is_found_at_every_offset_around_a_border_of_the_scan(chunk_tokens: int) -> None:
    document = text(1, chunk_tokens)
    chunks = document_chunks(document, chunk_tokens=chunk_tokens)
    history = history_of(*chunks)
    around = [1_000_000 + token for token in text(2, BLOCK + 64)]
    for offset in (BLOCK - chunk_tokens, *range(BLOCK - 140, BLOCK + 3)):
        request = history.ask(around[:offset] + document + around[offset:])
        assert history.covered(request, chunks) == set(range(offset, offset + chunk_tokens))
