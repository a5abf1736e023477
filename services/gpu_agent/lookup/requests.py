"""One lookup of one request: its answer, the leases behind it, and the copies that use them."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from blake3 import blake3

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.columns import Numbers
from services.common.errors import KvblendError
from services.common.tokens import TOKEN_BYTES
from services.gpu_agent.copying.ranges import Mask, Range, mask_of
from services.gpu_agent.devices.base import Stopped
from services.gpu_agent.engines.instances import Instance
from services.gpu_agent.lookup.leased import Leased, Ref
from services.gpu_agent.lookup.plan import NOTHING, Chunks, Plan
from services.gpu_agent.store.sessions import StoreSession

_MAX_STORE_ID_BYTES = 128


def store_request_id(instance_id: str, request_id: str) -> str:
    """The request's id at the store: two engines of one agent may use the same ids."""
    name = f"{instance_id}/{request_id}"
    if len(name.encode()) <= _MAX_STORE_ID_BYTES:
        return name
    return hashlib.blake2b(name.encode(), digest_size=32).hexdigest()


class LookupJob:
    """Immutable once done: whoever asks for this (request, attempt) reads the same answer."""

    def __init__(self, instance: Instance, request: pb.AgentServiceLookupRequest, prompt: bytes) -> None:
        """`request` is without its tokens, which are `prompt`: nobody copies them twice."""
        self.instance = instance
        self.attempt = request.request.attempt
        self.tokens = len(prompt) // TOKEN_BYTES
        # What it is, until somebody asks for its digest.
        self._question: tuple[pb.AgentServiceLookupRequest, bytes] | None = (request, prompt)
        self._fingerprint = b""
        self.store_key = common.RequestKey(
            request_id=store_request_id(instance.instance_id, request.request.request_id), attempt=self.attempt
        )
        self.started = time.monotonic()
        self.session: StoreSession | None = None
        self._plan = NOTHING
        # Retrieves of one request follow each other.
        self.retrieving = threading.Lock()
        self._key = request.request
        self._changed = threading.Condition()
        self._answer: pb.LookupAnswer | None = None
        self._error: KvblendError | None = None
        self._cancel: Callable[[], Any] | None = None
        self._ended = False
        self._running = True
        self._copies = 0
        # Rows of `leased` whose leases have ended, or are about to.
        self._released: set[int] = set()
        self._released_tokens: Mask = np.zeros(self.tokens, np.bool_)

    def identify(self) -> None:
        """Makes the fingerprint, and forgets the prompt. Not done at the start: the store's time is enough for it."""
        question = self._question
        if question is not None and not self._fingerprint:
            self._fingerprint = _fingerprint(*question)
            # Only now: another thread may be here as well.
            self._question = None

    @property
    def fingerprint(self) -> bytes:
        """Equal for lookups that ask the same."""
        self.identify()
        return self._fingerprint

    @property
    def chunks(self) -> Chunks:
        """Of the answer; none before it is there."""
        return self._plan.chunks

    @property
    def leased(self) -> Leased:
        return self._plan.leased

    def attach(self, cancel: Callable[[], Any]) -> None:
        """`cancel` ends the running call to the store."""
        with self._changed:
            self._cancel = cancel
            ended = self._ended
        if ended:
            cancel()

    def finish(self, answer: pb.LookupAnswer, plan: Plan) -> None:
        answer.state = pb.LOOKUP_STATE_DONE
        answer.request.CopyFrom(self._key)
        with self._changed:
            self._answer, self._plan, self._cancel = answer, plan, None
            self._changed.notify_all()

    def fail(self, error: KvblendError) -> None:
        with self._changed:
            self._error, self._cancel = error, None
            self._changed.notify_all()

    def wait(self, timeout: float) -> pb.LookupAnswer:
        """The answer, or one that says RUNNING after `timeout` seconds.

        Raises:
            KvblendError: what ended the lookup; SUPERSEDED if its request ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._answer or self._error or self._ended, max(0.0, timeout))
            if self._ended:
                raise KvblendError("SUPERSEDED", "the request ended, or was replaced by a newer attempt")
            if self._error is not None:
                raise self._error
            return self._answer or pb.LookupAnswer(state=pb.LOOKUP_STATE_RUNNING, request=self._key)

    def end(self) -> None:
        """No copy may begin any more; those that run stop at their next layer."""
        with self._changed:
            self._ended = True
            cancel = self._cancel
            self._changed.notify_all()
        if cancel is not None:
            cancel()

    def watch(self) -> None:
        if self._ended:
            raise Stopped(common.REASON_SUPERSEDED)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Raises KvblendError SUPERSEDED once the request has ended."""
        with self._changed:
            if self._ended:
                raise KvblendError("SUPERSEDED", "the request ended, or was replaced by a newer attempt")
            self._copies += 1
        try:
            yield
        finally:
            with self._changed:
                self._copies -= 1
                self._changed.notify_all()

    def stopped(self) -> None:
        """The lookup itself makes no call any more."""
        with self._changed:
            self._running = False
            self._changed.notify_all()

    @property
    def quiet(self) -> bool:
        """Neither the lookup nor a copy runs. Once the request has ended it stays so."""
        return not self._copies and not self._running

    def wait_quiet(self, timeout: float) -> None:
        """At most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.quiet, timeout)

    def copied(self, rows: Numbers) -> None:
        """The leases of these objects end with their copies."""
        with self._changed:
            self._released.update(rows.tolist())

    def released(self) -> Mask:
        """[chunks]; set where an object of the chunk is leased no more."""
        with self._changed:
            rows = np.fromiter(self._released, np.int64, len(self._released))
        return np.asarray(np.isin(self.chunks.objects, rows).any(axis=1))

    def release(self, ranges: Iterable[Range]) -> list[Ref]:
        """Objects of which no token is needed any more, now that these query ranges are not; each told once."""
        with self._changed:
            self._released_tokens |= mask_of(ranges, self.tokens)
            positions, chunks = self.chunks.tokens()
            needed = np.zeros(len(self.chunks), np.bool_)
            needed[chunks[~self._released_tokens[positions]]] = True
            still = self.chunks.rows(np.flatnonzero(needed)).tolist()
            freed = set(self.chunks.rows(np.flatnonzero(~needed)).tolist()) - set(still) - self._released
            self._released |= freed
            return self.leased.refs(np.array(sorted(freed), np.int64))

    def oldest_lease(self) -> float | None:
        """When its leases began, by the monotonic clock; None: it holds none."""
        with self._changed:
            if not self._released:
                return self.started if self._plan.count else None
            held = not self._released.issuperset(self.chunks.rows(np.arange(len(self.chunks))).tolist())
        return self.started if held else None


def _fingerprint(request: pb.AgentServiceLookupRequest, prompt: bytes) -> bytes:
    """What makes it another lookup under the same id: everything but how long to wait for it."""
    same = pb.AgentServiceLookupRequest()
    same.CopyFrom(request)
    same.ClearField("no_wait")
    question = same.SerializeToString(deterministic=True)
    return blake3(len(question).to_bytes(4, "little") + question).update(prompt).digest(16)


class Ticket:
    """One store in flight."""

    def __init__(self) -> None:
        self.stopped = False

    def watch(self) -> None:
        """Raises Stopped once the request has ended."""
        if self.stopped:
            raise Stopped(common.REASON_SUPERSEDED)


class Tickets:
    """Stores in flight, by (owner, instance id, request id): ending the request stops them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str, str], list[Ticket]] = {}

    @contextmanager
    def open(self, key: tuple[str, str, str]) -> Iterator[Ticket]:
        ticket = Ticket()
        with self._lock:
            self._open.setdefault(key, []).append(ticket)
        try:
            yield ticket
        finally:
            with self._lock:
                self._open[key].remove(ticket)
                if not self._open[key]:
                    del self._open[key]

    def stop(self, key: tuple[str, str, str]) -> None:
        with self._lock:
            for ticket in self._open.get(key, ()):
                ticket.stopped = True
