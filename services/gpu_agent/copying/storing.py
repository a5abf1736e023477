"""Engine to arena: reserves, gathers, and commits when the copy has truly finished."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.checksums import checksum_of
from services.common.errors import KvblendError
from services.common.failpoints import passage
from services.common.logs import get_logger
from services.common.tokens import encode_u32
from services.gpu_agent.call import Call
from services.gpu_agent.copying.ranges import mask_of, parse_ranges
from services.gpu_agent.devices.base import Bytes, Device, Hung, KvMemory, Piece, Stopped
from services.gpu_agent.engines.instances import Instance
from services.gpu_agent.engines.order import wait_for_engine
from services.gpu_agent.engines.slots import Slots, SlotTable
from services.gpu_agent.lookup.leased import Ref, ref_of
from services.gpu_agent.lookup.lookups import NOT_ERRORS
from services.gpu_agent.lookup.requests import store_request_id
from services.gpu_agent.store.arena import Arena
from services.gpu_agent.store.client import UNCERTAIN
from services.gpu_agent.store.sessions import SETTLE_SECONDS, SessionLost, StoreLink, StoreSession
from services.gpu_agent.totals import Totals

_log = get_logger("storing")

_GOOD = common.REASON_UNSPECIFIED

# Why a commit was refused, as a chunk's reason.
_COMMIT_REASONS = NOT_ERRORS | {
    "UNKNOWN_RESERVATION": common.REASON_RESERVATION_EXPIRED,
    "RESERVATION_EXPIRED": common.REASON_RESERVATION_EXPIRED,
    "STALE_EPOCH": common.REASON_STALE_EPOCH,
}


@dataclass
class _Copy:
    """A granted chunk on its way, and what became of it."""

    grant: store.ChunkGrant
    # By layer group; groups that are stored already have none.
    blocks: dict[int, Bytes]
    # Of the blocks; None where the device had none.
    checksums: dict[int, int | None] = field(default_factory=dict)
    reason: common.Reason = _GOOD

    @property
    def good(self) -> bool:
        return self.reason == _GOOD


class Storer:
    def __init__(self, device: Device, link: StoreLink, totals: Totals) -> None:
        self._device = device
        self._link = link
        self._totals = totals

    def store_kv(self, instance: Instance, request: pb.StoreKvRequest, tokens: int, call: Call) -> pb.StoreKvResponse:
        """The outcome of every chunk. What is called STORED is visible to the next lookup.

        Raises:
            KvblendError: for a request that cannot be meant; then nothing has been reserved.
        """
        chunk_tokens = instance.facts.chunk_tokens
        if request.no_store:
            return _same_for_all(tokens, chunk_tokens, store.CHUNK_OUTCOME_DECLINED, common.REASON_NO_STORE)
        slots = SlotTable(request.slots, instance.layout).of(np.arange(tokens))
        exact, from_segments = _provenance(request, tokens, chunk_tokens)
        wait_for_engine(self._device, instance, request.event, call)
        try:
            session = self._link.session()
            reserve = _reserve_request(instance, session, request, exact, from_segments)
            with ExitStack() as held:
                memory = held.enter_context(instance.copying())
                arena = held.enter_context(session.copying())
                try:
                    return self._reserve_and_copy(instance, memory, arena, session, reserve, slots, call)
                except Hung as hung:
                    hung.keep(held)
                    raise
        except KvblendError as error:
            if error.reason not in NOT_ERRORS:
                raise
            return _same_for_all(tokens, chunk_tokens, store.CHUNK_OUTCOME_FAILED, NOT_ERRORS[error.reason])
        except SessionLost:
            return _same_for_all(tokens, chunk_tokens, store.CHUNK_OUTCOME_FAILED, common.REASON_SESSION_LOST)
        except Hung:
            return _same_for_all(tokens, chunk_tokens, store.CHUNK_OUTCOME_FAILED, common.REASON_COPY_FAILED)

    def _reserve_and_copy(
        self,
        instance: Instance,
        memory: KvMemory,
        arena: Arena,
        session: StoreSession,
        reserve: store.ReserveRequest,
        slots: Slots,
        call: Call,
    ) -> pb.StoreKvResponse:
        reservation = self._reserve(session, reserve, call)
        copies = [
            _open_grant(instance, arena, grant)
            for grant in reservation.chunks
            if grant.outcome == store.CHUNK_OUTCOME_GRANTED
        ]
        position = common.StreamPosition()
        if copies:
            try:
                passage("agent.gather")
                with self._link.client.latencies.timed("store.copy"):
                    written = _gather(instance, memory, arena, copies, slots, call)
            except Hung:
                # Quarantines the blocks: a lost session is called drained only when nothing copies in it any more.
                self._link.distrust(session)
                raise
            except BaseException:
                self._abort(session, reservation)
                raise
            passage("agent.commit")
            position = self._commit(session, reservation, copies, written, call)
        reasons = {copy.grant.first_token: copy.reason for copy in copies}
        self._totals.add_store(sum(block.nbytes for copy in copies if copy.good for block in copy.blocks.values()))
        return pb.StoreKvResponse(
            chunks=[_stored_chunk(grant, reasons) for grant in reservation.chunks], position=position
        )

    def _reserve(self, session: StoreSession, reserve: store.ReserveRequest, call: Call) -> store.ReserveResponse:
        try:
            return self._ask_to_reserve(reserve, call)
        except KvblendError as error:
            if error.reason in UNCERTAIN:
                # What the store may have reserved is known to nobody: only a new session frees it.
                self._link.distrust(session)
            if error.reason != "UNKNOWN_MODEL_SPACE":
                raise
        self._link.register_again()
        return self._ask_to_reserve(reserve, call)

    def _ask_to_reserve(self, reserve: store.ReserveRequest, call: Call) -> store.ReserveResponse:
        with self._link.client.latencies.timed("store.Reserve"):
            answer: store.ReserveResponse = self._link.client.call("Reserve", reserve, call.at_least(SETTLE_SECONDS))
        return answer

    def _commit(
        self,
        session: StoreSession,
        reservation: store.ReserveResponse,
        copies: list[_Copy],
        written: dict[Ref, store.WrittenObject],
        call: Call,
    ) -> common.StreamPosition:
        """Commits what was written whole; its refusals become the chunks' reasons."""
        if not any(copy.good for copy in copies):
            self._abort(session, reservation)
            return common.StreamPosition()
        refs = [ref_of(place) for copy in copies if copy.good for place in copy.grant.places]
        request = store.CommitRequest(
            session_id=session.session_id,
            reservation_id=reservation.reservation_id,
            written=[written[ref] for ref in refs],
        )
        try:
            with self._link.client.latencies.timed("store.Commit"):
                answer: store.CommitResponse = self._link.client.call("Commit", request, call.at_least(SETTLE_SECONDS))
        except KvblendError as error:
            _log.warning("a commit was refused", detail=str(error))
            if error.reason in UNCERTAIN:
                self._abort(session, reservation)
            _fail(copies, _COMMIT_REASONS.get(error.reason, common.REASON_COPY_FAILED))
            return common.StreamPosition()
        if len(answer.reasons) != len(refs):
            _fail(copies, common.REASON_COPY_FAILED)
            return answer.position
        reasons = dict(zip(refs, answer.reasons, strict=True))
        for copy in copies:
            if copy.good:
                places = (reasons[ref_of(place)] for place in copy.grant.places)
                copy.reason = next((reason for reason in places if reason != _GOOD), _GOOD)
        return answer.position

    def _abort(self, session: StoreSession, reservation: store.ReserveResponse) -> None:
        if not session.lost:
            request = store.AbortRequest(session_id=session.session_id, reservation_id=reservation.reservation_id)
            self._link.settle("Abort", request, session)


