"""The unified lookup: prefix and segments, from the arena and from L2, leased, within the caller's deadline."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, store_pb2
from services.common.errors import KvblendError
from services.store import prefix, segments
from services.store.answers import Answer, Answers
from services.store.catalog import Chunk
from services.store.cover import Cover, hashes_of, keys_of, lengths_of, trim
from services.store.l2 import L2, L2Chunk
from services.store.leases import HolderKey
from services.store.matchers import Matchers
from services.store.objects import ChunkKey
from services.store.query import Piece, Query
from services.store.state import STORE_OWNER, StoreState, rank_objects, removed_event

# Of the caller's time, kept for the way back.
_RESERVE = 0.1
# At most this share of the time goes into waiting for the matcher to catch up with this store's own stream.
_CATCH_UP_SHARE = 0.2


@dataclass
class Run:
    """One lookup while it is made. Times are of the state's monotonic clock."""

    query: Query
    holder: HolderKey
    answer: Answer
    epoch: int
    deadline: float
    at_least: Sequence[pb.StreamPosition]
    cover: Cover
    prefix: list[Piece] = field(default_factory=list)
    # Chunks of the prompt's chain that serve as a whole; behind them perhaps the beginning of another.
    whole_chunks: int = 0
    # A cap forbids further leases.
    full: bool = False
    leased: dict[ChunkKey, Chunk] = field(default_factory=dict)
    claims: list[Piece] = field(default_factory=list)
    served: list[Piece] = field(default_factory=list)
    from_l2: set[ChunkKey] = field(default_factory=set)
    rest: list[pb.Shortfall] = field(default_factory=list)
    # Why tokens are not served that nothing else explains.
    default: pb.Reason = pb.REASON_UNKNOWN_TEXT
    detail: str = ""
    seen_sequence: int = 0

    @property
    def prefix_end(self) -> int:
        return self.prefix[-1].end if self.prefix else 0

    @property
    def last_token(self) -> int:
        return self.query.count - 1


