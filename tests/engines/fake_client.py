"""A client without services: stored KV in a list, and the agent's work on the engine's memory done in torch."""

from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from kvblend.results import LookupResult, Result, RetrieveResult, Segment, StoredChunk, StoreResult
from kvblend.v1 import common_pb2 as pb

_DTYPES = {pb.DTYPE_FLOAT32: torch.float32, pb.DTYPE_BFLOAT16: torch.bfloat16}


@dataclass
class Stored:
    """KV [layers, 2, n, kv_heads, size] of tokens at `position` behind `context`."""

    kind: str
    tokens: np.ndarray
    context: np.ndarray
    position: int
    kv: torch.Tensor
    document: str


@dataclass
class Found:
    stored: Stored
    query_position: int
    length: int


@dataclass
class FakeClient:
    """`rotate`: False forgets to move K. `fail`: query ranges that cannot be retrieved. `down`: a reason that
    every verb fails with. `silent`: verbs of which no word comes back."""

    rotate: bool = True
    fail: list[tuple[int, int]] = field(default_factory=list)
    down: str = ""
    silent: set[str] = field(default_factory=set)
    stored: list[Stored] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    last_store: dict[str, object] = field(default_factory=dict)

    def register_kv_cache(self, model_space, handles, layout, timeout):  # type: ignore[no-untyped-def]
        self.calls.append("register_kv_cache")
        if self.down:
            return Result(ok=False, reason=self.down)
        group = model_space.groups[0]
        shape = (group.layers, 2, layout.block_tokens, group.kv_heads, group.head_size)
        raw = np.memmap(f"/dev/shm/{handles[0].handle.decode()}", dtype=np.uint8, mode="r+")
        self.kv = torch.from_numpy(raw).view(_DTYPES[layout.dtype])[: prod(shape)].view(shape)
        self.inv_freq = torch.from_numpy(np.frombuffer(group.rope.inv_freq, "<f8").copy())
        return Result()

    def register_rope(self, ropes, proofs, timeout):  # type: ignore[no-untyped-def]
        self.calls.append("register_rope")
        return Result()

    def unregister_kv_cache(self, timeout):  # type: ignore[no-untyped-def]
        self.calls.append("unregister_kv_cache")
        return Result()

    def store(self, tokens, request_id, *, kind, first_slot=0, first_position=0, context=(), document="", **options):  # type: ignore[no-untyped-def]
        self.calls.append("store")
        self.open.add(request_id)
        self.last_store = options | {"first_slot": first_slot, "first_position": first_position}
        if self.down or "store" in self.silent:
            return StoreResult(ok=False, reason=self.down or "DEADLINE")
        reused = options.get("reused") or [(len(tokens), 0)]
        tokens = np.asarray(tokens)[: reused[0][0]]
        kv = self.kv[:, :, first_slot : first_slot + len(tokens)].clone()
        self.stored.append(Stored(kind, tokens, np.asarray(context, np.uint32), first_position, kv, document))
        return StoreResult(chunks=(StoredChunk(0, len(tokens), "EXACT", "STORED"),))

    def lookup(self, tokens, request_id, *, want_segments, timeout, **options):  # type: ignore[no-untyped-def]
        self.calls.append("lookup")
        self.open.add(request_id)
        if self.down:
            return LookupResult(ok=False, reason=self.down, request_id=request_id)
        prompts = [item for item in self.stored if item.kind == "prompt"]
        best = max(prompts, key=lambda item: _common(item.tokens, tokens), default=None)
        prefix = min(_common(best.tokens, tokens), len(tokens) - 1) if best else 0
        self.found = [Found(best, 0, prefix)] if best and prefix else []
        segments = []
        position = prefix
        while want_segments and position < len(tokens):
            item = next((item for item in self.stored if _common(item.tokens, tokens[position:]) >= 16), None)
            if item is None:
                position += 1
                continue
            length = min(_common(item.tokens, tokens[position:]), len(tokens) - 1 - position)
            self.found.append(Found(item, position, length))
            segments.append(Segment(position, item.position, length, item.document))
            position += length
        return LookupResult(request_id=request_id, prefix_tokens=prefix, segments=tuple(segments))

    def retrieve(self, request_id, *, timeout):  # type: ignore[no-untyped-def]
        self.calls.append("retrieve")
        assert request_id in self.open
        if self.down or "retrieve" in self.silent:
            return RetrieveResult(ok=False, reason=self.down or "DEADLINE")
        written = []
        for found in self.found:
            good = [p for p in range(found.length) if not self._failing(found.query_position + p)]
            for offset in good:
                self._write(found, offset)
            written += [(found.query_position + offset, 1) for offset in good]
        failed = tuple((first, length, "EVICTED") for first, length in self.fail)
        return RetrieveResult(ok=not failed, written=tuple(written), failed=failed)

    def end_session(self, request_id, timeout):  # type: ignore[no-untyped-def]
        self.calls.append("end_session")
        self.open.discard(request_id)
        return Result(ok=not self.down, reason=self.down)

    def _failing(self, position: int) -> bool:
        return any(first <= position < first + length for first, length in self.fail)

    def _write(self, found: Found, offset: int) -> None:
        slot = found.query_position + offset
        kv = found.stored.kv[:, :, offset]
        delta = slot - (found.stored.position + offset)
        self.kv[:, 1, slot] = kv[:, 1]
        self.kv[:, 0, slot] = rotated(kv[:, 0], self.inv_freq, delta if self.rotate else 0)


def rotated(key: torch.Tensor, inv_freq: torch.Tensor, delta: int) -> torch.Tensor:
    """K [..., size] moved by `delta` positions, pairs (i, i + size / 2)."""
    cos, sin = torch.cos(delta * inv_freq), torch.sin(delta * inv_freq)
    first, second = key.double().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(key.dtype)


def _common(stored: np.ndarray, tokens: np.ndarray) -> int:
    length = min(len(stored), len(tokens))
    same = stored[:length] == tokens[:length]
    return length if same.all() else int(same.argmin())
