"""The verbs, from an engine's side. No verb raises for cache trouble: the answer is "not cached".

One client serves one engine instance (one GPU's KV memory) and holds no cache state of its own: it may be
started before the services, survives their restarts, and its results say why nothing was reused.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvblend.connection import Connection
from kvblend.descriptors import Memory, NotSent, sent
from kvblend.host_calls.appended import Appended
from kvblend.results import (
    ClearResult,
    FormatResult,
    LookupResult,
    PingResult,
    ReleaseResult,
    Result,
    RetrieveResult,
    ScoreResult,
    Segments,
    Shortfall,
    StoredChunk,
    StoreResult,
    StoreScore,
    outcome_name,
    reason_name,
)
from kvblend.v1 import agent_pb2, store_pb2
from kvblend.v1 import common_pb2 as pb

Tokens = npt.ArrayLike

_KINDS = {"prompt": store_pb2.STORE_KIND_PROMPT, "document": store_pb2.STORE_KIND_DOCUMENT}


def token_bytes(tokens: Tokens) -> bytes:
    """Little-endian u32 bytes of token (or block) ids."""
    return np.ascontiguousarray(tokens, dtype="<u4").tobytes()


def _with_tokens(request: Any, tokens: Tokens) -> Appended:
    """The request with these tokens, which are not copied on their way."""
    return Appended(request, "tokens", np.ascontiguousarray(tokens, dtype="<u4").reshape(-1).view(np.uint8).data)


@dataclass(frozen=True)
class _KvCache:
    """A registration; `request` lacks the memories, which are named anew whenever it is sent."""

    request: agent_pb2.RegisterKvCacheRequest
    handles: Sequence[Memory]
    semaphores: Memory | None


class KvblendClient:
    """Every verb of an agent at `target` (host:port or unix:/path), for one engine instance.

    Timeouts are seconds. `token` is the bearer token of this caller, where the agent asks for one.
    """

    def __init__(self, target: str, instance_id: str, token: str | None = None) -> None:
        self.instance_id = instance_id
        self._target = target
        self._registering = threading.Lock()
        self._cache: _KvCache | None = None
        self._rope: agent_pb2.RegisterRopeRequest | None = None
        # The agent's boot that has these registrations.
        self._registered_at = b""
        self._connection = Connection(target, instance_id, token, self._register_again)
        self._stub = self._connection.stub

    @property
    def failures(self) -> dict[str, int]:
        """How often each reason turned a call into "not cached"."""
        return dict(self._connection.failures)

    def close(self) -> None:
        """Ends the session; the agent then forgets the instance. Stored text stays."""
        self._connection.close()

    # Registration

    def register_kv_cache(
        self,
        model_space: pb.ModelSpace,
        handles: Sequence[Memory],
        layout: agent_pb2.KvLayout,
        rank: pb.Rank | None = None,
        semaphores: Memory | None = None,
        timeout: float = 10.0,
    ) -> Result:
        """Tells the agent where this engine's KV lives, once it would notice that this engine ends: within `timeout`.

        Remembered: an agent that comes later, or restarts, is told by itself.

        Memories come from `SharedBuffer.handle` or `cuda_handle`. `semaphores` is memory of u64 for events and for
        retrieves in steps (cuda_semaphores.py).
        """
        request = agent_pb2.RegisterKvCacheRequest(
            instance_id=self.instance_id, model_space=model_space, layout=layout, rank=rank
        )
        with self._registering:
            self._cache, self._rope = _KvCache(request, handles, semaphores), None
            return self._send_cache(self._cache, timeout)

    def register_rope(
        self, ropes: Sequence[pb.Rope], proofs: Sequence[agent_pb2.RopeProof], timeout: float = 10.0
    ) -> Result:
        """Proves the rotary embedding; until then only prefixes are reused."""
        request = agent_pb2.RegisterRopeRequest(instance_id=self.instance_id, ropes=ropes, proofs=proofs)
        with self._registering:
            self._rope = request
            return self._send_rope(timeout)

    def prove_layout(
        self,
        tokens: int,
        expected_checksums: Sequence[int],
        *,
        first_slot: int = 0,
        block_ids: Tokens | None = None,
        event: agent_pb2.Event | None = None,
    ) -> Result:
        """Compares what the agent gathers from those slots with what the engine wrote there."""
        request = agent_pb2.ProveLayoutRequest(
            instance_id=self.instance_id,
            slots=self._slots(first_slot, block_ids),
            tokens=tokens,
            event=event or agent_pb2.Event(kind=agent_pb2.EVENT_KIND_COMPLETE),
            expected_checksums=np.asarray(expected_checksums, dtype="<u8").tobytes(),
        )
        response, reason, detail = self._connection.call(self._stub.ProveLayout, request, 10.0)
        if response is None:
            return Result(ok=False, reason=reason, detail=detail)
        return Result(ok=response.proven, reason="" if response.proven else "LAYOUT_UNKNOWN", detail=response.detail)

    def unregister_kv_cache(self, timeout: float = 30.0) -> Result:
        """Idempotent; waits for transfers in flight. Stored text stays."""
        with self._registering:
            self._cache = self._rope = None
        request = agent_pb2.UnregisterKvCacheRequest(instance_id=self.instance_id)
        _, reason, detail = self._connection.call(self._stub.UnregisterKvCache, request, timeout, register_again=False)
        return Result(ok=not reason, reason=reason, detail=detail)

    def _send_cache(self, cache: _KvCache, timeout: float) -> Result:
        deadline = time.monotonic() + timeout
        memories = [*cache.handles, *([cache.semaphores] if cache.semaphores is not None else [])]
        try:
            with sent(self._target, self.instance_id, memories, timeout) as handles:
                request = agent_pb2.RegisterKvCacheRequest(
                    handles=handles[: len(cache.handles)],
                    semaphores=handles[-1] if cache.semaphores is not None else None,
                )
                request.MergeFrom(cache.request)
                response, reason, detail = self._connection.call_in_session(
                    self._stub.RegisterKvCache, request, max(0.001, deadline - time.monotonic())
                )
        except NotSent as error:
            response, reason, detail = None, error.reason, str(error)
            self._connection.count(reason, detail)
        self._registered_at = response.boot_id if response is not None else b""
        return Result(ok=not reason, reason=reason, detail=detail)

    def _send_rope(self, timeout: float) -> Result:
        _, reason, detail = self._connection.call(self._stub.RegisterRope, self._rope, timeout, register_again=False)
        return Result(ok=not reason, reason=reason, detail=detail)

    def _register_again(self, boot_id: bytes) -> bool:
        """True if everything that this instance registered is there now; a no-op if it is since `boot_id`."""
        with self._registering:
            if self._cache is None or (boot_id and boot_id == self._registered_at):
                return True
            if not self._send_cache(self._cache, 5.0):
                return False
            return self._rope is None or bool(self._send_rope(5.0))

    # Lookup and retrieve

    def lookup(
        self,
        tokens: Tokens,
        request_id: str,
        *,
        attempt: int = 0,
        want_segments: bool = True,
        accept_blended: bool = False,
        context_classes: Sequence[pb.ContextClass] = (),
        tenant: str = "",
        adapter_digest: bytes = b"",
        cache_salt: bytes = b"",
        opaque_spans: Sequence[pb.OpaqueSpan] = (),
        prefill_tokens_per_second: int = 0,
        at_least: Sequence[pb.StreamPosition] = (),
        wait: bool = True,
        timeout: float = 2.0,
    ) -> LookupResult:
        """What of these tokens can be reused, leased for this request until `end_session`."""
        request = agent_pb2.AgentServiceLookupRequest(
            instance_id=self.instance_id,
            request=pb.RequestKey(request_id=request_id, attempt=attempt),
            space=self._space(tenant, adapter_digest, cache_salt),
            opaque_spans=opaque_spans,
            want_segments=want_segments,
            accept_blended=accept_blended,
            context_classes=context_classes,
            prefill_tokens_per_second=prefill_tokens_per_second,
            no_wait=not wait,
            at_least=at_least,
        )
        response, reason, detail = self._connection.call(self._stub.Lookup, _with_tokens(request, tokens), timeout)
        if response is None:
            count = len(np.atleast_1d(np.asarray(tokens)))
            shortfall = Shortfall(reason, count, detail)
            return LookupResult(
                ok=False, reason=reason, detail=detail, request_id=request_id, attempt=attempt, shortfalls=(shortfall,)
            )
        return _lookup_result(response.answer)

    def get_lookup(self, request_id: str, *, wait_ms: int = 0, timeout: float = 2.0) -> LookupResult:
        """The answer of a lookup that was started without waiting; the same until the request ends."""
        request = agent_pb2.GetLookupRequest(instance_id=self.instance_id, request_id=request_id, wait_ms=wait_ms)
        response, reason, detail = self._connection.call(self._stub.GetLookup, request, timeout)
        if response is None:
            return LookupResult(ok=False, reason=reason, detail=detail, request_id=request_id)
        return _lookup_result(response.answer)

    def release_lookup(
        self, request_id: str, ranges: Sequence[tuple[int, int]] = (), timeout: float = 2.0
    ) -> ReleaseResult:
        """Releases this request's leases on query ranges (first, length); all of them if none is given."""
        request = agent_pb2.ReleaseLookupRequest(
            instance_id=self.instance_id, request_id=request_id, ranges=_ranges(ranges)
        )
        response, reason, detail = self._connection.call(self._stub.ReleaseLookup, request, timeout)
        if response is None:
            return ReleaseResult(ok=False, reason=reason, detail=detail)
        return ReleaseResult(released=response.released)

    def retrieve(
        self,
        request_id: str,
        *,
        attempt: int = 0,
        first_slot: int = 0,
        block_ids: Tokens | None = None,
        ranges: Sequence[tuple[int, int]] = (),
        skip_first_tokens: int = 0,
        event: agent_pb2.Event | None = None,
        keep_leases: bool = False,
        steps: agent_pb2.LayerSteps | None = None,
        timeout: float = 10.0,
    ) -> RetrieveResult:
        """Copies looked-up KV into this engine's slots (first_slot + query position), K rotated to its place.

        Only ranges in `written` may be used; everything else must be computed. With `steps` the first layers may be
        used before this returns, but what comes of it is thrown away if they are not `written`. Where this returns
        neither `written` nor `failed` ranges the caller sets the semaphores that it waits for.
        """
        request = agent_pb2.RetrieveRequest(
            instance_id=self.instance_id,
            request=pb.RequestKey(request_id=request_id, attempt=attempt),
            slots=self._slots(first_slot, block_ids),
            ranges=_ranges(ranges),
            skip_first_tokens=skip_first_tokens,
            event=event or agent_pb2.Event(kind=agent_pb2.EVENT_KIND_COMPLETE),
            keep_leases=keep_leases,
            steps=steps,
        )
        response, reason, detail = self._connection.call(self._stub.Retrieve, request, timeout)
        if response is None:
            return RetrieveResult(ok=False, reason=reason, detail=detail)
        failed = tuple((f.range.first, f.range.length, reason_name(f.reason)) for f in response.failed)
        return RetrieveResult(
            ok=not failed,
            reason=failed[0][2] if failed else "",
            written=tuple((r.first, r.length) for r in response.written),
            failed=failed,
            bytes=response.bytes,
        )

    # Store

    def store(
        self,
        tokens: Tokens,
        request_id: str,
        *,
        attempt: int = 0,
        kind: str = "prompt",
        first_slot: int = 0,
        block_ids: Tokens | None = None,
        first_position: int = 0,
        context: Tokens = (),
        document: str = "",
        pinned: bool = False,
        ttl_seconds: int = 0,
        reused: Sequence[tuple[int, int]] = (),
        allow_blended: bool = False,
        no_store: bool = False,
        tenant: str = "",
        adapter_digest: bytes = b"",
        cache_salt: bytes = b"",
        opaque_spans: Sequence[pb.OpaqueSpan] = (),
        event: agent_pb2.Event | None = None,
        timeout: float = 30.0,
    ) -> StoreResult:
        """Keeps the KV of these tokens, which the engine holds from `first_slot` on.

        kind "prompt": from the prompt's first token; `reused` names query ranges that came from
        segments. kind "document": one text computed behind `context` (its tokens), a source of segments.
        `event` comes when these slots are written (cuda_semaphores.py); without one they are written already.
        """
        request = agent_pb2.StoreKvRequest(
            instance_id=self.instance_id,
            request=pb.RequestKey(request_id=request_id, attempt=attempt),
            space=self._space(tenant, adapter_digest, cache_salt),
            kind=_KINDS[kind],
            context=pb.Context(tokens=token_bytes(context)),
            opaque_spans=opaque_spans,
            first_position=first_position,
            document=store_pb2.DocumentOptions(document=document, pinned=pinned, ttl_seconds=ttl_seconds),
            slots=self._slots(first_slot, block_ids),
            event=event or agent_pb2.Event(kind=agent_pb2.EVENT_KIND_COMPLETE),
            reused=_ranges(reused),
            allow_blended=allow_blended,
            no_store=no_store,
        )
        response, reason, detail = self._connection.call(self._stub.StoreKv, _with_tokens(request, tokens), timeout)
        if response is None:
            return StoreResult(ok=False, reason=reason, detail=detail)
        chunks = tuple(_stored_chunk(chunk) for chunk in response.chunks)
        failed = [chunk.reason for chunk in chunks if chunk.outcome == "FAILED"]
        return StoreResult(ok=not failed, reason=failed[0] if failed else "", chunks=chunks, position=response.position)

    # Everything else

    def end_session(self, request_id: str, timeout: float = 2.0) -> Result:
        """Ends everything of a request, whatever it is doing. Idempotent."""
        request = agent_pb2.EndSessionRequest(instance_id=self.instance_id, request_id=request_id)
        _, reason, detail = self._connection.call(self._stub.EndSession, request, timeout)
        return Result(ok=not reason, reason=reason, detail=detail)

    def clear(self, scope: pb.ClearScope, *, force: bool = False, timeout: float = 30.0) -> ClearResult:
        """Forgets stored text in L1, L2 and the matcher; without force, leased chunks are kept and counted."""
        request = agent_pb2.AgentServiceClearRequest(scope=scope, force=force)
        response, reason, detail = self._connection.call(self._stub.Clear, request, timeout)
        if response is None:
            return ClearResult(ok=False, reason=reason, detail=detail)
        return ClearResult(
            removed_chunks=response.removed_chunks,
            kept_leased_chunks=response.kept_leased_chunks,
            removed_l2_chunks=response.removed_l2_chunks,
        )

    def score(
        self,
        tokens: Tokens,
        *,
        tenant: str = "",
        adapter_digest: bytes = b"",
        cache_salt: bytes = b"",
        timeout: float = 1.0,
    ) -> ScoreResult:
        """How many of these tokens each store could serve; takes no leases."""
        request = agent_pb2.AgentServiceScoreRequest(
            instance_id=self.instance_id,
            space=self._space(tenant, adapter_digest, cache_salt),
        )
        response, reason, detail = self._connection.call(self._stub.Score, _with_tokens(request, tokens), timeout)
        if response is None:
            return ScoreResult(ok=False, reason=reason, detail=detail)
        return ScoreResult(
            stores=tuple(StoreScore(s.store, s.prefix_tokens, s.anywhere_tokens) for s in response.stores)
        )

    def get_format(self, timeout: float = 2.0) -> FormatResult:
        """Chunk size, hash version and object format of this instance's space."""
        request = agent_pb2.GetFormatRequest(instance_id=self.instance_id)
        response, reason, detail = self._connection.call(self._stub.GetFormat, request, timeout)
        if response is None:
            return FormatResult(ok=False, reason=reason, detail=detail)
        return FormatResult(
            chunk_tokens=response.chunk_tokens,
            hash_version=response.hash_version,
            object_format_version=response.object_format_version,
        )

    def report_block_allocation(self, allocations: Sequence[agent_pb2.BlockAllocation], timeout: float = 1.0) -> Result:
        request = agent_pb2.ReportBlockAllocationRequest(instance_id=self.instance_id, allocations=allocations)
        _, reason, detail = self._connection.call(self._stub.ReportBlockAllocation, request, timeout)
        return Result(ok=not reason, reason=reason, detail=detail)

    def ping(self, timeout: float = 1.0) -> PingResult:
        request = agent_pb2.PingAgentRequest(instance_id=self.instance_id)
        response, reason, detail = self._connection.call(self._stub.PingAgent, request, timeout, register_again=False)
        if response is None:
            return PingResult(ok=False, reason=reason, detail=detail)
        return PingResult(
            boot_id=response.liveness.boot_id,
            instance_registered=response.instance_registered,
            oldest_lease_ms=response.oldest_lease_ms,
            dependencies=tuple((d.name, d.ready, d.detail) for d in response.liveness.dependencies),
        )

    @staticmethod
    def _space(tenant: str, adapter_digest: bytes, cache_salt: bytes) -> pb.Space:
        return pb.Space(tenant=tenant, adapter_digest=adapter_digest, cache_salt=cache_salt)

    @staticmethod
    def _slots(first_slot: int, block_ids: Tokens | None) -> agent_pb2.SlotMap:
        return agent_pb2.SlotMap(
            first_slot=first_slot, block_ids=token_bytes(block_ids) if block_ids is not None else b""
        )


def _ranges(ranges: Sequence[tuple[int, int]]) -> list[agent_pb2.TokenRange]:
    return [agent_pb2.TokenRange(first=first, length=length) for first, length in ranges]


def _stored_chunk(chunk: agent_pb2.StoredChunk) -> StoredChunk:
    return StoredChunk(
        first=chunk.first_token,
        tokens=chunk.tokens,
        domain=pb.Domain.Name(chunk.domain).removeprefix("DOMAIN_"),
        outcome=outcome_name(chunk.outcome),
        reason=reason_name(chunk.reason) if chunk.reason else "",
    )


def _lookup_result(answer: agent_pb2.LookupAnswer) -> LookupResult:
    return LookupResult(
        request_id=answer.request.request_id,
        attempt=answer.request.attempt,
        done=answer.state == agent_pb2.LOOKUP_STATE_DONE,
        prefix_tokens=answer.prefix_tokens,
        blended_tokens=answer.blended_tokens,
        segments=Segments(answer.segments),
        shortfalls=tuple(Shortfall(reason_name(s.reason), s.tokens, s.detail) for s in answer.shortfalls),
        l1_chunks=answer.l1_chunks,
        l2_chunks=answer.l2_chunks,
    )