def _provenance(request: pb.StoreKvRequest, tokens: int, chunk_tokens: int) -> tuple[int, bytes]:
    """(leading exact tokens, per chunk the tokens that came from segments as little-endian u32)."""
    if request.kind == store.STORE_KIND_UNSPECIFIED:
        raise KvblendError("INVALID_ARGUMENT", "kind is not given")
    if request.kind == store.STORE_KIND_PROMPT and request.first_position:
        raise KvblendError("INVALID_ARGUMENT", "a prompt is stored from its first token: first_position must be 0")
    if request.kind == store.STORE_KIND_DOCUMENT and request.reused:
        raise KvblendError("INVALID_ARGUMENT", "a document cannot be made of reused segments")
    reused = mask_of(parse_ranges(request.reused, tokens), tokens)
    if not reused.any():
        return tokens, b""
    counts = np.add.reduceat(reused.astype(np.uint32), np.arange(0, tokens, chunk_tokens))
    return int(np.argmax(reused)), encode_u32(counts)


def _reserve_request(
    instance: Instance, session: StoreSession, request: pb.StoreKvRequest, exact: int, from_segments: bytes
) -> store.ReserveRequest:
    return store.ReserveRequest(
        session_id=session.session_id,
        request=common.RequestKey(
            request_id=store_request_id(instance.instance_id, request.request.request_id),
            attempt=request.request.attempt,
        ),
        rank=instance.rank,
        space=request.space,
        kind=request.kind,
        context=request.context,
        tokens=request.tokens,
        opaque_spans=request.opaque_spans,
        first_position=request.first_position,
        document=request.document,
        exact_tokens=exact,
        segment_tokens=from_segments,
        allow_blended=request.allow_blended,
    )


