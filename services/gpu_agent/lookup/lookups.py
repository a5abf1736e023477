"""All requests of this agent: starts or joins lookups, releases their leases, ends them."""

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field

import grpc

from kvblend.host_calls.appended import Appended
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.caller import Caller
from services.common.columns import u32s
from services.common.errors import KvblendError
from services.common.logs import get_logger
from services.gpu_agent.copying.ranges import Range
from services.gpu_agent.engines.instances import Instance
from services.gpu_agent.lookup.endings import Endings
from services.gpu_agent.lookup.leased import Ref, object_refs, refs_of
from services.gpu_agent.lookup.plan import NOTHING, Plan
from services.gpu_agent.lookup.requests import LookupJob
from services.gpu_agent.store.client import store_error
from services.gpu_agent.store.sessions import StoreLink, StoreSession

_log = get_logger("lookups")

# (owner, instance id, request id)
Key = tuple[str, str, str]

_RELEASE_SECONDS = 2.0
# Which chunks segments are made of is this agent's to know; in a long prompt's answer they are most of the bytes.
_OF_CHUNKS = ("skip_tokens", "chunk_counts", "chain_hashes", "chunk_lengths")

# Failures of the store that are no errors of a lookup: there is just nothing to reuse.
NOT_ERRORS = {
    "STORE_UNAVAILABLE": common.REASON_STORE_UNAVAILABLE,
    "NOT_READY": common.REASON_STORE_UNAVAILABLE,
    "OVERLOADED": common.REASON_STORE_UNAVAILABLE,
    "UNKNOWN_SESSION": common.REASON_SESSION_LOST,
    "DEADLINE_EXCEEDED": common.REASON_DEADLINE,
    "SUPERSEDED": common.REASON_SUPERSEDED,
}


