"""Every occurrence of everything stored, wherever it stands in a query and however long it is."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from history import History, history_of
from matcher_kit import (
    ALL_BITS,
    EVERY_CLASS,
    Chunk,
    document_chunks,
    segments_of,
    text,
)

from services.matcher.kernels.hashing import BLOCK, random_hashing
from services.matcher.kernels.runs import _MOST_BEHIND
from services.matcher.occurrences import _STRETCH

UNKNOWN = 1_000_000
LADDER = (16, 32, 64, 128)


def unknown(count: int, seed: int = 0) -> list[int]:
    return [UNKNOWN + token for token in text(seed, count)]


def planted(size: int, documents: dict[int, list[int]]) -> list[int]:
    """Unknown tokens with these documents at these positions."""
    query = unknown(size)
    for position, document in documents.items():
        query[position : position + len(document)] = document
    return query


def positions_of(documents: dict[int, list[int]]) -> set[int]:
    return {position + at for position, document in documents.items() for at in range(len(document))}


@pytest.mark.parametrize("border", [BLOCK, 2 * BLOCK, _STRETCH, _STRETCH + BLOCK])
@pytest.mark.parametrize("keep", [ALL_BITS, 0b111111], ids=["full hash", "six bits"])
def test_a_document_is_found_at_every_offset_around_a_border_of_the_scan(border: int, keep: int) -> None:
    document = text(1, 48)
    chunks = document_chunks(document, chunk_tokens=32)
    history = history_of(*chunks, hashing=random_hashing(keep))
    around = unknown(border + 64)
    for offset in range(border - 49, border + 3):
        query = around[:offset] + document + around[offset:]
        request = history.ask(query[border - 2 * BLOCK if border > 2 * BLOCK else 0 :])
        start = offset - (border - 2 * BLOCK if border > 2 * BLOCK else 0)
        assert history.covered(request, chunks) == set(range(start, start + 48))


def test_documents_across_every_border_of_a_long_query_are_found() -> None:
    borders = [*range(BLOCK, 3 * _STRETCH, BLOCK)]
    documents = {border - 40 + 3 * number: text(number, 90) for number, border in enumerate(borders[:25])}
    documents |= {border - 60: text(border, 90) for border in borders[25:]}
    chunks = [
        chunk
        for position, document in documents.items()
        for chunk in document_chunks(document, f"{position}", chunk_tokens=64)
    ]
    history = history_of(*chunks)
    request = history.ask(planted(3 * _STRETCH + 5, documents))
    answer = history.match(request)
    assert history.covered(request, chunks) == positions_of(documents)
    assert [segment.document for segment in segments_of(answer)] == [str(position) for position in sorted(documents)]
    assert answer.scanned_tokens == 3 * _STRETCH + 5


@pytest.mark.parametrize("chunk_tokens", [16, 32, 64, 128, 256, 512, 1024])
def test_a_text_of_any_length_is_found_from_sixteen_tokens_on(chunk_tokens: int) -> None:
    edges = {size + more for size in (*LADDER, chunk_tokens) for more in (-1, 0, 1)} | {
        1,
        15,
        200,
        3 * chunk_tokens - 1,
    }
    lengths = sorted(length for length in edges if length <= 3 * chunk_tokens)
    history = History()
    chunks: list[Chunk] = []
    for length in lengths:
        chunks += document_chunks(text(length, length), f"{length}", chunk_tokens=chunk_tokens)
    history.add(*chunks)
    for length in lengths:
        # In the middle of unknown text, at the very beginning, at the very end, twice.
        document = text(length, length)
        found = set(range(length)) if length >= 16 else set()
        for before, after in ((7, 5), (0, 20), (20, 0), (0, 0)):
            request = history.ask(unknown(before) + document + unknown(after, 1))
            assert history.covered(request, chunks) == {before + at for at in found}
        request = history.ask(document + unknown(3) + document)
        assert len(history.covered(request, chunks)) == 2 * len(found)


def test_all_window_classes_at_once_hide_nothing_of_each_other() -> None:
    lengths = [16, 20, 32, 50, 64, 100, 128, 200, 256, 300, 511, 700]
    documents = {length: text(length, length) for length in lengths}
    chunks = [
        chunk
        for length, tokens in documents.items()
        for chunk in document_chunks(tokens, f"{length}", chunk_tokens=256)
    ]
    history = history_of(*chunks)
    random.Random(1).shuffle(lengths)
    query = [token for length in lengths for token in documents[length]]
    request = history.ask(query)
    assert history.covered(request, chunks) == set(range(len(query)))
    assert [segment.document for segment in segments_of(history.match(request))] == [str(n) for n in lengths]


@pytest.mark.parametrize("length", [700, 100])
def test_case_35_documents_in_random_order_are_covered_to_98_percent(length: int) -> None:
    documents = [text(number, length) for number in range(40)]
    chunks = [
        chunk
        for number, tokens in enumerate(documents)
        for chunk in document_chunks(tokens, f"{number}", chunk_tokens=256)
    ]
    history = history_of(*chunks, limit=16 << 20)
    order = random.Random(length)
    for _ in range(5):
        prompt = [token for number in order.sample(range(40), 14) for token in documents[number]]
        request = history.ask(unknown(9) + prompt)
        assert len(history.covered(request, chunks)) >= 0.98 * len(prompt)


def test_case_35_documents_of_many_lengths_are_covered_to_their_last_token() -> None:
    documents = {f"d{n}": text(n, length) for n, length in enumerate((700, 333, 45, 17, 256))}
    chunks = [chunk for name, tokens in documents.items() for chunk in document_chunks(tokens, name)]
    history = history_of(*chunks)
    order = ["d3", "d0", "d4", "d2", "d1"]
    request = history.ask([token for name in order for token in documents[name]])
    assert len(history.covered(request, chunks)) == sum(map(len, documents.values()))
    assert [segment.document for segment in segments_of(history.match(request))] == order


def test_any_beginning_of_the_query_may_be_covered_already() -> None:
    document = text(1, 150)
    chunks = document_chunks(document, chunk_tokens=64)
    history = history_of(*chunks)
    query = unknown(5) + document + unknown(5, 1)
    for skip in range(len(query) + 1):
        request = history.ask(query, skip_tokens=skip)
        rest = set(range(max(5, skip), 155))
        assert history.covered(request, chunks) == (rest if len(rest) >= 16 else set())


def test_a_stretch_inside_a_chunk_is_found_only_with_a_whole_neighbour() -> None:
    """Chunk [64, 128) stands whole; of those around it any part that touches it is found."""
    document = text(1, 192)
    chunks = document_chunks(document, chunk_tokens=64)
    history = history_of(*chunks)
    for start in (0, 1, 30, 63, 64, 65):
        for end in (127, 128, 129, 150, 191, 192):
            request = history.ask(unknown(20) + document[start:end] + unknown(20, 1))
            whole = start <= 64 and end >= 128
            inner = (start == 0 and end >= 64) or (start <= 128 and end == 192)
            assert bool(history.covered(request, chunks)) == (whole or inner)
            if whole:
                assert len(history.covered(request, chunks)) == end - start


def test_tokens_of_all_32_bits_are_compared() -> None:
    """Values that mean something else inside the table are tokens like all others at chunks' edges."""
    special = [0, 1, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFE, 0xFFFF_FFFF]
    for last in special:
        for first in special:
            document = [*text(1, 15), last, first, *text(2, 14), first, last, *text(3, 25)]
            chunks = document_chunks(document)
            history = history_of(*chunks)
            request = history.ask(unknown(4) + document)
            assert history.covered(request, chunks) == set(range(4, 4 + len(document)))
            for wrong in set(special) - {first}:
                changed = [*document[:16], wrong, *document[17:]]
                assert history.covered(history.ask(changed), chunks) == set(range(len(document))) - {16}


