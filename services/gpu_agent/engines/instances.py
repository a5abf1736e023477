"""Registered KV caches: one engine instance's memory, space and facts, from registration to its end."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.errors import KvblendError
from services.common.logs import get_logger
from services.gpu_agent.devices.base import SEMAPHORE_BYTES, Device, KvMemory, Stopped
from services.gpu_agent.engines.descriptors import DescriptorSlots
from services.gpu_agent.engines.layouts import Layout, check_layout
from services.gpu_agent.engines.rope import RopeSpec, rope_spec

_log = get_logger("instances")

_MAX_ID_BYTES = 128
# Copies of a vanished engine stop at the next layer.
_GONE_SECONDS = 10.0
# An engine that has opened no session stream so long after its registration has died in between.
_SESSION_SECONDS = 30.0


@dataclass(eq=False)
class Instance:
    """One registration. Its memory may be touched only inside `copying`, which keeps it mapped."""

    instance_id: str
    # Tenant of the caller that registered it; nobody else may use it.
    owner: str
    space: common.ModelSpace
    rank: common.Rank
    layout: Layout
    memory: KvMemory
    facts: store.RegisterModelSpaceResponse
    ropes: list[RopeSpec]
    # Names of the memory, which no two engine processes share.
    handles: list[bytes]
    rope_proven: bool = False
    allocated_blocks: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _copies: int = 0
    _closing: bool = False
    _gone: bool = False

    @property
    def moves_segments(self) -> bool:
        """K of every layer group may be moved: its rotation is proven, or there is none."""
        return self.rope_proven or all(rope.style == common.ROPE_STYLE_NONE for rope in self.ropes)

    def continues(self, old: "Instance") -> bool:
        """The same engine process registers the same memory and model again: what it has proven stays proven."""
        return (self.handles, self.facts.model_space_id, self.rank) == (old.handles, old.facts.model_space_id, old.rank)

    def watch(self) -> None:
        """Raises Stopped when the engine is gone: nobody needs its copies any more."""
        if self._gone:
            raise Stopped(common.REASON_SESSION_LOST)

    @contextmanager
    def copying(self) -> Iterator[KvMemory]:
        """Raises KvblendError UNKNOWN_INSTANCE once it is being closed, HANDLE_UNUSABLE if memory was taken back."""
        with self._changed:
            if self._closing:
                raise KvblendError("UNKNOWN_INSTANCE", f"instance {self.instance_id!r} has been replaced or closed")
            self._copies += 1
        try:
            self.memory.check()
            yield self.memory
        finally:
            with self._changed:
                self._copies -= 1
                if self._closing and not self._copies:
                    self.memory.close()
                self._changed.notify_all()

    def close(self, timeout: float, *, engine_gone: bool) -> bool:
        """Closes the mappings after the copies in flight, which stop early if the engine is gone.

        False: a copy still ran after `timeout` seconds; the mappings close when it ends.
        """
        with self._changed:
            self._closing = True
            self._gone = self._gone or engine_gone
            if not self._changed.wait_for(lambda: self._copies == 0, timeout):
                _log.warning("a copy does not end; its mappings are still open", instance=self.instance_id)
                return False
            self.memory.close()
            return True


class Instances:
    """All registrations by instance id, and the session streams of their engines."""

    def __init__(
        self, device: Device, slots: DescriptorSlots, max_mapped_bytes: int, on_end: Callable[[str, str], None]
    ) -> None:
        """`on_end(instance_id, owner)` is called when an instance's requests have lost their meaning."""
        self._device = device
        self._slots = slots
        self._max_mapped_bytes = max_mapped_bytes
        self._on_end = on_end
        self._lock = threading.Lock()
        # Registrations of one instance id follow each other, also while the old one waits for its copies.
        self._registering = threading.Lock()
        self._instances: dict[str, Instance] = {}
        # (instance id, owner) -> open session streams.
        self._streams: dict[tuple[str, str], int] = {}

    def get(self, instance_id: str, owner: str) -> Instance:
        """Raises KvblendError UNKNOWN_INSTANCE."""
        instance = self.find(instance_id)
        if instance is None or instance.owner != owner:
            raise KvblendError("UNKNOWN_INSTANCE", f"instance {instance_id!r} is not registered here")
        return instance

    def find(self, instance_id: str) -> Instance | None:
        with self._lock:
            return self._instances.get(instance_id)

    def all(self) -> list[Instance]:
        with self._lock:
            return list(self._instances.values())

    def register(
        self,
        request: pb.RegisterKvCacheRequest,
        owner: str,
        register_space: Callable[[common.ModelSpace], store.RegisterModelSpaceResponse],
        left: Callable[[], float],
    ) -> Instance:
        """Opens the new mapping, then closes the one it replaces. Raises KvblendError; then nothing has changed.

        `left` tells the call's remaining seconds. The engine's session stream must be open, or follow soon.
        """
        if not 0 < len(request.instance_id.encode()) <= _MAX_ID_BYTES:
            raise KvblendError("INVALID_ARGUMENT", f"instance_id needs 1 to {_MAX_ID_BYTES} bytes")
        had_stream = self._has_stream(request.instance_id, owner)
        layout = check_layout(request.layout, request.handles, request.model_space, request.rank)
        facts = register_space(request.model_space)
        if not self._registering.acquire(timeout=left()):
            raise KvblendError("OVERLOADED", "another registration is waiting for its transfers")
        try:
            old = self.find(request.instance_id)
            if old is not None and old.owner != owner:
                raise KvblendError("TENANT_NOT_ALLOWED", f"instance {request.instance_id!r} belongs to somebody else")
            self._check_room(request, old)
            ropes = [rope_spec(group.rope) for group in request.model_space.groups]
            instance = Instance(
                instance_id=request.instance_id,
                owner=owner,
                space=request.model_space,
                rank=request.rank,
                layout=layout,
                memory=self._open(request, layout, ropes),
                facts=facts,
                ropes=ropes,
                handles=[handle.handle for handle in request.handles],
            )
            instance.rope_proven = old is not None and instance.continues(old) and old.rope_proven
            self._enter(instance, had_stream)
        finally:
            self._registering.release()
        if old is not None:
            old.close(left(), engine_gone=False)
            if (old.facts.model_space_id, old.rank) != (facts.model_space_id, instance.rank):
                self._on_end(instance.instance_id, instance.owner)
        return instance

    def _enter(self, instance: Instance, had_stream: bool) -> None:
        """From now on it can be used, and is closed when its engine's last stream ends.

        An engine that had one and lost it while it registered is gone: nobody would ever close its mappings.
        """
        with self._lock:
            has_stream = (instance.instance_id, instance.owner) in self._streams
            if has_stream or not had_stream:
                self._instances[instance.instance_id] = instance
        if has_stream:
            return
        if had_stream:
            instance.memory.close()
            raise KvblendError("UNKNOWN_INSTANCE", "the engine's session ended while it registered")
        timer = threading.Timer(_SESSION_SECONDS, self._end_without_stream, [instance])
        timer.daemon = True
        timer.start()

    def _has_stream(self, instance_id: str, owner: str) -> bool:
        with self._lock:
            return (instance_id, owner) in self._streams

    def _end_without_stream(self, instance: Instance) -> None:
        with self._lock:
            held = (instance.instance_id, instance.owner) in self._streams
            if held or self._instances.get(instance.instance_id) is not instance:
                return
            del self._instances[instance.instance_id]
        _log.info("the engine has opened no session", instance=instance.instance_id)
        instance.close(_GONE_SECONDS, engine_gone=True)
        self._on_end(instance.instance_id, instance.owner)

    def _open(self, request: pb.RegisterKvCacheRequest, layout: Layout, ropes: list[RopeSpec]) -> KvMemory:
        semaphores = request.semaphores if request.HasField("semaphores") else None
        if semaphores is not None and (semaphores.allocation_offset % SEMAPHORE_BYTES or not semaphores.bytes):
            raise KvblendError("HANDLE_UNUSABLE", f"semaphores must be u64 at a multiple of {SEMAPHORE_BYTES} bytes")
        named = (*request.handles, *([semaphores] if semaphores is not None else []))
        with self._slots.claimed(request.instance_id, named) as descriptors:
            memory = self._device.open(request.handles, layout, semaphores, descriptors)
        try:
            memory.prepare(ropes)
        except BaseException:
            memory.close()
            raise
        return memory

    def _check_room(self, request: pb.RegisterKvCacheRequest, old: Instance | None) -> None:
        mapped = sum(instance.memory.mapped_bytes for instance in self.all() if instance is not old)
        wanted = sum(handle.bytes for handle in request.handles)
        if mapped + wanted > self._max_mapped_bytes:
            raise KvblendError(
                "HANDLE_UNUSABLE",
                f"{wanted} bytes beside {mapped} are more than max_mapped_bytes ({self._max_mapped_bytes})",
            )

    def unregister(self, instance_id: str, owner: str, timeout: float) -> bool:
        """Waits for transfers, closes every mapping. False: it was not registered.

        Raises:
            KvblendError: DEADLINE_EXCEEDED if a transfer did not end in time.
        """
        instance = self.find(instance_id)
        if instance is None or instance.owner != owner:
            return False
        self._end(instance, timeout, engine_gone=False)
        return True

    def _end(self, instance: Instance, timeout: float, *, engine_gone: bool) -> None:
        with self._lock:
            if self._instances.get(instance.instance_id) is instance:
                del self._instances[instance.instance_id]
        closed = instance.close(timeout, engine_gone=engine_gone)
        self._on_end(instance.instance_id, instance.owner)
        if not closed:
            raise KvblendError("DEADLINE_EXCEEDED", f"a transfer of {instance.instance_id!r} did not end in time")

    def stream_opened(self, instance_id: str, owner: str) -> None:
        with self._lock:
            self._streams[instance_id, owner] = self._streams.get((instance_id, owner), 0) + 1

    def stream_ended(self, instance_id: str, owner: str) -> None:
        """When it was the last one the engine is gone: its mappings close at once. Its requests are not ended here."""
        with self._lock:
            self._streams[instance_id, owner] -= 1
            if self._streams[instance_id, owner]:
                return
            del self._streams[instance_id, owner]
            instance = self._instances.get(instance_id)
            if instance is None or instance.owner != owner:
                return
            del self._instances[instance_id]
        _log.info("the engine is gone", instance=instance_id)
        instance.close(_GONE_SECONDS, engine_gone=True)

    def close(self) -> None:
        with self._lock:
            instances = list(self._instances.values())
            self._instances.clear()
        for instance in instances:
            instance.close(_GONE_SECONDS, engine_gone=True)
