"""From tokens and their sources to coloured text."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from cli.report.model import Piece, SegmentPlace

# Control characters, bidirectional overrides and lone surrogates: they could drive a terminal,
# reverse how a line reads, or fail to encode.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 3 tokens can wait for its last one.
_LONGEST_WAIT = 3
# Tokens before a run that are decoded with it, as some tokenizers drop a leading blank.
_LEAD = 4


def visible(text: str) -> str:
    """The text with line feeds and tabs only; what could act on a terminal or reader becomes a symbol."""

    def symbol(match: re.Match[str]) -> str:
        code = ord(match[0])
        if code < 0x20:
            return chr(0x2400 + code)
        return "\u2421" if code == 0x7F else _REPLACEMENT

    return _UNSAFE.sub(symbol, text.replace("\r\n", "\n"))


def sources_of_lookup(
    tokens_total: int, prefix_tokens: int, segments: Iterable[SegmentPlace], recomputed: Iterable[int] = ()
) -> tuple[list[str], list[str]]:
    """Source and document of each token, two lists of `tokens_total`.

    `recomputed` are query positions of reused tokens that the engine computed again.
    """
    sources = ["new"] * tokens_total
    documents = [""] * tokens_total
    sources[:prefix_tokens] = ["prefix"] * prefix_tokens
    for place in segments:
        covered = slice(place.query_position, place.query_position + place.length)
        sources[covered] = ["segment"] * place.length
        documents[covered] = [place.document] * place.length
    for position in recomputed:
        sources[position] = "recomputed"
    return sources, documents


def build_pieces(
    tokens: Sequence[int],
    sources: Sequence[str],
    documents: Sequence[str],
    decode: Callable[[Sequence[int]], str],
) -> list[Piece]:
    """Runs of tokens with one source and one document, with their text.

    A character whose bytes are spread over two runs is shown in the later one, so the pieces'
    texts always join to the text of all tokens.
    """
    pieces: list[Piece] = []
    start = 0
    waiting = 0
    for (source, document), group in groupby(zip(sources, documents, strict=True)):
        count = sum(1 for _ in group)
        end = start + count
        lead = list(tokens[max(0, start - waiting - _LEAD) : start - waiting])
        run = list(tokens[start - waiting : end])
        waiting = _incomplete_tail(lead, run, decode) if end < len(tokens) else 0
        text = decode(lead + run[: len(run) - waiting])[len(decode(lead)) :]
        pieces.append(Piece(text, source, document, count))
        start = end
    return pieces


def _incomplete_tail(lead: list[int], run: list[int], decode: Callable[[Sequence[int]], str]) -> int:
    """How many last tokens of a run hold only the beginning of a character."""
    for tail in range(min(_LONGEST_WAIT, len(run)) + 1):
        if not decode(lead + run[: len(run) - tail]).endswith(_REPLACEMENT):
            return tail
    return 0
