"""The slow, obviously right matcher that the real one is compared with."""

from collections.abc import Iterable, Iterator

from matcher_kit import Chunk

SHORTEST = 16


def reachable_tokens(query: list[int], chunks: Iterable[Chunk], skip: int, chunk_tokens: int) -> set[int]:
    """Query positions at or behind `skip` that some run of stored text covers.

    A run begins with a chunk that fits a window class and stands whole in the query, and goes on token by
    token into the chunks before and behind it.
    """
    by_name = {chunk.chain_hash: chunk for chunk in chunks}
    covered: set[int] = set()
    for chunk in by_name.values():
        if len(chunk.tokens) < min(SHORTEST, chunk_tokens):
            continue
        for at in range(len(query) - len(chunk.tokens) + 1):
            if tuple(query[at : at + len(chunk.tokens)]) == chunk.tokens:
                end = _reach(query, chunk, at + len(chunk.tokens), by_name)
                start = at - _agreeing_suffix(query, at, by_name.get(chunk.previous_hash), chunk)
                covered |= set(range(start, end))
    return {position for position in covered if position >= skip}


def _reach(query: list[int], chunk: Chunk, end: int, by_name: dict[bytes, Chunk]) -> int:
    """Farthest position that this chunk's successors agree with the query."""
    best = end
    for child in _children(chunk, by_name):
        shared = _agreeing_prefix(query, end, child.tokens)
        if shared == len(child.tokens):
            best = max(best, _reach(query, child, end + shared, by_name))
        best = max(best, end + shared)
    return best


def _children(chunk: Chunk, by_name: dict[bytes, Chunk]) -> Iterator[Chunk]:
    for child in by_name.values():
        if child.previous_hash == chunk.chain_hash and child.stored_position == chunk.end:
            yield child


def _agreeing_prefix(query: list[int], at: int, tokens: tuple[int, ...]) -> int:
    count = 0
    while count < len(tokens) and at + count < len(query) and query[at + count] == tokens[count]:
        count += 1
    return count


def _agreeing_suffix(query: list[int], end: int, before: Chunk | None, chunk: Chunk) -> int:
    if before is None or before.end != chunk.stored_position:
        return 0
    count = 0
    while count < len(before.tokens) and count < end and query[end - 1 - count] == before.tokens[-1 - count]:
        count += 1
    return count


def worth_covering(positions: set[int]) -> set[int]:
    """Without islands of fewer than SHORTEST neighbouring tokens, which are not worth a segment."""
    kept: set[int] = set()
    island: list[int] = []
    for position in [*sorted(positions), None]:
        if island and position != island[-1] + 1:
            kept |= set(island) if len(island) >= SHORTEST else set()
            island = []
        if position is not None:
            island.append(position)
    return kept
