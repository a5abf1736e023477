"""The matcher's verbs: messages checked, then the table asked."""

import threading
import time
from collections.abc import Callable, Iterable

import grpc

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.errors import KvblendError
from services.common.identity import HASH_BYTES, is_chunk_size, validate_spans
from services.common.lifecycle import Boot
from services.common.metrics import Latencies, counter
from services.common.tokens import decode_tokens
from services.matcher.matching import Query, covered_tokens, match
from services.matcher.occurrences import Found, find_occurrences, hash_query
from services.matcher.spaces import Spaces
from services.matcher.table import ChunkName, OwnerName, Table

# Left of a call's time for the answer's way back.
_RESERVE_SECONDS = 0.002
# Of the time that a call has, what scanning may take; the rest is for runs, cover and answer.
_SCAN_SHARE = 0.3
_DEFAULT_CLASSES = frozenset((pb.CONTEXT_CLASS_ALONE, pb.CONTEXT_CLASS_SHARED_PREFIX))

_NOTHING = Found([], 0, 0, 0)

_CANDIDATES = counter("kvblend_matcher_candidates", "Entries whose fingerprint was met.")
_REFUSED = counter("kvblend_matcher_refused", "Candidates whose tokens differed: false matches of a hash-only matcher.")


class MatcherService(matcher_pb2_grpc.MatcherServiceServicer):
    def __init__(self, spaces: Spaces, boot: Boot, latencies: Latencies) -> None:
        self._spaces = spaces
        self._boot = boot
        self._latencies = latencies
        self._lock = threading.Lock()
        self._matches = self._candidates = self._verified = 0

    def Publish(
        self, request: matcher_pb2.PublishRequest, context: grpc.ServicerContext
    ) -> matcher_pb2.PublishResponse:
        applied, needs_reset = self._spaces.publish(request, _left(_deadline(context)))
        return matcher_pb2.PublishResponse(
            boot_id=self._boot.boot_id, applied_sequence=applied, needs_reset=needs_reset
        )

    def Match(self, request: matcher_pb2.MatchRequest, context: grpc.ServicerContext) -> matcher_pb2.MatchResponse:
        tokens = decode_tokens(request.tokens)
        if request.skip_tokens > len(tokens):
            raise KvblendError("INVALID_ARGUMENT", f"skip_tokens is {request.skip_tokens} of {len(tokens)} tokens")
        validate_spans(request.opaque_spans, len(tokens))
        deadline = _deadline(context)
        self._spaces.wait_applied(list(request.at_least), _left(deadline))
        applied = self._spaces.applied()
        query = Query(
            tokens,
            request.skip_tokens,
            self._spaces.current_owners(request.store, request.epoch, request.l2_id),
            frozenset(request.context_classes) or _DEFAULT_CLASSES,
            request.opaque_spans,
        )
        with self._spaces.reading(request.space_id, _left(deadline)) as table:
            if table is None:
                self._count(_NOTHING)
                return _nothing_stored(len(tokens) - request.skip_tokens, len(tokens), applied)
            answer = match(table, query, _is_late(_scan_end(deadline)))
        self._count(answer.found)
        return matcher_pb2.MatchResponse(
            segments=answer.segments,
            shortfalls=answer.shortfalls,
            applied=applied,
            scanned_tokens=answer.found.scanned,
            candidates=answer.found.candidates,
            verified=answer.found.verified,
        )

    def Score(self, request: matcher_pb2.ScoreRequest, context: grpc.ServicerContext) -> matcher_pb2.ScoreResponse:
        tokens = decode_tokens(request.tokens)
        if len(request.chain_hashes) % HASH_BYTES or not is_chunk_size(request.chunk_tokens):
            raise KvblendError("INVALID_ARGUMENT", "chain_hashes are N x 32 bytes, chunk_tokens a power of two")
        hashes = request.chain_hashes
        names = [ChunkName(pb.DOMAIN_EXACT, hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]
        classes = frozenset(request.context_classes) or _DEFAULT_CLASSES
        deadline = _deadline(context)
        with self._spaces.reading(request.space_id, _left(deadline)) as table:
            if table is None:
                return matcher_pb2.ScoreResponse()
            text = hash_query(tokens, table.hashing)
            anybody = table.reader(table.owners, classes)
            found = find_occurrences(table, text, [(0, len(tokens))], anybody, _is_late(_scan_end(deadline)))
            prefix = _prefix_chunks(table, names)
            scores = []
            for owner in table.owners:
                if _left(deadline) <= 0:
                    raise KvblendError("DEADLINE_EXCEEDED", "too many owners to score in the call's time")
                anywhere = covered_tokens(table, text, found, table.reader([owner], classes))
                held = min(len(tokens), prefix.get(owner, 0) * request.chunk_tokens)
                if held or anywhere:
                    scores.append(_score(owner, held, anywhere))
        return matcher_pb2.ScoreResponse(stores=scores)

    def GetMatcherStats(
        self, request: matcher_pb2.GetMatcherStatsRequest, context: grpc.ServicerContext
    ) -> matcher_pb2.GetMatcherStatsResponse:
        del request
        spaces = []
        table_bytes = 0
        for space_id, table in self._spaces.entries(_left(_deadline(context))):
            spaces.append(matcher_pb2.SpaceEntries(space_id=space_id, chunks=len(table.by_name), tokens=table.tokens))
            table_bytes += table.bytes
        with self._lock:
            counts = (self._matches, self._candidates, self._verified)
        return matcher_pb2.GetMatcherStatsResponse(
            spaces=spaces,
            table_bytes=table_bytes,
            matches=counts[0],
            candidates=counts[1],
            verified=counts[2],
            refused=counts[1] - counts[2],
            applied=self._spaces.applied(),
            latencies=self._latencies.summaries(),
        )

    def PingMatcher(
        self, request: matcher_pb2.PingMatcherRequest, context: grpc.ServicerContext
    ) -> matcher_pb2.PingMatcherResponse:
        del request, context
        return matcher_pb2.PingMatcherResponse(liveness=self._boot.liveness())

    def _count(self, found: Found) -> None:
        _CANDIDATES.inc(found.candidates)
        _REFUSED.inc(found.candidates - found.verified)
        with self._lock:
            self._matches += 1
            self._candidates += found.candidates
            self._verified += found.verified


def _deadline(context: grpc.ServicerContext) -> float:
    return time.monotonic() + max(0.0, float(context.time_remaining() or 0.0) - _RESERVE_SECONDS)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _scan_end(deadline: float) -> float:
    return deadline - (1 - _SCAN_SHARE) * _left(deadline)


def _is_late(deadline: float) -> Callable[[], bool]:
    return lambda: time.monotonic() > deadline


def _nothing_stored(missing: int, scanned: int, applied: Iterable[pb.StreamPosition]) -> matcher_pb2.MatchResponse:
    shortfalls = [pb.Shortfall(reason=pb.REASON_NOTHING_STORED, tokens=missing)] if missing else []
    return matcher_pb2.MatchResponse(shortfalls=shortfalls, scanned_tokens=scanned, applied=applied)


def _prefix_chunks(table: Table, names: list[ChunkName]) -> dict[OwnerName, int]:
    """How many leading chunks each owner has."""
    chunks: dict[OwnerName, int] = {}
    for number, name in enumerate(names):
        entry = table.by_name.get(name)
        going_on = [owner for owner in entry.owners if chunks.get(owner, 0) == number] if entry else []
        if not going_on:
            break
        chunks.update(dict.fromkeys(going_on, number + 1))
    return chunks


def _score(owner: OwnerName, prefix: int, anywhere: int) -> matcher_pb2.StoreScore:
    is_store = owner.kind == matcher_pb2.OWNER_KIND_STORE
    return matcher_pb2.StoreScore(
        store=owner.name if is_store else "",
        l2_id="" if is_store else owner.name,
        prefix_tokens=prefix,
        anywhere_tokens=max(anywhere, prefix),
    )