def branches(history: History, lengths: Sequence[int]) -> list[Chunk]:
    """Texts that begin alike and go on differently, in one chain each."""
    common = text(0, 32)
    chunks = [chunk for length in lengths for chunk in document_chunks(common + text(length, length), "tree")]
    history.add(*chunks)
    return chunks


def test_of_several_texts_behind_one_chunk_the_one_that_goes_on_for_longest_is_taken() -> None:
    history = History()
    lengths = [5, 10, 16, 40, 100]
    chunks = branches(history, lengths)
    for length in lengths:
        for shown in (1, length // 2, length):
            request = history.ask(text(0, 32) + text(length, length)[:shown] + unknown(9))
            assert history.covered(request, chunks) == set(range(32 + shown))


def test_a_query_of_one_token_over_many_copies_is_answered() -> None:
    chunks = [chunk for n in range(50) for chunk in document_chunks([7] * 64, f"copy {n}", chunk_tokens=64)]
    history = history_of(*chunks)
    request = history.ask([7] * 3000)
    assert history.covered(request, chunks) == set(range(3000))


@pytest.mark.parametrize("chunk_tokens", [16, 256])
def test_real_text_in_a_real_template_is_found_to_its_last_token(model_dir: Path, chunk_tokens: int) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def tokens_of(words: str) -> list[int]:
        return list(tokenizer.encode(words, add_special_tokens=False).ids)

    pages = sorted((Path(__file__).resolve().parents[2] / "docs").rglob("*.md"))[:12]
    documents = {page.name: tokens_of(page.read_text(encoding="utf-8")) for page in pages}
    chunks = [
        chunk
        for name, tokens in documents.items()
        for chunk in document_chunks(tokens, name, chunk_tokens=chunk_tokens)
    ]
    history = history_of(*chunks, limit=16 << 20)
    head, seam = (
        tokens_of("<|im_start|>system\nAnswer from the documents.<|im_end|>\n<|im_start|>user\n"),
        tokens_of("\n\n"),
    )
    names = list(documents)
    random.Random(3).shuffle(names)
    query, wanted = list(head), set()
    for name in names:
        wanted |= set(range(len(query), len(query) + len(documents[name])))
        query += documents[name] + seam
    query += tokens_of("What is this about?<|im_end|>\n<|im_start|>assistant\n")
    request = history.ask(query, context_classes=EVERY_CLASS)
    covered = history.covered(request, chunks)
    assert wanted <= covered
    assert len(covered) < len(query)


def test_of_very_many_continuations_of_one_chunk_the_latest_are_known() -> None:
    """Each goes on for less than a window, so only the walk from the chunk before finds it; that walk is bounded."""
    count = _MOST_BEHIND + 10
    first = document_chunks(text(1, 16))
    behind = [chunk for number in range(count) for chunk in document_chunks(text(1, 16) + text(100 + number, 16))[1:]]
    history = History(limit=64 << 20)
    history.add(*first, *behind)

    def covered(number: int) -> int:
        return len(
            history.covered(history.ask(text(1, 16) + text(100 + number, 16)[:10] + unknown(30)), [*first, *behind])
        )

    assert covered(count - 1) == covered(count - _MOST_BEHIND + 5) == 26
    assert covered(5) == 16
