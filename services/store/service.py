"""The methods of StoreService: messages in and out; the work is in the modules behind."""

from collections.abc import Iterable, Iterator

import grpc

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2, store_pb2_grpc
from services.common.arena_format import FORMAT_VERSION
from services.common.caller import Caller
from services.common.errors import KvblendError
from services.common.failpoints import passage
from services.common.identity import HASH_VERSION, OBJECT_FORMAT_VERSION
from services.common.lifecycle import Boot
from services.common.metrics import Latencies
from services.common.tenants import TenantPolicy
from services.store.check.checks import Checks
from services.store.clearing import clear, validate_scope
from services.store.keeping import copies_stopped
from services.store.leasing.leases import HolderKey, Ref
from services.store.lookup.query import make_query
from services.store.lookup.scoring import score
from services.store.parts import Parts
from services.store.reports import dependencies, stats_of
from services.store.spaces import ResolvedSpace
from services.store.writing.admission import cut, wishes_of
from services.store.writing.writes import Promise

_MAX_REQUEST_ID_BYTES = 128
# For a call that needs L2 or a matcher and came without much time.
_LEAST_SECONDS = 0.001


class StoreServicer(store_pb2_grpc.StoreServiceServicer):
    def __init__(self, parts: Parts, boot: Boot, tenants: TenantPolicy, latencies: Latencies) -> None:
        self._parts = parts
        self._boot = boot
        self._tenants = tenants
        self._latencies = latencies
        self._checks = Checks(parts)

    def _arena_info(self) -> store_pb2.ArenaInfo:
        arena = self._parts.arena
        return store_pb2.ArenaInfo(
            directory=str(arena.directory),
            epoch=arena.epoch,
            slabs=arena.slabs,
            slab_bytes=arena.slab_bytes,
            headers=arena.headers,
            format_version=FORMAT_VERSION,
            store=self._parts.name,
        )

    def _space(self, space: pb.Space, context: grpc.ServicerContext) -> ResolvedSpace:
        return self._parts.spaces.resolve(space, self._tenants.tenant_for(context, space.tenant))

    # Sessions and spaces.

    def Session(
        self, request_iterator: Iterator[store_pb2.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[store_pb2.SessionResponse]:
        hello = next(request_iterator, None)
        if hello is None:
            return
        sessions = self._parts.sessions
        sessions.hello(hello.session_id, hello.agent)
        try:
            yield store_pb2.SessionResponse(boot_id=self._boot.boot_id, arena=self._arena_info())
            for _ in request_iterator:
                sessions.require(hello.session_id)
                yield store_pb2.SessionResponse(
                    boot_id=self._boot.boot_id, revoked_leases=self._parts.state.stats.get("revoked_leases")
                )
        except Exception:
            if context.is_active():
                raise
            # The agent is gone: its stream ends in an error that nobody reads.
        finally:
            sessions.goodbye(hello.session_id)

    def RegisterModelSpace(
        self, request: store_pb2.RegisterModelSpaceRequest, _context: grpc.ServicerContext
    ) -> store_pb2.RegisterModelSpaceResponse:
        identity, shape = self._parts.spaces.register(request.model_space)
        return store_pb2.RegisterModelSpaceResponse(
            model_space_id=identity,
            chunk_tokens=shape.chunk_tokens,
            hash_version=HASH_VERSION,
            object_format_version=OBJECT_FORMAT_VERSION,
        )

    # Reading.

    def Lookup(
        self, request: store_pb2.LookupRequest, context: grpc.ServicerContext
    ) -> Iterator[store_pb2.LookupResponse]:
        self._parts.sessions.require(request.session_id)
        space = self._space(request.space, context)
        query = make_query(request, space)
        holder = _holder(request.session_id, request.request, space.shape.rank_number(request.rank))
        lookups = self._parts.lookups
        context.add_callback(lambda: lookups.give_up(holder))
        yield from lookups.run(query, holder, request.at_least, _remaining(context), Caller(context))

    def BeginCopy(
        self, request: store_pb2.BeginCopyRequest, _context: grpc.ServicerContext
    ) -> store_pb2.BeginCopyResponse:
        self._parts.sessions.require(request.session_id)
        holder = _holder(request.session_id, request.request, request.rank.tensor)
        state = self._parts.state
        with state.lock:
            reasons = [state.begin_copy(holder, ref) for ref in _refs(request.objects)]
        return store_pb2.BeginCopyResponse(reasons=reasons, epoch=self._parts.arena.epoch)

    def EndCopy(self, request: store_pb2.EndCopyRequest, _context: grpc.ServicerContext) -> store_pb2.EndCopyResponse:
        holder = _holder(request.session_id, request.request, request.rank.tensor)
        state = self._parts.state
        with state.lock:
            corrupt = _refs(request.corrupt)
            for ref in corrupt:
                state.report_corrupt(holder, ref)
            for ref in dict.fromkeys([*_refs(request.objects), *corrupt]):
                state.end_copy(holder, ref, request.keep)
        return store_pb2.EndCopyResponse()

    def ReleaseLeases(
        self, request: store_pb2.ReleaseLeasesRequest, _context: grpc.ServicerContext
    ) -> store_pb2.ReleaseLeasesResponse:
        holder = _holder(request.session_id, request.request, request.rank.tensor)
        with self._parts.state.lock:
            released = self._parts.state.leases.release(holder, _refs(request.objects))
        return store_pb2.ReleaseLeasesResponse(released=released)

    def EndRequests(
        self, request: store_pb2.EndRequestsRequest, _context: grpc.ServicerContext
    ) -> store_pb2.EndRequestsResponse:
        for request_id in request.request_ids:
            self._parts.lookups.end_request(request.session_id, request_id)
        return store_pb2.EndRequestsResponse()

    # Writing.

    def Reserve(self, request: store_pb2.ReserveRequest, context: grpc.ServicerContext) -> store_pb2.ReserveResponse:
        parts = self._parts
        parts.sessions.require(request.session_id)
        space = self._space(request.space, context)
        rank = space.shape.rank_number(request.rank)
        chunks = cut(request, space)
        state = parts.state
        with state.lock:
            wishes = wishes_of(
                request,
                space,
                chunks,
                lambda chunk, share: parts.admission.admits(
                    chunk.chain_hash, rank, share, chunk.tokens, state.usage.duplicate_bytes
                ),
            )
        options = request.document
        expires_at = state.clock.wall() + options.ttl_seconds if options.ttl_seconds else 0.0
        promise = Promise(options.document, options.pinned, expires_at)
        number, grants = parts.writes.reserve(request.session_id, space, request.rank, wishes, promise)
        passage("reserve.answer")
        return store_pb2.ReserveResponse(
            reservation_id=number, chunks=grants, ttl_ms=int(1e3 * parts.writes.ttl), epoch=parts.arena.epoch
        )

    def Commit(self, request: store_pb2.CommitRequest, _context: grpc.ServicerContext) -> store_pb2.CommitResponse:
        written = [((item.object.header, item.object.generation), item.checksum) for item in request.written]
        reasons, position = self._parts.writes.commit(request.session_id, request.reservation_id, written)
        passage("commit.answer")
        return store_pb2.CommitResponse(reasons=reasons, position=position)

    def Abort(self, request: store_pb2.AbortRequest, _context: grpc.ServicerContext) -> store_pb2.AbortResponse:
        self._parts.writes.abort(request.session_id, request.reservation_id)
        return store_pb2.AbortResponse()

    def ReportDrained(
        self, request: store_pb2.ReportDrainedRequest, _context: grpc.ServicerContext
    ) -> store_pb2.ReportDrainedResponse:
        freed = copies_stopped(self._parts.state, self._parts.writes, request.session_id)
        return store_pb2.ReportDrainedResponse(freed_objects=freed)

    # Operating.

    def Clear(self, request: store_pb2.ClearRequest, context: grpc.ServicerContext) -> store_pb2.ClearResponse:
        parts = self._parts
        validate_scope(request.scope)
        self._check_may_clear(request.scope, context)
        return clear(parts.state, parts.writes, parts.l2, request.scope, request.force, _remaining(context))

    def _check_may_clear(self, scope: pb.ClearScope, context: grpc.ServicerContext) -> None:
        """The caller must be allowed to act for every tenant whose text goes."""
        kind = scope.WhichOneof("scope")
        if kind == "tenant":
            self._tenants.tenant_for(context, scope.tenant)
        elif kind == "document":
            self._tenants.tenant_for(context, scope.document.tenant)
        else:
            with self._parts.state.lock:
                tenants = {chunk.info.tenant for chunk in self._parts.state.catalog.matching(scope)}
            for tenant in tenants:
                self._tenants.tenant_for(context, tenant)

    def CheckStore(
        self, request: store_pb2.CheckStoreRequest, context: grpc.ServicerContext
    ) -> Iterator[store_pb2.CheckStoreResponse]:
        if request.fix:
            self._check_may_clear(pb.ClearScope(everything=True), context)
        yield from self._checks.run(request.fix, lambda: _remaining(context) - _LEAST_SECONDS)

    def Score(
        self, request: store_pb2.StoreServiceScoreRequest, context: grpc.ServicerContext
    ) -> store_pb2.StoreServiceScoreResponse:
        lookup = store_pb2.LookupRequest(tokens=request.tokens, opaque_spans=request.opaque_spans)
        query = make_query(lookup, self._space(request.space, context))
        return score(self._parts.state, self._parts.matchers, query, self._parts.name, _remaining(context))

    def GetStoreStats(
        self, _request: store_pb2.GetStoreStatsRequest, _context: grpc.ServicerContext
    ) -> store_pb2.GetStoreStatsResponse:
        return stats_of(self._parts, self._latencies.summaries())

    def PingStore(
        self, _request: store_pb2.PingStoreRequest, _context: grpc.ServicerContext
    ) -> store_pb2.PingStoreResponse:
        return store_pb2.PingStoreResponse(
            liveness=self._boot.liveness(dependencies(self._parts)), arena=self._arena_info()
        )


def _holder(session: bytes, request: pb.RequestKey, rank: int) -> HolderKey:
    size = len(request.request_id.encode())
    if not 0 < size <= _MAX_REQUEST_ID_BYTES:
        raise KvblendError("INVALID_ARGUMENT", f"request_id has {size} bytes; 1 to {_MAX_REQUEST_ID_BYTES} are allowed")
    return HolderKey(session, request.request_id, request.attempt, rank)


def _refs(refs: Iterable[store_pb2.ObjectRef]) -> list[Ref]:
    return [(ref.header, ref.generation) for ref in refs]


def _remaining(context: grpc.ServicerContext) -> float:
    return max(context.time_remaining() or 0.0, _LEAST_SECONDS)
