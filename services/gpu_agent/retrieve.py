"""Arena to engine: writes what a lookup found to its place in the prompt, and says which tokens are good."""

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.checksums import checksum_of
from services.common.errors import KvblendError
from services.common.failpoints import passage
from services.common.logs import get_logger
from services.gpu_agent.arena import Arena
from services.gpu_agent.call import Call
from services.gpu_agent.devices.base import Bytes, Device, Hung, KvMemory, Piece, Stopped
from services.gpu_agent.instances import Instance
from services.gpu_agent.lookups import NOT_ERRORS, Lookups, object_refs
from services.gpu_agent.plan import ChunkUse, LeasedObject, Ref, ref_of
from services.gpu_agent.ranges import Mask, Range, mask_of, parse_ranges, ranges_of
from services.gpu_agent.requests import LookupJob
from services.gpu_agent.sessions import SETTLE_SECONDS, SessionLost, StoreLink, StoreSession
from services.gpu_agent.slots import Slots, SlotTable
from services.gpu_agent.store_client import UNCERTAIN
from services.gpu_agent.totals import Totals

_log = get_logger("retrieve")

_GOOD = common.REASON_UNSPECIFIED


@dataclass
class _Part:
    """The wanted tokens [first, end) of one chunk's use, and what became of them."""

    use: ChunkUse
    first: int
    end: int
    reason: common.Reason

    @property
    def good(self) -> bool:
        return self.reason == _GOOD