def _open_grant(instance: Instance, arena: Arena, grant: store.ChunkGrant) -> _Copy:
    """The blocks of a grant; unusable ones are a reason, not an error."""
    groups = instance.layout.groups
    copy = _Copy(grant, {})
    for place in grant.places:
        known = place.group < len(groups) and place.group not in copy.blocks
        if not known or place.payload_bytes != groups[place.group].token_bytes * grant.tokens:
            copy.reason = common.REASON_COPY_FAILED
            break
        try:
            copy.blocks[place.group] = arena.block(place.header, place.slab, place.offset, place.payload_bytes)
        except (ValueError, OSError) as error:
            _log.error("a granted block cannot be mapped", detail=str(error))
            copy.reason = common.REASON_OUT_OF_BOUNDS
            break
    return copy


def _gather(
    instance: Instance, memory: KvMemory, arena: Arena, copies: list[_Copy], slots: Slots, call: Call
) -> dict[Ref, store.WrittenObject]:
    """Copies all granted chunks, one pass over the layers of each group; (header, generation) -> what to commit."""
    written: dict[Ref, store.WrittenObject] = {}
    try:
        for group in range(len(instance.layout.groups)):
            wanted = [copy for copy in copies if copy.good and group in copy.blocks]
            if wanted:
                found = memory.gather(group, [_piece(copy, group, slots) for copy in wanted], call.watch)
                for copy, checksum in zip(wanted, found, strict=True):
                    copy.checksums[group] = checksum
        written = _seal(arena, [copy for copy in copies if copy.good])
        # Slots may be written by others once the request has ended: what was read since then is not its KV.
        call.watch()
    except Stopped as stopped:
        _fail(copies, stopped.reason)
    except Hung:
        raise
    except Exception as error:
        _log.error("a copy failed", exc_info=error)
        _fail(copies, common.REASON_COPY_FAILED)
    return written


def _piece(copy: _Copy, group: int, slots: Slots) -> Piece:
    first, tokens = copy.grant.first_token, copy.grant.tokens
    return Piece(copy.blocks[group], tokens, 0, slots[first : first + tokens], checked=True)


def _seal(arena: Arena, copies: list[_Copy]) -> dict[Ref, store.WrittenObject]:
    """Checksums of the chunks' objects, and whether the blocks were this reservation's to the end."""
    sealed: dict[Ref, store.WrittenObject] = {}
    for copy in copies:
        for place in copy.grant.places:
            checksum = copy.checksums[place.group]
            if checksum is None:
                checksum = checksum_of(copy.blocks[place.group].data)
            ref = store.ObjectRef(header=place.header, generation=place.generation)
            sealed[ref_of(place)] = store.WrittenObject(object=ref, checksum=checksum)
    headers, generations = np.array([*sealed], np.int64).reshape(-1, 2).T
    stale = dict(zip(sealed, arena.staleness(headers, generations).tolist(), strict=True))
    for copy in copies:
        reasons = (stale[ref_of(place)] for place in copy.grant.places)
        copy.reason = next((reason for reason in reasons if reason != _GOOD), _GOOD)
    return sealed


def _fail(copies: Iterable[_Copy], reason: common.Reason) -> None:
    for copy in copies:
        if copy.good:
            copy.reason = reason


def _stored_chunk(grant: store.ChunkGrant, reasons: dict[int, common.Reason]) -> pb.StoredChunk:
    outcome, reason = grant.outcome, grant.reason
    if outcome == store.CHUNK_OUTCOME_GRANTED:
        reason = reasons[grant.first_token]
        outcome = store.CHUNK_OUTCOME_STORED if reason == _GOOD else store.CHUNK_OUTCOME_FAILED
    return pb.StoredChunk(
        first_token=grant.first_token, tokens=grant.tokens, domain=grant.domain, outcome=outcome, reason=reason
    )


def _same_for_all(
    tokens: int, chunk_tokens: int, outcome: store.ChunkOutcome, reason: common.Reason
) -> pb.StoreKvResponse:
    return pb.StoreKvResponse(
        chunks=[
            pb.StoredChunk(first_token=first, tokens=min(chunk_tokens, tokens - first), outcome=outcome, reason=reason)
            for first in range(0, tokens, chunk_tokens)
        ]
    )
