"""Coloured text holds every character exactly once, and nothing that acts on a terminal."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cli.report.model import SegmentPlace
from cli.report.pieces import build_pieces, sources_of_lookup, visible

SOURCE = st.sampled_from(["prefix", "segment", "recomputed", "new"])


def decode_bytes(tokens: Sequence[int]) -> str:
    """A byte-level tokenizer at its worst: each byte is a token."""
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=30), st.data())
def test_pieces_join_to_the_text_even_where_runs_split_characters(text: str, data: st.DataObject) -> None:
    tokens = list(text.encode())
    sources = data.draw(st.lists(SOURCE, min_size=len(tokens), max_size=len(tokens)))
    pieces = build_pieces(tokens, sources, [""] * len(tokens), decode_bytes)
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.source for piece in pieces for _ in range(piece.count)] == sources
    assert all(one.source != other.source for one, other in pairwise(pieces))


def test_a_tokenizer_that_drops_a_leading_blank_loses_none_between_pieces() -> None:
    words = [" one", " two", " three"]

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    pieces = build_pieces([0, 1, 2], ["new", "segment", "new"], ["", "d", ""], decode)
    assert [piece.text for piece in pieces] == ["one", " two", " three"]


def test_sources_of_a_lookup() -> None:
    sources, documents = sources_of_lookup(10, 2, [SegmentPlace(3, 100, 4, "d")], recomputed=[4])
    assert sources == ["prefix"] * 2 + ["new", "segment", "recomputed", "segment", "segment"] + ["new"] * 3
    assert documents == [""] * 3 + ["d"] * 4 + [""] * 3


@given(st.text(st.characters(exclude_categories=[]), max_size=40))
def test_visible_text_cannot_act_and_always_encodes(text: str) -> None:
    shown = visible(text)
    shown.encode("utf-8")
    assert not [c for c in shown if (c < " " and c not in "\n\t") or "\x7f" <= c <= "\x9f"]
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def test_visible_keeps_ordinary_text() -> None:
    assert visible("def f(x):\r\n\treturn 'ü → 漢 👩‍👩‍👧'\n") == "def f(x):\n\treturn 'ü → 漢 👩‍👩‍👧'\n"
    assert visible("\x1b[31m") == "␛[31m"