@dataclass(frozen=True)
class _Work:
    """One retrieve. `slots` has one entry for each token of the prompt, -1 where nothing is written."""

    instance: Instance
    job: LookupJob
    parts: list[_Part]
    slots: Slots
    keep: bool

    def good(self) -> list[_Part]:
        return [part for part in self.parts if part.good]

    def fail(self, reason: common.Reason) -> None:
        """Whatever was good so far is not."""
        for part in self.good():
            part.reason = reason


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
            KvblendError: for a request that cannot be meant; then nothing has been written.
        """
        if not job.retrieving.acquire(timeout=call.left()):
            raise KvblendError("DEADLINE_EXCEEDED", "another retrieve of this request does not end")
        try:
            with job.copying():
                try:
                    return self._retrieve(instance, job, request, call)
                finally:
                    if not request.keep_leases:
                        self._lookups.release(job, [Range(0, job.tokens)])
        finally:
            job.retrieving.release()

    def _retrieve(
        self, instance: Instance, job: LookupJob, request: pb.RetrieveRequest, call: Call
    ) -> pb.RetrieveResponse:
        wanted = _wanted(job, request)
        covered = mask_of((Range(use.query_position, use.end) for use in job.uses), job.tokens)
        slots = np.full(job.tokens, -1, np.int64)
        to_write = np.flatnonzero(wanted & covered)
        slots[to_write] = SlotTable(request.slots, instance.layout).of(to_write)
        parts = [part for use in job.uses for part in _parts(instance, job, use, wanted)]
        work = _Work(instance, job, parts, slots, request.keep_leases)
        self._device.wait(request.event, call.left())
        try:
            self._copy(work, call)
        except KvblendError as error:
            if error.reason not in NOT_ERRORS:
                raise
            work.fail(NOT_ERRORS[error.reason])
        except SessionLost:
            work.fail(common.REASON_SESSION_LOST)
        return self._answer(work, wanted & ~covered)

    def _copy(self, work: _Work, call: Call) -> None:
        session = work.job.session
        if session is None or not work.good():
            return
        with ExitStack() as held:
            memory = held.enter_context(work.instance.copying())
            arena = held.enter_context(session.copying())
            begun = self._begin(work, session, call)
            corrupt: set[Ref] = set()
            try:
                passage("agent.scatter")
                blocks = _blocks(arena, work)
                found = _scatter(work, memory, blocks, call)
                for part in work.good():
                    part.reason = _flaw(arena, part.use, blocks, found, corrupt)
                passage("agent.end")
            except Hung as hung:
                work.fail(common.REASON_COPY_FAILED)
                # Quarantines the blocks: a lost session is called drained only when nothing copies in it any more.
                self._link.distrust(session)
                hung.keep(held)
            finally:
                self._end(work, session, begun, corrupt)

    def _begin(self, work: _Work, session: StoreSession, call: Call) -> set[Ref]:
        """HELD -> BUSY for what the parts need; parts that may not be copied get their reason."""
        refs = sorted({ref for part in work.good() for ref in part.use.refs()})
        request = store.BeginCopyRequest(
            session_id=session.session_id,
            request=work.job.store_key,
            rank=work.instance.rank,
            objects=object_refs(refs),
        )
        try:
            answer: store.BeginCopyResponse = self._link.client.call(
                "BeginCopy", request, call.at_least(SETTLE_SECONDS)
            )
        except KvblendError as error:
            if error.reason in UNCERTAIN:
                # The store may have made them BUSY, or has lost the session: only a new one is certain.
                self._link.distrust(session)
            raise
        if len(answer.reasons) != len(refs):
            self._link.distrust(session)
            raise KvblendError("INTERNAL", "the store answered for other objects than it was asked about")
        reasons = dict(zip(refs, answer.reasons, strict=True))
        for part in work.good():
            part.reason = next((reasons[ref] for ref in part.use.refs() if reasons[ref] != _GOOD), _GOOD)
        return {ref for ref, reason in reasons.items() if reason == _GOOD}

    def _end(self, work: _Work, session: StoreSession, begun: set[Ref], corrupt: set[Ref]) -> None:
        if not session.lost:
            self._lookups.end_copies(work.job, session, begun, corrupt, keep=work.keep)
        work.job.copied(corrupt if work.keep else begun)

    def _answer(self, work: _Work, uncovered: Mask) -> pb.RetrieveResponse:
        reasons = np.full(len(uncovered), -1, np.int64)
        reasons[uncovered] = common.REASON_NOT_IN_ANSWER
        for part in work.parts:
            reasons[part.first : part.end] = part.reason
        response = pb.RetrieveResponse(written=[item.message() for item in ranges_of(reasons == _GOOD)])
        for reason in np.unique(reasons[reasons > _GOOD]).tolist():
            response.failed.extend(
                pb.FailedRange(range=item.message(), reason=reason) for item in ranges_of(reasons == reason)
            )
        written, failed = int((reasons == _GOOD).sum()), int((reasons > _GOOD).sum())
        response.bytes = written * sum(shape.token_bytes for shape in work.instance.layout.groups)
        self._totals.add_retrieve(response.bytes, written, failed)
        return response


def _wanted(job: LookupJob, request: pb.RetrieveRequest) -> Mask:
    """Flags of the tokens to write: the ranges named, or else all that was found."""
    ranges = parse_ranges(request.ranges, job.tokens) or [Range(use.query_position, use.end) for use in job.uses]
    wanted = mask_of(ranges, job.tokens)
    wanted[: request.skip_first_tokens] = False
    return wanted


def _parts(instance: Instance, job: LookupJob, use: ChunkUse, wanted: Mask) -> list[_Part]:
    inside = wanted[use.query_position : use.end]
    if not inside.any():
        return []
    reason = _hindrance(instance, job, use)
    return [
        _Part(use, use.query_position + item.first, use.query_position + item.end, reason) for item in ranges_of(inside)
    ]


def _hindrance(instance: Instance, job: LookupJob, use: ChunkUse) -> common.Reason:
    """Why this chunk cannot be written whatever the store says; REASON_UNSPECIFIED: it can."""
    flaw = use.flaw(instance.layout.groups)
    if flaw != _GOOD:
        return flaw
    if job.is_released(use):
        return common.REASON_LEASE_REVOKED
    if use.delta and not all(rope.relative for rope in instance.ropes):
        return common.REASON_PREFIX_ONLY_SPACE
    if use.delta and not instance.moves_segments:
        return common.REASON_ROPE_NOT_REGISTERED
    return _GOOD


def _blocks(arena: Arena, work: _Work) -> dict[Ref, Bytes]:
    """The blocks of the good parts. Parts whose block is unusable get their reason."""
    blocks: dict[Ref, Bytes] = {}
    reasons: dict[Ref, common.Reason] = {}
    for part in work.good():
        for item in part.use.objects:
            if not part.good or item is None:
                continue
            ref = ref_of(item.place)
            if ref not in reasons:
                reasons[ref] = _open_block(arena, item, blocks)
            part.reason = reasons[ref]
    return blocks


def _open_block(arena: Arena, item: LeasedObject, blocks: dict[Ref, Bytes]) -> common.Reason:
    try:
        blocks[ref_of(item.place)] = arena.block(item.place)
    except (ValueError, OSError) as error:
        _log.error("a leased object cannot be mapped", detail=str(error))
        return common.REASON_OUT_OF_BOUNDS
    return _GOOD


def _scatter(work: _Work, memory: KvMemory, blocks: dict[Ref, Bytes], call: Call) -> dict[Ref, int]:
    """One pass over the layers of each group, for all good parts together; checksums that the device has found."""
    good = work.good()
    found: dict[Ref, int] = {}
    if not good:
        return found
    try:
        for group, rope in enumerate(work.instance.ropes):
            items = [part.use.objects[group] for part in good]
            pieces = [_piece(part, group, blocks, work.slots) for part in good]
            for item, checksum in zip(items, memory.scatter(group, pieces, rope, call.watch), strict=True):
                if item is not None and checksum is not None:
                    found[ref_of(item.place)] = checksum
    except Stopped as stopped:
        work.fail(stopped.reason)
    except Hung:
        raise
    except Exception as error:
        _log.error("a copy failed", exc_info=error)
        work.fail(common.REASON_COPY_FAILED)
    return found


def _piece(part: _Part, group: int, blocks: dict[Ref, Bytes], slots: Slots) -> Piece:
    use, item = part.use, part.use.objects[group]
    assert item is not None
    first = use.skip + part.first - use.query_position
    return Piece(blocks[ref_of(item.place)], item.tokens, first, slots[part.first : part.end], use.delta, item.verify)


def _flaw(
    arena: Arena, use: ChunkUse, blocks: dict[Ref, Bytes], found: dict[Ref, int], corrupt: set[Ref]
) -> common.Reason:
    """Why what was copied of these objects may not be called good; corrupt ones are added to `corrupt`."""
    for item in use.objects:
        if item is None:
            continue
        ref = ref_of(item.place)
        if item.verify and ref not in found:
            found[ref] = checksum_of(blocks[ref].data)
        differs = item.verify and found[ref] != item.checksum
        # Asked after the last byte was read. A block that was taken away in the meantime is stale, not corrupt.
        reason = arena.staleness(item.place)
        if differs and reason == _GOOD:
            reason = common.REASON_CHECKSUM_MISMATCH
            corrupt.add(ref)
        if reason != _GOOD:
            return reason
    return _GOOD
