"""What stores publish, as records of a log, told to folds and to the slow model alike."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from matcher_kit import SPACE, Added, Change, Chunk, ask, check_answer, page, segments_of, token_bytes
from matcher_service_kit import CONTEXT, service_of
from ownership_model import OwnershipModel, most_tokens, owner_of

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.matcher.fold import Fold
from services.matcher.kernels.types import Hashing
from services.matcher.log.base import START, Position, chain_of
from services.matcher.table import Table

# Small, so that little memory is reserved for each of many tables.
LIMIT = 2 << 20


class History:
    """Every store's stream, in one order. `fold` has applied all of it."""

    def __init__(self, limit: int = LIMIT, hashing: Hashing | None = None) -> None:
        self.fold = Fold(Table(limit, hashing))
        self.model = OwnershipModel()
        self.records: list[tuple[bytes, Position]] = []
        self.epochs: defaultdict[str, int] = defaultdict(lambda: 1)
        self._sequences: defaultdict[str, int] = defaultdict(int)

    @property
    def position(self) -> Position:
        return self.records[-1][1] if self.records else START

    @property
    def table(self) -> Table:
        return self.fold.table

    def publish(self, store: str, *changes: Change, reset: bool = False, ahead: int = 0) -> None:
        """`ahead`: sequences that a reset leaves out."""
        first = self._sequences[store] + 1 + ahead
        data = page(changes, first, store, self.epochs[store], reset).SerializeToString()
        position = Position(self.position.number + 1, chain_of(self.position.chain, data))
        self.records.append((data, position))
        self._sequences[store] = first - 1 + sum(change.count for change in changes)
        if reset:
            self.model.void(owner_of(store, ""))
        for change in changes:
            self.model.apply(store, change, position.number)
        self.fold.apply(data, position)

    def add(self, *chunks: Chunk, store: str = "a") -> None:
        self.publish(store, Added(chunks))

    def restart(self, store: str, *changes: Change) -> None:
        """A new epoch, which begins with these changes."""
        self.epochs[store] += 1
        self._sequences[store] = 0
        self.model.void(owner_of(store, ""))
        self.publish(store, *changes)

    def replay(self, fold: Fold, behind: int = 0) -> None:
        """Applies what is behind this position to another fold."""
        for data, position in self.records[behind:]:
            fold.apply(data, position)

    def ask(self, tokens: Sequence[int], store: str = "a", **fields: Any) -> matcher_pb2.MatchRequest:
        return ask(tokens, store, self.epochs[store], **fields)

    def match(self, request: matcher_pb2.MatchRequest, fold: Fold | None = None) -> matcher_pb2.MatchResponse:
        return service_of(fold or self.fold).Match(request, CONTEXT)

    def covered(self, request: matcher_pb2.MatchRequest, chunks: Sequence[Chunk]) -> set[int]:
        return check_answer(request, self.match(request), chunks)

    def check(
        self, request: matcher_pb2.MatchRequest, answer: matcher_pb2.MatchResponse, chunk_tokens: int
    ) -> set[int]:
        """The answer is true, within what may be offered, and as much as can be. Returns the covered positions."""
        names = [owner_of(request.store, ""), *([owner_of("", request.l2_id)] if request.l2_id else [])]
        classes = list(request.context_classes)
        reachable = self.model.reachable(request.space_id, names, classes)
        covered = check_answer(request, answer, reachable)
        opaque = {at for span in request.opaque_spans for at in range(span.offset, span.offset + span.length)}
        assert not covered & opaque
        assert {segment.context_class for segment in segments_of(answer)} <= set(classes)
        query = list(memoryview(request.tokens).cast("I"))
        spans: Sequence[pb.OpaqueSpan] = request.opaque_spans
        assert len(covered) == most_tokens(query, reachable, request.skip_tokens, spans, chunk_tokens)
        return covered

    def scores(
        self, tokens: list[int], space: bytes, full: list[Chunk], classes: list[int]
    ) -> dict[str, tuple[int, int]]:
        """Of each owner (tokens of the prefix, tokens anywhere); full: the prompt's full chunks."""
        request = matcher_pb2.ScoreRequest(
            space_id=space,
            tokens=token_bytes(tokens),
            chain_hashes=b"".join(chunk.chain_hash for chunk in full),
            chunk_tokens=len(full[0].tokens) if full else 16,
            context_classes=classes,
        )
        answer = service_of(self.fold).Score(request, CONTEXT)
        return {owner_of(s.store, s.l2_id): (s.prefix_tokens, s.anywhere_tokens) for s in answer.stores}

    def expected_scores(
        self, tokens: list[int], space: bytes, full: list[Chunk], classes: list[int]
    ) -> dict[str, tuple[int, int]]:
        size = len(full[0].tokens) if full else 16
        scores = {}
        for owner in {owner for held in self.model.held.values() for owner in held.owners}:
            names = [(space, int(pb.DOMAIN_EXACT), chunk.chain_hash) for chunk in full]
            has = [name in self.model.held and owner in self.model.held[name].owners for name in names]
            prefix = size * [*has, False].index(False)
            anywhere = most_tokens(tokens, self.model.reachable(space, [owner], classes), 0, (), 32)
            if prefix or anywhere:
                scores[owner] = (prefix, max(prefix, anywhere))
        return scores


def history_of(*chunks: Chunk, hashing: Hashing | None = None, limit: int = LIMIT) -> History:
    history = History(limit, hashing)
    history.add(*chunks)
    return history


def space_of(tenant: str) -> bytes:
    return (tenant.encode() * 16)[:16] if tenant else SPACE