class Lookups:
    def __init__(
        self,
        state: StoreState,
        matchers: Matchers,
        l2: L2 | None,
        *,
        store: str,
        epoch: int,
        matcher_timeout: float,
    ) -> None:
        """`matcher_timeout`: seconds that a matcher may take at most."""
        self._state = state
        self._matchers = matchers
        self._l2 = l2
        self._store = store
        self._epoch = epoch
        self._matcher_timeout = matcher_timeout
        self.answers = Answers()

    def run(
        self, query: Query, holder: HolderKey, at_least: Sequence[pb.StreamPosition], remaining: float
    ) -> Iterator[store_pb2.LookupResponse]:
        """`remaining`: seconds until the caller's deadline.

        Raises:
            KvblendError: SUPERSEDED, DEADLINE_EXCEEDED.
        """
        now = self._state.clock.now()
        deadline = now + remaining * (1 - _RESERVE)
        answer, leads, superseded = self.answers.enter(holder, query.digest, now)
        if superseded:
            with self._state.lock:
                self._state.leases.end_request(holder.session, holder.request_id)
        if leads:
            run = Run(query, holder, answer, self._epoch, deadline, at_least, Cover(query.count))
            with self.answers.leading(holder, query.digest, answer):
                yield from self._lead(run)
        else:
            yield self._follow(query, holder, answer, deadline)

    # The first call of an answer makes it.

    def _lead(self, run: Run) -> Iterator[store_pb2.LookupResponse]:
        with self._lease_lock(run):
            self._extend_prefix(run)
        early = self._start_prefix_fetch(run)
        self._match(run)
        with self._lease_lock(run):
            absent = self._take_segments(run)
            fresh = self._objects(run, run.leased.values())
        if self._l2 is not None and (early or absent):
            yield store_pb2.LookupResponse(objects=fresh)
            known = set(run.leased)
            self._fetch_rest(run, early, absent)
            with self._lease_lock(run):
                self._extend_prefix(run)
                absent = self._take_segments(run)
                fresh = self._objects(run, [chunk for key, chunk in run.leased.items() if key not in known])
        with self._lease_lock(run):
            self._report_absent(run, absent)
            summary = self._finish(run)
        yield store_pb2.LookupResponse(objects=fresh, summary=summary)

    def _lease_lock(self, run: Run) -> "_LeaseLock":
        return _LeaseLock(self._state, lambda: self.answers.is_current(run.holder, run.query.digest))

    def _lease(self, run: Run, key: ChunkKey) -> bool:
        """The chunk is here and leased for this run. Needs the lock."""
        if key in run.leased:
            return True
        chunk = self._state.usable(key)
        if chunk is None or run.full:
            return False
        run.full = not self._state.lease(run.holder, chunk)
        if run.full:
            return False
        run.leased[key] = chunk
        return True

    def _extend_prefix(self, run: Run) -> None:
        """Whole chunks as far as they go, then the best beginning of the next. Needs the lock."""
        state, query = self._state, run.query
        del run.prefix[run.whole_chunks :]
        for piece in prefix.walk(state, query, run.whole_chunks):
            if not self._lease(run, piece.key):
                break
            run.prefix.append(piece)
            run.whole_chunks += 1
        edge = prefix.edge(state, query, run.whole_chunks)
        if edge is not None and self._lease(run, edge.key):
            run.prefix.append(edge)
        state.touch(run.leased[piece.key] for piece in run.prefix)
        chunk_tokens = query.space.shape.chunk_tokens
        first, end = run.whole_chunks * chunk_tokens, (run.whole_chunks + 1) * chunk_tokens
        reason = pb.REASON_QUOTA if run.full else prefix.why_broken(state, query, run.whole_chunks)
        if reason:
            run.cover.explain(first, end, reason)

    # Segments.

    def _match(self, run: Run) -> None:
        """Asks a matcher for what lies behind the prefix; every way to get nothing names its reason."""
        query = run.query
        with self._state.lock:
            if not self._state.catalog.has_space(query.space.space_id):
                run.default = pb.REASON_NOTHING_STORED
        if run.prefix_end >= run.last_token:
            return
        if query.space.shape.prefix_only:
            run.default = pb.REASON_PREFIX_ONLY_SPACE
            return
        if not query.want_segments:
            run.default, run.detail = pb.REASON_BLENDING_OFF, "segments were not asked for"
            return
        own = self._own_position(run)
        request = matcher_pb2.MatchRequest(
            space_id=query.space.space_id,
            tokens=query.data,
            skip_tokens=run.prefix_end,
            context_classes=query.context_classes,
            store=self._store,
            epoch=self._epoch,
            l2_id=self._state.l2_owner.l2_id,
            at_least=[*run.at_least, *own],
            opaque_spans=query.spans,
        )
        try:
            answer = self._matchers.match(request, min(self._left(run), self._matcher_timeout))
        except KvblendError as error:
            run.default, run.detail = pb.REASON_MATCHER_UNAVAILABLE, error.message
            return
        run.claims = segments.claims_of(query, list(answer.segments))
        run.rest = list(answer.shortfalls)
        run.seen_sequence = max(
            (item.sequence for item in answer.applied if item.store == self._store and item.epoch == self._epoch),
            default=0,
        )

    def _left(self, run: Run) -> float:
        return max(0.0, run.deadline - self._state.clock.now())

    def _own_position(self, run: Run) -> list[pb.StreamPosition]:
        """What was committed here before is found, if the matcher catches up soon; else without it."""
        position = self._state.outbox.position()
        if not self._matchers.reachable or not position.sequence:
            return []
        applied = self._state.outbox.wait_applied(position.sequence, _CATCH_UP_SHARE * self._left(run))
        return [position] if applied else []

    def _take_segments(self, run: Run) -> list[Piece]:
        """Leases what is here of the matcher's claims; returns those that are not. Needs the lock."""
        run.served, absent = [], []
        for claim in trim(run.claims, run.prefix_end, run.last_token):
            piece, reason = segments.check(self._state, run.query, claim)
            if piece is not None and self._lease(run, piece.key):
                run.served.append(piece)
                continue
            if reason == pb.REASON_EVICTED:
                absent.append(claim)
            run.cover.explain(claim.position, claim.end, pb.REASON_QUOTA if piece is not None else reason)
        self._state.touch(run.leased[piece.key] for piece in run.served)
        return absent

    # L2.

    def _start_prefix_fetch(self, run: Run) -> dict[ChunkKey, "Future[bool]"]:
        """Fetches the chunks of the chain that are missing here but not in L2, up to the first missing in both."""
        query, l2 = run.query, self._l2
        following = [chunk for chunk in query.chain[run.whole_chunks :] if chunk.first < run.last_token]
        if l2 is None or not following or run.full:
            return {}
        with self._state.lock:
            wanted = [
                key for chunk in following for key in query.prefix_keys(chunk) if self._state.usable(key) is None
            ]
        found = l2.find(query.space, wanted, self._left(run))
        reachable: list[L2Chunk] = []
        tokens = 0
        for chunk in following:
            keys = query.prefix_keys(chunk)
            here = any(key not in wanted for key in keys)
            there = next((found[key] for key in keys if key in found), None)
            if not here and there is None:
                break
            if not here and there is not None:
                reachable.append(there)
                tokens += chunk.tokens
        return self._start_fetches(run, reachable, tokens, (run.whole_chunks, len(reachable)))

    def _start_fetches(
        self, run: Run, chunks: Sequence[L2Chunk], tokens: int, explained: tuple[int, int] | None
    ) -> dict[ChunkKey, "Future[bool]"]:
        """Starts them all, unless computing the tokens is expected to be sooner done."""
        l2 = self._l2
        if l2 is None or not chunks:
            return {}
        rate = run.query.prefill_tokens_per_second
        if rate and l2.seconds_for(sum(chunk.size for chunk in chunks)) > tokens / rate:
            if explained is not None:
                size = run.query.space.shape.chunk_tokens
                first = explained[0] * size
                run.cover.explain(first, first + explained[1] * size, pb.REASON_SLOWER_THAN_COMPUTE)
            return {}
        return {chunk.key: l2.fetch(chunk) for chunk in chunks}

    def _fetch_rest(self, run: Run, fetches: dict[ChunkKey, "Future[bool]"], absent: Sequence[Piece]) -> None:
        """Waits for what is on its way, and for the segments' chunks, until the deadline. Late data stays."""
        l2 = self._l2
        if l2 is None:
            return
        found = l2.find(run.query.space, [key for key in keys_of(absent) if key not in fetches], self._left(run))
        tokens = sum(piece.length for piece in absent if piece.key in found)
        fetches = {**fetches, **self._start_fetches(run, list(found.values()), tokens, None)}
        done, late = wait(fetches.values(), self._left(run))
        run.from_l2 = {key for key, fetch in fetches.items() if fetch in done and not fetch.cancelled() and fetch.result()}
        for piece in absent:
            if piece.key in fetches and fetches[piece.key] in late:
                run.cover.explain(piece.position, piece.end, pb.REASON_DEADLINE)
