"""The matcher's verbs: messages checked, then the replica asked."""

import threading
import time
from collections.abc import Callable, Iterable

import grpc

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.errors import KvblendError
from services.common.identity import SPACE_ID_BYTES, is_chunk_size, validate_spans
from services.common.lifecycle import Boot
from services.common.metrics import Latencies, counter
from services.common.tokens import decode_tokens
from services.matcher.answers import segment_columns
from services.matcher.matching import Query, match, shortfalls
from services.matcher.occurrences import Found
from services.matcher.pages import CONTEXT_CLASSES, hashes_of
from services.matcher.replica import Replica
from services.matcher.scoring import scores
from services.matcher.table import Space

_DEFAULT_CLASSES = frozenset([pb.CONTEXT_CLASS_ALONE, pb.CONTEXT_CLASS_SHARED_PREFIX])
# Of the caller's time, kept for the way back; and of the rest, the share that scanning may take.
_RESERVE_SECONDS = 0.002
_SCAN_SHARE = 0.7

_CANDIDATES = counter("kvblend_matcher_candidates", "Fingerprints that looked like a stored text.")
_REFUSED = counter("kvblend_matcher_refused", "Candidates whose tokens differed: false matches of a hash-only matcher.")
_COVERED = counter("kvblend_matcher_covered_tokens", "Tokens of queries that a cover was found for.")
_ASKED = counter("kvblend_matcher_asked_tokens", "Tokens of queries that a cover was asked for.")

_NOTHING = Found([], 0, 0, 0)


