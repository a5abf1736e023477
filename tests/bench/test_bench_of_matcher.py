"""What the bench's figures rest on: its texts are the same everywhere, and its own checks see what is wrong."""

import hashlib

import numpy as np
import pytest

from benchmarks.matcher import data, targets, worker
from benchmarks.matcher.plan import COVERAGES, FULL

TABLE = 1024


def library() -> np.ndarray:
    return np.concatenate([text.tokens for text in data.library(0, TABLE)])


def test_texts_are_the_same_in_every_process_and_version() -> None:
    digest = hashlib.sha256(data.query(2048, 50, TABLE, 7).tokens.astype("<u4").tobytes()).hexdigest()
    assert digest == "ad60919e53432832178b7df1f3ad86a022c753a735d6c8f4728f858bf3e2b6fe"


@pytest.mark.parametrize("coverage", COVERAGES)
def test_a_query_holds_the_chunks_that_it_says_and_each_once(coverage: int) -> None:
    query = data.query(16_384, coverage, TABLE, 3)
    stored = library().reshape(-1, data.CHUNK_TOKENS)
    assert len(query.chunks) == 64 * coverage // 100
    assert len(set(query.chunks.tolist())) == len(query.chunks)
    for position, chunk in zip(query.positions, query.chunks, strict=True):
        assert (query.tokens[position : position + data.CHUNK_TOKENS] == stored[chunk]).all()


def test_queries_differ_and_know_nothing_else_of_the_table() -> None:
    first, second = (data.query(8192, 0, TABLE, number).tokens for number in (1, 2))
    assert (first == second).mean() < 0.01
    assert (first == library()[:8192]).mean() < 0.01


def segments(query: data.Query) -> worker.Segments:
    return worker.whole_chunks(query.positions.tolist(), query.chunks.tolist())


def test_a_match_that_is_not_there_is_counted_as_false() -> None:
    query = data.query(8192, 50, TABLE, 5)
    right = segments(query)
    assert worker.false_pieces(query.tokens, right) == 0
    one_wrong = query.tokens.copy()
    one_wrong[query.positions[3] + 255] ^= 1
    assert worker.false_pieces(one_wrong, right) == 1
    assert worker.false_pieces(query.tokens, right._replace(positions=right.positions + 1)) == len(right.ids)
    cut = right._replace(positions=right.positions + 9, skips=right.skips + 9, lengths=right.lengths - 9)
    assert worker.false_pieces(query.tokens, cut) == 0


def test_what_a_match_misses_is_not_counted_as_covered() -> None:
    query = data.query(8192, 50, TABLE, 5)
    found = segments(query)
    assert worker.covered_tokens(8192, found).sum() == 4096
    fewer = worker.Segments(*(column[1:] for column in found))
    assert not worker.covered_tokens(8192, fewer)[query.positions[0] : query.positions[0] + 256].any()


def row(coverage: int, ratio: float) -> targets.Row:
    figures = {"ratio_local": ratio, "ratio_fleet": None, "ours_recall": 1.0, "mixed_recall": None}
    figures |= {"ours_false_matches": 0, "mixed_false_matches": 0}
    return {"table": FULL.largest, "tokens": 1 << 17, "coverage": coverage, **figures}


def test_targets_pass_fail_or_were_not_measured() -> None:
    section = {"rows": [row(0, 61.0), row(50, 59.0), row(100, 60.0)], "classes": [{"added_ms": 0.3}], "threads": None}
    found = {entry["name"]: entry["passed"] for entry in targets.done_when({"match": section}, 2)}
    of_local = [found[f"match, 800 K chunks, 128 K tokens, {coverage} %: times local"] for coverage in COVERAGES]
    assert of_local == [True, False, True]
    assert found["match, 800 K chunks, 128 K tokens, 0 %: times fleet"] is None
    assert found["recall, lowest"] is True
    assert found["each further window class, highest ms"] is False
    assert found["two threads over one"] is None
    assert found["ready after kill -9 with 1 M chunks, slowest s"] is None
