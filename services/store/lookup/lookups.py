"""The unified lookup: prefix and segments, from the arena and from L2, leased, within the caller's deadline."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, store_pb2
from services.common.caller import Caller
from services.common.columns import u32s
from services.common.errors import KvblendError
from services.store.l2.second_tier import L2
from services.store.leasing.leases import HolderKey
from services.store.lookup import segments
from services.store.lookup.answers import Answer, Answers
from services.store.lookup.leased import object_columns
from services.store.lookup.matchers import Matchers
from services.store.lookup.pieces import Pieces
from services.store.lookup.prefetch import Prefetch
from services.store.lookup.query import Query
from services.store.lookup.run import Run
from services.store.objects import ChunkKey
from services.store.publishing.changes import STORE_OWNER, Removed
from services.store.state import StoreState

# Of the caller's time, kept for the way back.
_RESERVE = 0.1
# Of the time left, what goes at most into waiting until the log has this store's own stream.
_CATCH_UP_SHARE = 0.2


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
        self,
        query: Query,
        holder: HolderKey,
        at_least: Sequence[pb.StreamPosition],
        remaining: float,
        caller: Caller,
    ) -> Iterator[store_pb2.LookupResponse]:
        """What is in the arena first, then what landed since; the last message has the summary.

        `remaining`: seconds until the caller's deadline.

        Raises:
            KvblendError: SUPERSEDED, also if the caller is gone; DEADLINE_EXCEEDED: another rank's call still makes
                the answer.
        """
        now = self._state.clock.now()
        deadline = now + remaining * (1 - _RESERVE)
        answer, leads, superseded = self.answers.enter(holder, query.digest, now, caller.gone)
        if superseded:
            with self._state.lock:
                self._state.leases.end_request(holder.session, holder.request_id)
        if not leads:
            yield self._follow(query, holder, answer, deadline)
            return
        with self.answers.leading(holder, query.digest, answer):
            run = Run(self._state, query, holder)
            if self._l2 is None:
                yield from self._lead(run, answer, at_least, deadline, None, caller)
            else:
                with closing(Prefetch(self._l2, self._state, run, deadline)) as prefetch:
                    yield from self._lead(run, answer, at_least, deadline, prefetch, caller)

    def end_request(self, session: bytes, request_id: str) -> None:
        self.answers.end_request(session, request_id)
        with self._state.lock:
            self._state.leases.end_request(session, request_id)
        if self._l2 is not None:
            self._l2.end_request(session, request_id)

    def give_up(self, holder: HolderKey) -> None:
        """The call that makes this holder's answer is gone: what it waits for is not fetched for it any more."""
        if self._l2 is not None:
            self._l2.fetches.give_up(holder)

    @contextmanager
    def _leasing(self, query: Query, holder: HolderKey) -> Iterator[None]:
        """The state's lock, while the request still wants this answer: no lease outlives its end."""
        with self._state.lock:
            if not self.answers.is_current(holder, query.digest):
                raise KvblendError("SUPERSEDED", "the request ended or asked something else meanwhile")
            yield

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._state.clock.now())

    def _follow(self, query: Query, holder: HolderKey, answer: Answer, deadline: float) -> store_pb2.LookupResponse:
        """Another rank, or the same again: the same answer, leased for the caller."""
        if not answer.done.wait(self._left(deadline)):
            raise KvblendError("DEADLINE_EXCEEDED", "the answer is still being made")
        if answer.summary is None:
            raise KvblendError("SUPERSEDED", "the call that made this answer was given up; ask again")
        with self._leasing(query, holder):
            state = self._state
            wall = state.clock.wall()
            here = [chunk for chunk in answer.chunks if chunk.resident and chunk.usable(wall)]
            here = here[: state.lease(holder, here)]
            state.touch(here)
            return store_pb2.LookupResponse(objects=object_columns(state, here, holder.rank), summary=answer.summary)

    def _lead(
        self,
        run: Run,
        answer: Answer,
        at_least: Sequence[pb.StreamPosition],
        deadline: float,
        prefetch: Prefetch | None,
        caller: Caller,
    ) -> Iterator[store_pb2.LookupResponse]:
        with self._leasing(run.query, run.holder):
            run.extend_prefix()
        if prefetch is not None:
            prefetch.ask()
        seen = self._match(run, at_least, deadline)
        with self._leasing(run.query, run.holder):
            absent = run.take_segments()
            objects, known = run.objects(), run.leased
        if prefetch is not None and prefetch.wanted(absent.sources):
            yield store_pb2.LookupResponse(objects=objects)
            prefetch.fetch(absent)
            with self._leasing(run.query, run.holder):
                run.extend_prefix()
                absent = run.take_segments()
                objects = run.objects(known)
        self._disown(run, absent, seen)
        with self._state.lock:
            summary = run.summary(self._epoch)
        answer.chunks, answer.summary = run.leased, summary
        caller.when_answered(lambda: self._used(run, summary))
        yield store_pb2.LookupResponse(objects=objects, summary=summary)

    def _used(self, run: Run, summary: store_pb2.LookupSummary) -> None:
        with self._state.lock:
            run.touch()
            self._count(run, summary)

    def _count(self, run: Run, summary: store_pb2.LookupSummary) -> None:
        stats = self._state.stats
        stats.add("lookups")
        stats.add("requested_tokens", run.query.count)
        stats.add("prefix_hit_tokens", summary.prefix_tokens)
        stats.add("segment_hit_tokens", int(u32s(summary.segments.lengths).sum()))
        for shortfall in summary.shortfalls:
            stats.shortfall(pb.Reason.Name(shortfall.reason), shortfall.tokens)

    def _match(self, run: Run, at_least: Sequence[pb.StreamPosition], deadline: float) -> int:
        """Asks a matcher for what lies behind the prefix; each way to get nothing names its reason.

        Returns the log position of the matcher's answer.
        """
        query = run.query
        with self._state.lock:
            empty = not self._state.catalog.has_space(query.space.space_id)
        if empty:
            run.default = pb.REASON_NOTHING_STORED, ""
        elif query.space.shape.prefix_only:
            run.default = pb.REASON_PREFIX_ONLY_SPACE, ""
        elif not query.want_segments:
            run.default = pb.REASON_BLENDING_OFF, "segments were not asked for"
        if run.prefix_end >= run.last_token or query.space.shape.prefix_only or not query.want_segments:
            return 0
        at_least = self._catch_up(at_least, deadline)
        request = matcher_pb2.MatchRequest(
            space_id=query.space.space_id,
            skip_tokens=run.prefix_end,
            context_classes=query.context_classes,
            store=self._store,
            epoch=self._epoch,
            l2_id=self._state.l2_id,
            at_least=at_least,
            opaque_spans=query.spans,
        )
        try:
            answer = self._matchers.match(request, query.data, min(self._left(deadline), self._matcher_timeout))
        except KvblendError as error:
            run.default = pb.REASON_MATCHER_UNAVAILABLE, error.message
            return 0
        run.claims = segments.claims_of(query, answer.segments)
        run.rest = list(answer.shortfalls)
        return answer.log_position

    def _catch_up(self, at_least: Sequence[pb.StreamPosition], deadline: float) -> list[pb.StreamPosition]:
        """The positions to ask a matcher for: what was committed here before will be found, if the log has it soon."""
        outbox = self._state.outbox
        outbox.wait_durable(outbox.position().sequence, _CATCH_UP_SHARE * self._left(deadline))
        durable = outbox.durable_position()
        # Of this store's own stream no matcher has more than the log.
        others = [position for position in at_least if position.store != self._store]
        return [*others, durable] if durable.sequence else others

    def _disown(self, run: Run, absent: Pieces[ChunkKey], seen: int) -> None:
        """Tells the matchers of claims that are not so."""
        keys = [key for key in dict.fromkeys(absent.sources) if not run.missing.reason(key) and key not in run.from_l2]
        with self._state.lock:
            for key in keys:
                chunk = self._state.catalog.get(key)
                if chunk is None or not chunk.complete:
                    self._state.stats.add("disowned_chunks")
                    self._state.outbox.append(Removed(key, STORE_OWNER))
        if self._l2 is not None and keys:
            self._l2.disown(run.query.space, keys, seen)
