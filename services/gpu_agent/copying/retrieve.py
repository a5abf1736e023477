"""Arena to engine: writes what a lookup found to its place in the prompt, and says which tokens are good.

The copy runs while the store is asked to hold the objects. What it says decides all the same: a block that was not this
request's to read, or ceased to be, is found out before anything is called written. What lies in the slots of such
tokens then is not defined.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.checksums import checksum_of
from services.common.columns import Numbers
from services.common.errors import KvblendError
from services.common.failpoints import passage
from services.common.logs import get_logger
from services.gpu_agent.call import Call
from services.gpu_agent.copying.parts import Parts
from services.gpu_agent.devices.base import Bytes, Device, Hung, KvMemory, Piece, Steps, Stopped, Transfer
from services.gpu_agent.engines.instances import Instance
from services.gpu_agent.engines.order import wait_for_engine
from services.gpu_agent.lookup.leased import Leased, object_refs
from services.gpu_agent.lookup.lookups import NOT_ERRORS, Copied, Lookups
from services.gpu_agent.lookup.plan import Chunks
from services.gpu_agent.lookup.requests import LookupJob
from services.gpu_agent.store.arena import Arena
from services.gpu_agent.store.client import UNCERTAIN
from services.gpu_agent.store.sessions import SETTLE_SECONDS, SessionLost, StoreLink, StoreSession
from services.gpu_agent.totals import Totals

_log = get_logger("retrieve")

_GOOD = common.REASON_UNSPECIFIED


@dataclass
class _Work:
    """One retrieve. `steps` are those whose semaphores an engine waits for; None: it waits for the answer."""

    instance: Instance
    job: LookupJob
    chunks: Chunks
    leased: Leased
    parts: Parts
    keep: bool
    steps: Steps | None

    def rows(self) -> Numbers:
        """The objects of the parts that are good so far."""
        return self.chunks.rows(self.parts.chunks[self.parts.good()])


class Retriever:
    def __init__(self, device: Device, link: StoreLink, lookups: Lookups, totals: Totals) -> None:
        self._device = device
        self._link = link
        self._lookups = lookups
        self._totals = totals

    def retrieve(
        self, instance: Instance, job: LookupJob, request: pb.RetrieveRequest, call: Call
    ) -> pb.RetrieveResponse:
        """Writes and answers; releases the request's leases in every outcome unless they are to be kept.

        Raises:
            KvblendError: for a request that cannot be meant; then nothing has been written. INTERNAL for a copy that
                does not end: it may write for as long as the memory is registered.
        """
        if not job.retrieving.acquire(timeout=call.left()):
            raise KvblendError("DEADLINE_EXCEEDED", "another retrieve of this request does not end")
        copied: list[Copied] = []
        with ExitStack() as held:
            held.callback(job.retrieving.release)
            held.enter_context(job.copying())
            try:
                return self._retrieve(instance, job, request, call, copied)
            finally:
                rest = held.pop_all()
                # The answer goes first: the engine waits for it.
                call.when_answered(lambda: self._lookups.after_copies(copied, job, rest, keep=request.keep_leases))

    def _retrieve(
        self, instance: Instance, job: LookupJob, request: pb.RetrieveRequest, call: Call, copied: list[Copied]
    ) -> pb.RetrieveResponse:
        """Adds to `copied` what the store has to be told of."""
        parts = Parts(job.chunks, job.tokens, request, instance.layout)
        steps = _steps(request.steps, instance.memory)
        work = _Work(instance, job, job.chunks, job.leased, parts, request.keep_leases, steps)
        work.parts.judge(_hindrances(work))
        wait_for_engine(self._device, instance, request.event, call)
        try:
            self._copy(work, call, copied)
        except KvblendError as error:
            if error.reason not in NOT_ERRORS:
                raise
            work.parts.fail(NOT_ERRORS[error.reason])
        except SessionLost:
            work.parts.fail(common.REASON_SESSION_LOST)
        if work.steps is not None:
            # An engine must not wait for what has failed.
            _set_semaphores(instance, work.steps)
        response, written, failed = parts.answer(sum(shape.token_bytes for shape in instance.layout.groups))
        self._totals.add_retrieve(response.bytes, written, failed)
        return response

    def _copy(self, work: _Work, call: Call, copied: list[Copied]) -> None:
        session = work.job.session
        if session is None or not len(work.parts.good()):
            return
        with ExitStack() as held:
            memory = held.enter_context(work.instance.copying())
            arena = held.enter_context(session.copying())
            blocks = _blocks(arena, work)
            rows = work.rows()
            if not len(rows):
                return
            answer = self._begin(work, session, rows, call)
            begun: Numbers | None = None
            if work.steps is not None:
                # The engine reads before the answer: nothing may arrive that is not this request's.
                begun = self._begun(session, answer, rows)
                work.parts.judge_objects(work.chunks, rows, begun)
            try:
                passage("agent.scatter")
                with self._link.client.latencies.timed("retrieve.copy"):
                    sums = _scatter(work, memory, blocks, call)
            except Hung as hung:
                # Quarantines the blocks: a lost session is called drained only when nothing copies in it any more.
                self._link.distrust(session)
                hung.keep(held)
                # No answer: the engine would take its slots for its own again, and the copy may write them yet.
                raise KvblendError("INTERNAL", f"{hung}; it may still write the slots of this request") from hung
            except BaseException:
                # Nobody waits for what the store says: only a new session is certain.
                self._link.distrust(session)
                raise
            if begun is None:
                begun = self._begun(session, answer, rows)
                work.parts.judge_objects(work.chunks, rows, begun)
            copied.append(Copied(session, work.leased.refs(rows[begun == _GOOD])))
            corrupt = _verify(arena, work, blocks, sums, call)
            copied[-1].corrupt.extend(work.leased.refs(corrupt))
            work.job.copied(corrupt if work.keep else rows[begun == _GOOD])
            passage("agent.end")

    def _begin(self, work: _Work, session: StoreSession, rows: Numbers, call: Call) -> Callable[[], Any]:
        """Asks for HELD -> BUSY of these objects."""
        request = store.BeginCopyRequest(
            session_id=session.session_id,
            request=work.job.store_key,
            rank=work.instance.rank,
            objects=object_refs(work.leased.refs(rows)),
        )
        return self._link.client.start("BeginCopy", request, call.at_least(SETTLE_SECONDS))

    def _begun(self, session: StoreSession, answer: Callable[[], Any], rows: Numbers) -> Numbers:
        """Why each of these objects is not BUSY; REASON_UNSPECIFIED: it is."""
        try:
            with self._link.client.latencies.timed("retrieve.begin"):
                begun: store.BeginCopyResponse = answer()
        except KvblendError as error:
            if error.reason in UNCERTAIN:
                # The store may have made them BUSY, or has lost the session: only a new one is certain.
                self._link.distrust(session)
            raise
        if len(begun.reasons) != len(rows):
            self._link.distrust(session)
            raise KvblendError("INTERNAL", "the store answered for other objects than it was asked about")
        return np.array(begun.reasons, np.int64)


def _steps(asked: pb.LayerSteps, memory: KvMemory) -> Steps | None:
    """Raises KvblendError for semaphores that there are not."""
    if not asked.count:
        return None
    if asked.first + asked.count > memory.semaphores:
        raise KvblendError(
            "INVALID_ARGUMENT",
            f"semaphores {asked.first} to {asked.first + asked.count - 1} of {memory.semaphores} that are registered",
        )
    return Steps(asked.count, asked.first, asked.value)


def _set_semaphores(instance: Instance, steps: Steps) -> None:
    with ExitStack() as held:
        memory = held.enter_context(instance.copying())
        try:
            memory.set_semaphores(steps)
        except Hung as hung:
            _log.warning("an engine waits for the device", instance=instance.instance_id, detail=str(hung))
            hung.keep(held)


def _hindrances(work: _Work) -> Numbers:
    """[chunks]: why a chunk cannot be written whatever the store says; REASON_UNSPECIFIED: it can."""
    instance, chunks = work.instance, work.chunks
    found = chunks.flaws(work.leased, instance.layout.groups)
    found[(found == _GOOD) & work.job.released()] = common.REASON_LEASE_REVOKED
    moved = (found == _GOOD) & (chunks.deltas != 0)
    if not all(rope.relative for rope in instance.ropes):
        found[moved] = common.REASON_PREFIX_ONLY_SPACE
    elif not instance.moves_segments:
        found[moved] = common.REASON_ROPE_NOT_REGISTERED
    return found


def _blocks(arena: Arena, work: _Work) -> dict[int, Bytes]:
    """The blocks of the good parts, by row. Parts whose block is unusable get their reason."""
    leased, rows = work.leased, work.rows()
    blocks: dict[int, Bytes] = {}
    reasons = np.full(len(rows), _GOOD, np.int64)
    places = (rows, leased.headers[rows], leased.slabs[rows], leased.offsets[rows], leased.payload_bytes[rows])
    for index, (row, *place) in enumerate(zip(*(column.tolist() for column in places), strict=True)):
        try:
            blocks[row] = arena.block(*place)
        except (ValueError, OSError) as error:
            _log.error("a leased object cannot be mapped", detail=str(error))
            reasons[index] = common.REASON_OUT_OF_BOUNDS
    work.parts.judge_objects(work.chunks, rows, reasons)
    return blocks


def _scatter(work: _Work, memory: KvMemory, blocks: dict[int, Bytes], call: Call) -> dict[int, int]:
    """One pass over the layers of each group, for all good parts together. Checksums that the device found, by row."""
    found: dict[int, int] = {}
    good = work.parts.good()
    if not len(good):
        return found
    of = work.chunks.objects[work.parts.chunks[good]].T
    transfers = [
        Transfer(group, _pieces(work, good, rows, blocks), rope)
        for group, (rows, rope) in enumerate(zip(of, work.instance.ropes, strict=True))
    ]
    try:
        for rows, sums in zip(of, _write(work, memory, transfers, call), strict=True):
            found.update({row: value for row, value in zip(rows.tolist(), sums, strict=True) if value is not None})
    except Stopped as stopped:
        work.parts.fail(stopped.reason)
    except Hung:
        raise
    except Exception as error:
        _log.error("a copy failed", exc_info=error)
        work.parts.fail(common.REASON_COPY_FAILED)
    return found


def _write(work: _Work, memory: KvMemory, transfers: list[Transfer], call: Call) -> Sequence[Sequence[int | None]]:
    if work.steps is None:
        return [memory.scatter(transfer.group, transfer.pieces, transfer.rope, call.watch) for transfer in transfers]
    sums = memory.scatter_in_steps(transfers, work.steps, call.watch)
    work.steps = None
    return sums


def _pieces(work: _Work, good: Numbers, rows: Numbers, blocks: dict[int, Bytes]) -> list[Piece]:
    """What one layer group copies for these parts out of these objects."""
    parts, chunks, leased = work.parts, work.chunks, work.leased
    of = parts.chunks[good]
    firsts = parts.firsts[good]
    columns = (
        rows,
        leased.tokens[rows],
        chunks.skips[of] + firsts - chunks.query_positions[of],
        firsts,
        parts.ends[good],
        chunks.deltas[of],
        leased.verify[rows],
    )
    return [
        Piece(blocks[row], tokens, skip, parts.slots[first:end], delta, verify)
        for row, tokens, skip, first, end, delta, verify in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _verify(arena: Arena, work: _Work, blocks: dict[int, Bytes], sums: dict[int, int], call: Call) -> Numbers:
    """Parts whose objects are not what they were said to be get their reason; the rows of those that are corrupt."""
    try:
        # The request may have ended since the last layer.
        call.watch()
    except Stopped as stopped:
        work.parts.fail(stopped.reason)
    leased, rows = work.leased, work.rows()
    checked = rows[leased.verify[rows]]
    wanted = leased.checksums[checked].tolist()
    differs = np.zeros(len(leased), np.bool_)
    for row, checksum in zip(checked.tolist(), wanted, strict=True):
        found = sums[row] if row in sums else checksum_of(blocks[row].data)
        differs[row] = found != checksum
    # Asked after the last byte was read. A block that was taken away in the meantime is stale, not corrupt.
    reasons = arena.staleness(leased.headers[rows], leased.generations[rows])
    corrupt = differs[rows] & (reasons == _GOOD)
    reasons[corrupt] = common.REASON_CHECKSUM_MISMATCH
    work.parts.judge_objects(work.chunks, rows, reasons)
    found_corrupt: Numbers = rows[corrupt]
    return found_corrupt
