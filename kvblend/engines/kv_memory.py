"""The engine's KV buffer in shared memory, and its registration with the agent."""

from math import prod

import torch

from kvblend.client import KvblendClient
from kvblend.engines.held import Held
from kvblend.layouts import KvShape, buffer_bytes, build_layout
from kvblend.memory import SharedBuffer
from kvblend.results import Result
from kvblend.v1 import agent_pb2
from kvblend.v1 import common_pb2 as pb

_REGISTER_SECONDS = 5.0


class KvMemory:
    """One contiguous buffer with a slot for each token.

    A buffer that the agent may still read or write, because a call was given up, is never used again: after
    `abandon` the next use gets a new one, and the agent is left alone with the old one.

    held: what is in the slots; kept up by the engine, nothing after `abandon`.
    """

    _abandoned: bool
    _registered: bool
    _rope_settled: bool

    def __init__(
        self, client: KvblendClient, space: pb.ModelSpace, proof: agent_pb2.RopeProof, slots: int, dtype: torch.dtype
    ) -> None:
        group = space.groups[0]
        self._shape = KvShape.contiguous(group.layers, group.kv_heads, group.head_size, slots, space.kv_dtype)
        self._dims = (group.layers, 2, slots, group.kv_heads, group.head_size)
        self._client = client
        self._space = space
        self._proof = proof
        self._dtype = dtype
        self.held = Held.nothing()
        self._open()

    @property
    def slots(self) -> int:
        return self._dims[2]

    @property
    def kv(self) -> torch.Tensor:
        """[layers, 2, slots, kv_heads, size]. Do not keep it: another buffer may take its place."""
        self._renew()
        return self._kv

    def abandon(self) -> None:
        self._abandoned = True
        self.held = Held.nothing()

    def register(self) -> Result:
        """Good once the agent knows this very buffer; only then may it be asked to read or write KV.

        Asked before every use: an agent that was down when the engine started is told as soon as it is up.
        """
        self._renew()
        if not self._registered:
            layout = build_layout("contiguous", self._shape)
            handles = [self._buffer.handle()]
            result = self._client.register_kv_cache(self._space, handles, layout, timeout=_REGISTER_SECONDS)
            if not result:
                return result
            self._registered = True
        if not self._rope_settled:
            proven = self._client.register_rope([self._rope], [self._proof], timeout=_REGISTER_SECONDS)
            # A refusal is final, and no reason to lose prefix reuse, which moves nothing.
            self._rope_settled = proven.ok or proven.reason == "ROPE_MISMATCH"
        return Result()

    def close(self) -> None:
        """The buffer's name is gone and its memory with the last view. Idempotent."""
        self._kv = torch.empty(0)
        self._buffer.close()

    @property
    def _rope(self) -> pb.Rope:
        return self._space.groups[0].rope

    def _renew(self) -> None:
        if self._abandoned:
            self.close()
            self._open()

    def _open(self) -> None:
        (nbytes,) = buffer_bytes("contiguous", self._shape)
        self._buffer = SharedBuffer(nbytes)
        flat = torch.from_numpy(self._buffer.array).view(self._dtype)
        self._kv = flat[: prod(self._dims)].view(self._dims)
        self._abandoned = self._registered = False
        self._rope_settled = self._rope.style == pb.ROPE_STYLE_NOT_RELATIVE
