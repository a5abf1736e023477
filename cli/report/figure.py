"""Geometry of the page's pictures: positions in percent of the width, so that any screen fits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cli.report.model import Piece, PromptReport, SegmentPlace, StoredDocument

# Units of the SVG boxes, which stretch to whatever size they get.
BOX_WIDTH = 1000
BOX_HEIGHT = 100
# Columns that show where tokens were recomputed.
_COLUMNS = 180


@dataclass(frozen=True)
class Block:
    """A stretch of a strip: `left` and `width` in percent, `kind` a source or "document"."""

    left: float
    width: float
    kind: str
    first: int
    tokens: int
    name: str = ""
    number: int = 0
    # Position of the document's first token where it was stored; None: it is not.
    stored_first: int | None = None


@dataclass(frozen=True)
class Ribbon:
    """From where a text was stored down to where it is in the prompt."""

    path: str
    document: str
    number: int
    label: str


@dataclass(frozen=True)
class Cover:
    """One prompt's picture: what was stored, the ribbons, the documents now, and the sources."""

    stored: list[Block]
    ribbons: list[Ribbon]
    documents: list[Block]
    sources: list[Block]
    recomputed_path: str
    ticks: list[tuple[float, int]]


def percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 3) if whole else 0.0


def _runs(labels: Iterable[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """(label, first token, tokens) of neighbours with the same label, from (label, tokens)."""
    runs: list[tuple[str, int, int]] = []
    position = 0
    for label, count in labels:
        if runs and runs[-1][0] == label:
            runs[-1] = (label, runs[-1][1], runs[-1][2] + count)
        else:
            runs.append((label, position, count))
        position += count
    return runs


def _source_blocks(pieces: Sequence[Piece], total: int) -> list[Block]:
    """The strip's ground: recomputed tokens are drawn on top of the segments that they belong to."""
    ground = ((("segment" if piece.source == "recomputed" else piece.source), piece.count) for piece in pieces)
    return [
        Block(percent(first, total), percent(count, total), source, first, count)
        for source, first, count in _runs(ground)
    ]


def _recomputed_path(pieces: Sequence[Piece], total: int) -> str:
    """One SVG path: columns from the bottom, each as high as the share of its tokens that was recomputed."""
    columns = min(_COLUMNS, total)
    counts = [0] * columns
    position = 0
    for piece in pieces:
        if piece.source == "recomputed":
            for token in range(position, position + piece.count):
                counts[token * columns // total] += 1
        position += piece.count
    width = BOX_WIDTH / columns
    parts = []
    for column, count in enumerate(counts):
        if count:
            # Tokens t with t * columns // total == column.
            tokens = -(-(column + 1) * total // columns) - -(-column * total // columns)
            height = BOX_HEIGHT * count / tokens
            parts.append(f"M{column * width:.1f} {BOX_HEIGHT}v-{height:.1f}h{width:.1f}v{height:.1f}z")
    return "".join(parts)


def _ribbon_path(above: tuple[float, float], below: tuple[float, float]) -> str:
    (a, b), (c, d) = ((BOX_WIDTH * left, BOX_WIDTH * right) for left, right in (above, below))
    middle, bottom = BOX_HEIGHT // 2, BOX_HEIGHT
    return (
        f"M{a:.1f} 0C{a:.1f} {middle} {c:.1f} {middle} {c:.1f} {bottom}"
        f"L{d:.1f} {bottom}C{d:.1f} {middle} {b:.1f} {middle} {b:.1f} 0z"
    )


def _merged(segments: Sequence[SegmentPlace]) -> list[SegmentPlace]:
    """Neighbours that moved together are one ribbon."""
    merged: list[SegmentPlace] = []
    for place in sorted(segments, key=lambda place: place.query_position):
        last = merged[-1] if merged else None
        if (
            last
            and last.document == place.document
            and last.query_position + last.length == place.query_position
            and last.stored_position + last.length == place.stored_position
        ):
            merged[-1] = SegmentPlace(
                last.query_position, last.stored_position, last.length + place.length, last.document
            )
        else:
            merged.append(place)
    return merged


def _ribbons(
    prompt: PromptReport, library: Sequence[StoredDocument], starts: dict[str, int], stored_total: int
) -> list[Ribbon]:
    known = {document.name: (number, document) for number, document in enumerate(library, 1)}
    ribbons = []
    for place in _merged(prompt.segments):
        if place.document not in known:
            continue
        number, document = known[place.document]
        first = starts[place.document] + place.stored_position - document.first_position
        path = _ribbon_path(
            (first / stored_total, (first + place.length) / stored_total),
            (
                place.query_position / prompt.tokens_total,
                (place.query_position + place.length) / prompt.tokens_total,
            ),
        )
        label = (
            f"{place.length:,} tokens, stored at {place.stored_position:,}, "
            f"now at {place.query_position:,} to {place.query_position + place.length - 1:,}"
        )
        ribbons.append(Ribbon(path, place.document, number, label))
    return ribbons


def _ticks(total: int) -> list[tuple[float, int]]:
    """Round positions for the axis: (percent, token), at most nine, none so near the end that it would not fit."""
    steps = (base * 10**power for power in range(9) for base in (1, 2, 5))
    step = next(step for step in steps if total / step <= 8)
    return [(percent(token, total), token) for token in range(0, max(1, int(0.95 * total)), step)]


def cover_of(prompt: PromptReport, library: Sequence[StoredDocument]) -> Cover:
    """The picture of one prompt over the library in its stored order."""
    total = prompt.tokens_total
    stored_total = sum(document.tokens for document in library)
    numbers = {document.name: number for number, document in enumerate(library, 1)}
    firsts = {document.name: document.first_position for document in library}
    starts: dict[str, int] = {}
    stored = []
    position = 0
    for document in library:
        starts[document.name] = position
        block = (percent(position, stored_total), percent(document.tokens, stored_total))
        stored.append(
            Block(*block, "document", document.first_position, document.tokens, document.name, numbers[document.name])
        )
        position += document.tokens
    documents = [
        Block(
            percent(first, total),
            percent(count, total),
            "document",
            first,
            count,
            name,
            numbers.get(name, 0),
            firsts.get(name),
        )
        for name, first, count in _runs((piece.document, piece.count) for piece in prompt.pieces)
        if name
    ]
    return Cover(
        stored=stored,
        ribbons=_ribbons(prompt, library, starts, stored_total),
        documents=documents,
        sources=_source_blocks(prompt.pieces, total),
        recomputed_path=_recomputed_path(prompt.pieces, total),
        ticks=_ticks(total),
    )