class Lookups:
    """Requests by (owner, instance, request id). `threads` lookups run at once."""

    def __init__(self, link: StoreLink, threads: int, max_requests: int) -> None:
        self._link = link
        self._max_requests = max_requests
        # Reentrant: a future that is done already calls back in the thread that asks it to.
        self._lock = threading.RLock()
        self._jobs: dict[Key, LookupJob] = {}
        # Ended jobs that the store has not been told of yet; a new lookup under the same id waits for that.
        self._settling: dict[Key, Future[None]] = {}
        self._running = ThreadPoolExecutor(threads, thread_name_prefix="lookup")
        # Apart from the lookups, so that leases are given back however many of those wait.
        self._releasing = ThreadPoolExecutor(4, thread_name_prefix="release")
        self._endings = Endings(link)

    def start_or_join(
        self,
        key: Key,
        instance: Instance,
        request: pb.AgentServiceLookupRequest,
        prompt: bytes,
        timeout: float,
        caller: Caller,
    ) -> LookupJob:
        """The job of this request and these tokens; `timeout` seconds are the store's if it starts now.

        `request` is without its tokens, which are `prompt`. A caller that waits for the answer asks the store itself,
        if nothing stands in the way: it is done, then, when this returns.

        Raises:
            KvblendError: SUPERSEDED if a newer attempt has been seen, or nobody waits for the answer.
        """
        job = LookupJob(instance, request, prompt)
        deadline = time.monotonic() + timeout
        with self._lock:
            if caller.gone():
                # The request may have been ended already; nobody would do so again.
                raise KvblendError("SUPERSEDED", "the caller gave up before its lookup began")
            old = self._jobs.get(key)
            if old is not None and job.attempt < old.attempt:
                raise KvblendError("SUPERSEDED", f"attempt {old.attempt} of {key[2]!r} has begun")
            if old is not None and (job.attempt, job.fingerprint) == (old.attempt, old.fingerprint):
                return old
            if old is not None:
                self._end(key)
            self._jobs[key] = job
            for surplus in self._oldest_beyond_limit(key):
                self._end(surplus)
            before = self._settling.get(key)
        question = _Question(key, job, request, prompt, deadline)
        if request.no_wait or before is not None:
            self._running.submit(self._run, question, before)
        else:
            self._run(question, None)
        return job

    def _oldest_beyond_limit(self, key: Key) -> list[Key]:
        if len(self._jobs) <= self._max_requests:
            return []
        mine = [other for other in self._jobs if other[:2] == key[:2]]
        return mine[: max(0, len(mine) - self._max_requests)]

    def find(self, key: Key) -> LookupJob:
        """Raises KvblendError UNKNOWN_REQUEST."""
        with self._lock:
            job = self._jobs.get(key)
        if job is None:
            raise KvblendError("UNKNOWN_REQUEST", f"request {key[2]!r} was not looked up here, or has ended")
        return job

    def jobs_of(self, instance_id: str) -> list[LookupJob]:
        with self._lock:
            return [job for key, job in self._jobs.items() if key[1] == instance_id]

    def _run(self, question: "_Question", before: "Future[None] | None") -> None:
        key, job = question.key, question.job
        leased: list[store.ObjectColumns] = []
        unused: list[Ref] | None = None
        try:
            if before is not None:
                wait([before], max(0.0, question.deadline - time.monotonic()))
            answer, plan = self._answer(question, leased)
            job.finish(answer, plan)
            unused = plan.unused()
        except KvblendError as error:
            self._forget(key, job, error)
        except Exception as error:
            _log.error("lookup failed", exc_info=error)
            self._forget(key, job, KvblendError("INTERNAL", f"unexpected {type(error).__name__} in a lookup"))
        finally:
            # Without an answer nothing of it is used.
            self._release(job, [ref for part in leased for ref in refs_of(part)] if unused is None else unused)
            job.stopped()

    def _forget(self, key: Key, job: LookupJob, error: KvblendError) -> None:
        with self._lock:
            if self._jobs.get(key) is job:
                del self._jobs[key]
        job.fail(error)

    def _answer(self, question: "_Question", leased: list[store.ObjectColumns]) -> tuple[pb.LookupAnswer, Plan]:
        job = question.job
        try:
            summary = self._ask(question, leased)
        except KvblendError as error:
            if error.reason not in NOT_ERRORS:
                raise
            nothing = common.Shortfall(reason=NOT_ERRORS[error.reason], tokens=job.tokens, detail=error.message)
            return pb.LookupAnswer(shortfalls=[nothing]), NOTHING
        shortfalls = list(summary.shortfalls)
        if summary.segments.lengths and not job.instance.moves_segments:
            dropped = int(u32s(summary.segments.lengths).sum())
            shortfalls.append(common.Shortfall(reason=common.REASON_ROPE_NOT_REGISTERED, tokens=dropped))
            summary.ClearField("segments")
        plan = Plan(summary, leased, len(job.instance.layout.groups), job.tokens)
        answer = pb.LookupAnswer(
            prefix_tokens=summary.prefix_tokens,
            blended_tokens=summary.blended_tokens,
            segments=summary.segments,
            shortfalls=shortfalls,
            l1_chunks=summary.l1_chunks,
            l2_chunks=summary.l2_chunks,
        )
        for column in _OF_CHUNKS:
            answer.segments.ClearField(column)
        return answer, plan

    def _ask(self, question: "_Question", leased: list[store.ObjectColumns]) -> store.LookupSummary:
        """The store's summary; what it leases is added to `leased`. Raises KvblendError."""
        job, deadline = question.job, question.deadline
        session = job.session = self._link.session()
        forwarded = _store_request(question, session)
        try:
            return self._follow(job, forwarded, deadline, leased)
        except KvblendError as error:
            if error.reason == "UNKNOWN_SESSION":
                self._link.distrust(session)
            if error.reason != "UNKNOWN_MODEL_SPACE":
                raise
        self._link.register_again()
        return self._follow(job, forwarded, deadline, leased)

    def _follow(
        self, job: LookupJob, request: Appended, deadline: float, leased: list[store.ObjectColumns]
    ) -> store.LookupSummary:
        left = deadline - time.monotonic()
        if left <= 0:
            raise KvblendError("DEADLINE_EXCEEDED", "no time was left to ask the store")
        with self._link.client.latencies.timed("store.Lookup"):
            return self._receive(job, request, left, leased)

    def _receive(
        self, job: LookupJob, request: Appended, timeout: float, leased: list[store.ObjectColumns]
    ) -> store.LookupSummary:
        stream = self._link.client.lookup(request, timeout)
        job.attach(stream.cancel)
        # Now, while the store works: the prompt need not be kept for it any longer.
        job.identify()
        summary: store.LookupSummary | None = None
        try:
            # To its end, which comes with the summary: what is not read to the end is a call given up.
            for response in stream:
                leased.append(response.objects)
                if response.HasField("summary"):
                    summary = response.summary
        except grpc.RpcError as error:
            raise store_error(error) from error
        if summary is None:
            raise KvblendError("STORE_UNAVAILABLE", "the store ended its answer without a summary")
        return summary

    def _release(self, job: LookupJob, refs: list[Ref]) -> int:
        """Ends the leases of these objects. How many there were."""
        session = job.session
        if session is None or session.lost or not refs:
            return 0
        request = store.ReleaseLeasesRequest(
            session_id=session.session_id, request=job.store_key, rank=job.instance.rank, objects=object_refs(refs)
        )
        try:
            answer: store.ReleaseLeasesResponse = self._link.client.call("ReleaseLeases", request, _RELEASE_SECONDS)
        except KvblendError as error:
            # They are HELD: the store's TTL ends what this call could not.
            _log.warning("leases were not released", detail=str(error))
            return 0
        return answer.released

    def after_copies(self, copied: "Sequence[Copied]", job: LookupJob, held: ExitStack, *, keep: bool) -> None:
        """In the background: says that copies have stopped, ends the other leases unless they are to be kept, and then
        gives back what is `held`.
        """

        def run() -> None:
            with held:
                for objects in copied:
                    self._end_copies(job, objects, keep=keep)
                if not keep:
                    self.release(job, [Range(0, job.tokens)])

        try:
            self._releasing.submit(run)
        except RuntimeError:
            # The agent is closing: what is held must be given back all the same.
            run()

    def _end_copies(self, job: LookupJob, copied: "Copied", *, keep: bool) -> None:
        """Tells the store that copies out of these objects have stopped. `keep`: they will be copied again."""
        if not copied.refs or copied.session.lost:
            return
        request = store.EndCopyRequest(
            session_id=copied.session.session_id,
            request=job.store_key,
            rank=job.instance.rank,
            objects=object_refs(copied.refs),
            corrupt=object_refs(copied.corrupt),
            keep=keep,
        )
        self._link.settle("EndCopy", request, copied.session)

    def release(self, job: LookupJob, ranges: Iterable[Range]) -> int:
        """Releases the leases that only these query ranges need. Idempotent."""
        return self._release(job, job.release(ranges))

    def end(self, key: Key) -> None:
        """Ends everything of a request: at once for the caller, soon at the store. Idempotent."""
        with self._lock:
            self._end(key)

    def end_all(self, instance_id: str, owner: str) -> None:
        with self._lock:
            for key in [key for key in self._jobs if key[:2] == (owner, instance_id)]:
                self._end(key)

    def _end(self, key: Key) -> None:
        job = self._jobs.pop(key, None)
        if job is None:
            return
        job.end()
        future = self._settling[key] = self._endings.add(job)
        future.add_done_callback(lambda done: self._settled(key, done))

    def _settled(self, key: Key, done: "Future[None]") -> None:
        with self._lock:
            if self._settling.get(key) is done:
                del self._settling[key]

    def close(self) -> None:
        with self._lock:
            for key in list(self._jobs):
                self._end(key)
        self._running.shutdown(wait=True, cancel_futures=True)
        self._releasing.shutdown(wait=True)
        self._endings.close()


@dataclass(frozen=True)
class Copied:
    """Objects that were BUSY in a session, and those of them that are corrupt."""

    session: StoreSession
    refs: list[Ref]
    corrupt: list[Ref] = field(default_factory=list)


@dataclass(frozen=True)
class _Question:
    """One lookup on its way. `request` is without its tokens, which are `prompt`; `deadline` on the monotonic clock."""

    key: Key
    job: LookupJob
    request: pb.AgentServiceLookupRequest
    prompt: bytes
    deadline: float


def _store_request(question: _Question, session: StoreSession) -> Appended:
    job, request = question.job, question.request
    message = store.LookupRequest(
        session_id=session.session_id,
        request=job.store_key,
        rank=job.instance.rank,
        space=request.space,
        opaque_spans=request.opaque_spans,
        want_segments=request.want_segments,
        accept_blended=request.accept_blended,
        context_classes=request.context_classes,
        prefill_tokens_per_second=request.prefill_tokens_per_second,
        at_least=request.at_least,
    )
    return Appended(message, "tokens", memoryview(question.prompt))
