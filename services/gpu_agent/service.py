"""The agent's methods: who may call, what is well-formed, and which part does the work."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import agent_pb2_grpc
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.errors import KvblendError
from services.common.identity import validate_spans
from services.common.lifecycle import Boot
from services.common.logs import get_logger
from services.common.metrics import Latencies
from services.common.tenants import ANY_TENANT, TenantPolicy
from services.common.tokens import decode_tokens
from services.gpu_agent.call import Call
from services.gpu_agent.copying.ranges import Range, parse_ranges
from services.gpu_agent.copying.retrieve import Retriever
from services.gpu_agent.copying.storing import Storer
from services.gpu_agent.devices.base import Device
from services.gpu_agent.engines.instances import Instance, Instances
from services.gpu_agent.engines.prove import prove_layout, prove_rope
from services.gpu_agent.lookup.lookups import Key, Lookups
from services.gpu_agent.lookup.requests import Tickets
from services.gpu_agent.store.sessions import StoreLink
from services.gpu_agent.totals import Totals

_log = get_logger("service")

_MAX_REQUEST_ID_BYTES = 128


@dataclass(frozen=True)
class Parts:
    """What the methods call, made by server.py."""

    boot: Boot
    policy: TenantPolicy
    device: Device
    link: StoreLink
    instances: Instances
    lookups: Lookups
    tickets: Tickets
    retriever: Retriever
    storer: Storer
    totals: Totals
    latencies: Latencies
    # Kept back of a lookup's time for the answer's way, and of a copy's for its last layers as well.
    margin_seconds: float
    engine_grace_seconds: float


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    # Who calls, and about what.

    def _owner(self, context: grpc.ServicerContext) -> str:
        return self._parts.policy.tenant_for(context, "")

    def _instance(self, instance_id: str, context: grpc.ServicerContext) -> Instance:
        return self._parts.instances.get(instance_id, self._owner(context))

    def _key(self, instance_id: str, request_id: str, context: grpc.ServicerContext) -> Key:
        if not 0 < len(request_id.encode()) <= _MAX_REQUEST_ID_BYTES:
            raise KvblendError("INVALID_ARGUMENT", f"request_id needs 1 to {_MAX_REQUEST_ID_BYTES} bytes")
        return self._owner(context), instance_id, request_id

    def _complete(self, space: common.Space, instance: Instance, context: grpc.ServicerContext) -> None:
        """Fills in the instance's model space and the tenant that the caller's identity gives."""
        space.tenant = self._parts.policy.tenant_for(context, space.tenant)
        own = instance.facts.model_space_id
        if space.model_space_id not in (b"", own):
            raise KvblendError("INVALID_SPACE", "model_space_id is not that of this instance's registration")
        space.model_space_id = own

    def _copying_call(self, context: grpc.ServicerContext, *watches: Callable[[], None]) -> Call:
        """Stops before its caller gives up: an engine uses the slots for something else from then on."""
        return Call(context, *watches, margin=self._parts.margin_seconds)

    # Registration

    def EngineSession(
        self, request_iterator: Iterator[pb.EngineSessionRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.EngineSessionResponse]:
        parts = self._parts
        first = next(request_iterator, None)
        if first is None or not first.instance_id:
            raise KvblendError("INVALID_ARGUMENT", "the first message must name the instance_id")
        instance_id, owner = first.instance_id, self._owner(context)
        parts.instances.stream_opened(instance_id, owner)
        try:
            yield pb.EngineSessionResponse(boot_id=parts.boot.boot_id)
            for _ in request_iterator:
                yield pb.EngineSessionResponse(boot_id=parts.boot.boot_id)
        except grpc.RpcError:
            # How grpc says that the other end has vanished.
            return
        finally:
            parts.instances.stream_ended(instance_id, owner)
            self._end_requests_later(instance_id, owner)

    def _end_requests_later(self, instance_id: str, owner: str) -> None:
        """After the grace, unless the engine has come back by then."""

        def end() -> None:
            if self._parts.instances.find(instance_id) is None:
                self._parts.lookups.end_all(instance_id, owner)

        timer = threading.Timer(self._parts.engine_grace_seconds, end)
        timer.daemon = True
        timer.start()

    def RegisterKvCache(
        self, request: pb.RegisterKvCacheRequest, context: grpc.ServicerContext
    ) -> pb.RegisterKvCacheResponse:
        parts, call = self._parts, Call(context)
        instance = parts.instances.register(
            request, self._owner(context), lambda space: parts.link.register(space, call.left()), call.left
        )
        info = parts.link.arena_info()
        _log.info("registered", instance=instance.instance_id, mapped_bytes=instance.memory.mapped_bytes)
        return pb.RegisterKvCacheResponse(
            boot_id=parts.boot.boot_id,
            model_space_id=instance.facts.model_space_id,
            chunk_tokens=instance.facts.chunk_tokens,
            hash_version=instance.facts.hash_version,
            object_format_version=instance.facts.object_format_version,
            epoch=info.epoch,
            store=info.store,
        )

    def UnregisterKvCache(
        self, request: pb.UnregisterKvCacheRequest, context: grpc.ServicerContext
    ) -> pb.UnregisterKvCacheResponse:
        existed = self._parts.instances.unregister(request.instance_id, self._owner(context), Call(context).left())
        return pb.UnregisterKvCacheResponse(existed=existed)

    def ProveLayout(self, request: pb.ProveLayoutRequest, context: grpc.ServicerContext) -> pb.ProveLayoutResponse:
        instance = self._instance(request.instance_id, context)
        return prove_layout(self._parts.device, instance, request, Call(context, instance.watch))

    def RegisterRope(self, request: pb.RegisterRopeRequest, context: grpc.ServicerContext) -> pb.RegisterRopeResponse:
        return pb.RegisterRopeResponse(relative_error=prove_rope(self._instance(request.instance_id, context), request))

    # Lookup

    def Lookup(
        self, request: pb.AgentServiceLookupRequest, context: grpc.ServicerContext
    ) -> pb.AgentServiceLookupResponse:
        instance = self._instance(request.instance_id, context)
        key = self._key(request.instance_id, request.request.request_id, context)
        # Taken out: every look at them in the message makes a copy.
        prompt = request.tokens
        request.ClearField("tokens")
        validate_spans(request.opaque_spans, len(decode_tokens(prompt)))
        self._complete(request.space, instance, context)
        call = Call(context)
        left = call.left() - self._parts.margin_seconds
        started = time.monotonic()
        job = self._parts.lookups.start_or_join(key, instance, request, prompt, left, call)
        # Half of the margin is for the store's last message to become an answer here.
        wait = left + self._parts.margin_seconds / 2 - (time.monotonic() - started)
        return pb.AgentServiceLookupResponse(answer=job.wait(0.0 if request.no_wait else wait))

    def GetLookup(self, request: pb.GetLookupRequest, context: grpc.ServicerContext) -> pb.GetLookupResponse:
        self._instance(request.instance_id, context)
        job = self._parts.lookups.find(self._key(request.instance_id, request.request_id, context))
        left = Call(context).left() - self._parts.margin_seconds / 2
        return pb.GetLookupResponse(answer=job.wait(min(request.wait_ms / 1000, left)))

    def ReleaseLookup(
        self, request: pb.ReleaseLookupRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseLookupResponse:
        self._instance(request.instance_id, context)
        job = self._parts.lookups.find(self._key(request.instance_id, request.request_id, context))
        job.wait(Call(context).left())
        ranges = parse_ranges(request.ranges, job.tokens) or [Range(0, job.tokens)]
        return pb.ReleaseLookupResponse(released=self._parts.lookups.release(job, ranges))

    def EndSession(self, request: pb.EndSessionRequest, context: grpc.ServicerContext) -> pb.EndSessionResponse:
        key = self._key(request.instance_id, request.request_id, context)
        self._parts.tickets.stop(key)
        self._parts.lookups.end(key)
        return pb.EndSessionResponse()

    # Copies

    def Retrieve(self, request: pb.RetrieveRequest, context: grpc.ServicerContext) -> pb.RetrieveResponse:
        instance = self._instance(request.instance_id, context)
        job = self._parts.lookups.find(self._key(request.instance_id, request.request.request_id, context))
        if request.request.attempt != job.attempt:
            raise KvblendError(
                "SUPERSEDED", f"attempt {request.request.attempt} is not the one looked up, which is {job.attempt}"
            )
        call = self._copying_call(context, instance.watch, job.watch)
        if job.wait(call.left()).state != pb.LOOKUP_STATE_DONE:
            raise KvblendError("DEADLINE_EXCEEDED", "the lookup was not done in time")
        return self._parts.retriever.retrieve(instance, job, request, call)

    def StoreKv(self, request: pb.StoreKvRequest, context: grpc.ServicerContext) -> pb.StoreKvResponse:
        instance = self._instance(request.instance_id, context)
        key = self._key(request.instance_id, request.request.request_id, context)
        tokens = len(decode_tokens(request.tokens))
        validate_spans(request.opaque_spans, tokens)
        decode_tokens(request.context.tokens, field="context", allow_empty=True)
        self._complete(request.space, instance, context)
        with self._parts.tickets.open(key) as ticket:
            call = self._copying_call(context, instance.watch, ticket.watch)
            return self._parts.storer.store_kv(instance, request, tokens, call)

    # Everything else

    def Clear(
        self, request: pb.AgentServiceClearRequest, context: grpc.ServicerContext
    ) -> pb.AgentServiceClearResponse:
        scope = request.scope
        kind = scope.WhichOneof("scope")
        if kind is None:
            raise KvblendError("INVALID_ARGUMENT", "what to clear is not given")
        # A space or everything may hold any tenant's text.
        named = {"tenant": scope.tenant, "document": scope.document.tenant}.get(kind, ANY_TENANT)
        tenant = self._parts.policy.tenant_for(context, named)
        if kind == "tenant":
            scope.tenant = tenant
        elif kind == "document":
            scope.document.tenant = tenant
        answer: store.ClearResponse = self._parts.link.client.call(
            "Clear", store.ClearRequest(scope=scope, force=request.force), Call(context).left()
        )
        return pb.AgentServiceClearResponse(
            removed_chunks=answer.removed_chunks,
            kept_leased_chunks=answer.kept_leased_chunks,
            removed_l2_chunks=answer.removed_l2_chunks,
        )

    def Score(
        self, request: pb.AgentServiceScoreRequest, context: grpc.ServicerContext
    ) -> pb.AgentServiceScoreResponse:
        instance = self._instance(request.instance_id, context)
        validate_spans(request.opaque_spans, len(decode_tokens(request.tokens)))
        self._complete(request.space, instance, context)
        answer: store.StoreServiceScoreResponse = self._parts.link.client.call(
            "Score",
            store.StoreServiceScoreRequest(
                space=request.space, tokens=request.tokens, opaque_spans=request.opaque_spans
            ),
            Call(context).left(),
        )
        return pb.AgentServiceScoreResponse(stores=answer.stores)

    def GetFormat(self, request: pb.GetFormatRequest, context: grpc.ServicerContext) -> pb.GetFormatResponse:
        facts = self._instance(request.instance_id, context).facts
        return pb.GetFormatResponse(
            chunk_tokens=facts.chunk_tokens,
            hash_version=facts.hash_version,
            object_format_version=facts.object_format_version,
        )

    def ReportBlockAllocation(
        self, request: pb.ReportBlockAllocationRequest, context: grpc.ServicerContext
    ) -> pb.ReportBlockAllocationResponse:
        instance = self._instance(request.instance_id, context)
        counts = [
            len(decode_tokens(item.block_ids, field="block_ids", allow_empty=True)) for item in request.allocations
        ]
        instance.allocated_blocks += sum(counts)
        self._parts.totals.add_allocations(request.allocations)
        return pb.ReportBlockAllocationResponse()

    def GetAgentStats(
        self, request: pb.GetAgentStatsRequest, context: grpc.ServicerContext
    ) -> pb.GetAgentStatsResponse:
        del request
        self._owner(context)
        totals = self._parts.totals.snapshot()
        return pb.GetAgentStatsResponse(
            instances=[self._instance_stats(instance) for instance in self._parts.instances.all()],
            retrieved_bytes=totals.retrieved_bytes,
            stored_bytes=totals.stored_bytes,
            retrieved_tokens=totals.retrieved_tokens,
            failed_tokens=totals.failed_tokens,
            latencies=self._parts.latencies.summaries(),
            device=self._parts.device.name,
        )

    def _instance_stats(self, instance: Instance) -> pb.InstanceStats:
        return pb.InstanceStats(
            instance_id=instance.instance_id,
            display_name=instance.space.display_name,
            rope_proven=instance.rope_proven,
            mapped_bytes=instance.memory.mapped_bytes,
            open_requests=len(self._parts.lookups.jobs_of(instance.instance_id)),
            allocated_blocks_reported=instance.allocated_blocks,
        )

    def PingAgent(self, request: pb.PingAgentRequest, context: grpc.ServicerContext) -> pb.PingAgentResponse:
        parts, owner = self._parts, self._owner(context)
        response = pb.PingAgentResponse(liveness=parts.boot.liveness([parts.link.dependency()]), epoch=parts.link.epoch)
        instance = parts.instances.find(request.instance_id)
        if instance is not None and instance.owner == owner:
            response.instance_registered = True
            since = [job.oldest_lease() for job in parts.lookups.jobs_of(request.instance_id)]
            ages = [time.monotonic() - start for start in since if start is not None]
            response.oldest_lease_ms = int(1000 * max(ages, default=0.0))
        return response