class MatcherService(matcher_pb2_grpc.MatcherServiceServicer):
    def __init__(self, replica: Replica, boot: Boot, latencies: Latencies) -> None:
        self._replica = replica
        self._boot = boot
        self._latencies = latencies
        self._lock = threading.Lock()
        self._matches = self._candidates = self._verified = 0

    def Publish(
        self, request: matcher_pb2.PublishRequest, context: grpc.ServicerContext
    ) -> matcher_pb2.PublishResponse:
        return self._replica.publish(request, _left(_deadline(context)))

    def Match(self, request: matcher_pb2.MatchRequest, context: grpc.ServicerContext) -> matcher_pb2.MatchResponse:
        tokens = decode_tokens(request.tokens)
        _check_space_id(request.space_id)
        if request.skip_tokens > len(tokens):
            raise KvblendError("INVALID_ARGUMENT", f"skip_tokens is {request.skip_tokens} of {len(tokens)} tokens")
        if request.opaque_spans:
            validate_spans(request.opaque_spans, len(tokens))
        classes = _classes_of(request.context_classes)
        deadline = _deadline(context)
        self._check_ready()
        self._replica.wait_applied(request.at_least, _left(deadline))
        fold = self._replica.fold
        answer = matcher_pb2.MatchResponse(
            log_position=fold.position.number, log_age_ms=int(1000 * self._replica.age), scanned_tokens=len(tokens)
        )
        space = fold.table.spaces.get(request.space_id)
        if space is None:
            if len(tokens) > request.skip_tokens:
                answer.shortfalls.add(reason=pb.REASON_NOTHING_STORED, tokens=len(tokens) - request.skip_tokens)
            self._count(_NOTHING, len(tokens) - request.skip_tokens, 0)
            return answer
        query = Query(
            tokens,
            request.skip_tokens,
            fold.owners_for(request.store, request.epoch, request.l2_id),
            classes,
            request.opaque_spans,
        )
        with fold.table.grace.reading():
            found = match(fold.table, space, query, _is_late(_scan_end(deadline)))
            answer.segments.CopyFrom(segment_columns(fold.table, found.cover))
            answer.shortfalls.extend(shortfalls(fold.table, space, query, found))
        answer.scanned_tokens = found.found.scanned
        answer.candidates = found.found.candidates
        answer.verified = found.found.verified
        self._count(found.found, len(tokens) - request.skip_tokens, found.cover.tokens)
        return answer

    def Score(self, request: matcher_pb2.ScoreRequest, context: grpc.ServicerContext) -> matcher_pb2.ScoreResponse:
        tokens = decode_tokens(request.tokens)
        _check_space_id(request.space_id)
        if not is_chunk_size(request.chunk_tokens):
            raise KvblendError("INVALID_ARGUMENT", "chunk_tokens is a power of two from 16 to 1024")
        names = hashes_of(request.chain_hashes)
        classes = _classes_of(request.context_classes)
        deadline = _deadline(context)
        self._check_ready()
        table = self._replica.fold.table
        space: Space | None = table.spaces.get(request.space_id)
        if space is None:
            return matcher_pb2.ScoreResponse()
        is_late = _is_late(_scan_end(deadline))
        return matcher_pb2.ScoreResponse(stores=scores(table, space, tokens, names, classes, _left(deadline), is_late))

    def GetMatcherStats(
        self, request: matcher_pb2.GetMatcherStatsRequest, context: grpc.ServicerContext
    ) -> matcher_pb2.GetMatcherStatsResponse:
        deadline = _deadline(context)
        fold = self._replica.fold
        table = fold.table
        with self._lock:
            counts = (self._matches, self._candidates, self._verified)
        return matcher_pb2.GetMatcherStatsResponse(
            spaces=[
                matcher_pb2.SpaceEntries(space_id=space.space_id, chunks=space.chunks, tokens=space.tokens)
                for space in list(table.spaces.values())
            ],
            table_bytes=table.size,
            memory_limit_bytes=table.memory_limit_bytes,
            matches=counts[0],
            candidates=counts[1],
            verified=counts[2],
            refused=counts[1] - counts[2],
            evicted=table.evicted,
            applied=fold.applied(),
            log=self._replica.state(),
            latencies=self._latencies.summaries(),
            state_digest=fold.digest(_left(deadline)) if request.with_digest else b"",
        )

    def PingMatcher(
        self, request: matcher_pb2.PingMatcherRequest, context: grpc.ServicerContext
    ) -> matcher_pb2.PingMatcherResponse:
        del request, context
        state = self._replica.state()
        log = pb.Dependency(name=f"log ({state.kind})", ready=not state.error, detail=state.error)
        return matcher_pb2.PingMatcherResponse(liveness=self._boot.liveness([log]))

    def _check_ready(self) -> None:
        if not self._replica.ready:
            raise KvblendError("NOT_READY", f"this matcher has not caught up with its log yet ({self._replica.error})")

    def _count(self, found: Found, asked: int, covered: int) -> None:
        _CANDIDATES.inc(found.candidates)
        _REFUSED.inc(found.candidates - found.verified)
        _ASKED.inc(asked)
        _COVERED.inc(covered)
        with self._lock:
            self._matches += 1
            self._candidates += found.candidates
            self._verified += found.verified


def _check_space_id(space_id: bytes) -> None:
    if len(space_id) != SPACE_ID_BYTES:
        raise KvblendError("INVALID_ARGUMENT", f"space_id has {len(space_id)} bytes; {SPACE_ID_BYTES} are needed")


def _classes_of(context_classes: Iterable[int]) -> frozenset[int]:
    classes = frozenset(context_classes)
    if not classes <= CONTEXT_CLASSES:
        raise KvblendError("INVALID_ARGUMENT", f"context_classes has unknown ones: {sorted(classes - CONTEXT_CLASSES)}")
    return classes or _DEFAULT_CLASSES


def _deadline(context: grpc.ServicerContext) -> float:
    return time.monotonic() + max(0.0, float(context.time_remaining() or 0.0) - _RESERVE_SECONDS)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _scan_end(deadline: float) -> float:
    return deadline - (1 - _SCAN_SHARE) * _left(deadline)


def _is_late(deadline: float) -> Callable[[], bool]:
    return lambda: time.monotonic() > deadline
